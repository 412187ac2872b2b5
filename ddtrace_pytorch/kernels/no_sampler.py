"""In the sampler's place where kernels aren't counted, as in most jobs, which go without what that takes to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.training.progress import Step


class NoSampler:
    """Counts nothing."""

    tracer: Any = None
    wake: Callable[[], object] = staticmethod(lambda: None)

    def open(self, at_turns: Callable[[Callable[[], object]], object]) -> None: ...

    def takes(self, step: Step) -> bool:
        return False

    def take(self) -> None: ...

    def beat(self) -> None: ...

    def summarise(self) -> None: ...

    def close(self, deadline: Deadline) -> None: ...

    def abandon(self) -> None: ...
