"""A training in this process whose kernels are counted: the sampler as it is built, and a libcupti that replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.kernels.native import Context, NativeParent
from ddtrace_pytorch.kernels.profilers import Profilers
from ddtrace_pytorch.kernels.sampler import Sampler
from ddtrace_pytorch.kernels.sampler_library import SamplerLibrary
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import load
from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.training.observer import Training
from ddtrace_pytorch.training.progress import Progress
from ddtrace_pytorch.training.steps import Steps
from harness.exporter import KeepingExporter
from harness.kernel_sampler import MockCupti, Record


class NoGpu:
    """Stands for the GPU, which is past everything at once, or as far `behind` as a test wants, in turns."""

    def __init__(self) -> None:
        self.there, self.capturing, self.behind = True, False, 0
        self.why: str | None = None
        self.asked: list[str] = []

    def is_there(self) -> bool:
        return self.there

    def obstacle(self) -> str | None:
        return self.why

    def mark(self) -> Any:
        self.asked.append("mark")
        return None if self.capturing else object()

    def has_passed(self, mark: Any) -> bool:
        assert mark is not None
        self.behind -= 1
        return self.behind < 0


def kernels(*names_and_ns: tuple[bytes, int], stream: int = 7) -> list[Record]:
    """One after the other, from a moment ago on."""
    at = time.time_ns()
    found = []
    for name, took in names_and_ns:
        found.append(Record(at, at + took, name, stream=stream))
        at += took
    return found


class SampledJob:
    """One rank, whose optimizer steps when it is told to, and launches `launched` in each step."""

    def __init__(self, library: Path, cupti: MockCupti, **settings: str) -> None:
        self.exporter: Any = KeepingExporter()
        chosen = load({"DD_PYTORCH_STEP_SAMPLE": "0"} | settings)
        self.span, self.steps = RankSpan(service="pytorch", rank=0, start=1, facts={}), Steps(Progress(), int, int)
        self.cupti, self.gpu, self.profilers = cupti, NoGpu(), Profilers()
        self.library = SamplerLibrary(library)
        assert self.library.open(str(cupti.library)) == 0, self.library.error
        self.sampler = Sampler(
            chosen,
            Clock(),
            self.span,
            self.exporter,
            self.steps,
            self.profilers,
            self.library,
            self.gpu,  # type: ignore[arg-type]
        )
        self.native = NativeParent(self._context, ours=self.sampler.tracer)
        self.training = Training(chosen, Clock(), self.span, self.exporter, self.steps, None)
        self.training.chosen = self.sampler.takes
        self.launched: Callable[[int], Sequence[Record]] = lambda step: kernels((b"gemm", 3_000), (b"relu", 1_000))
        self._undo = self.steps.watch()
        self.steps.begin_anew(1)
        self.native.look()
        self.training.open()
        self.sampler.open(self.training.at_turns)
        self._net = torch.nn.Linear(4, 4)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.1)
        cupti.calls()

    def _context(self) -> Context:
        return Context(self.span.piece.trace_id, self.span.piece.span_id, 2, (("rank", "0"),))

    @property
    def number(self) -> int:
        return self.steps.next_number or 0

    def train(self, until: int, then: Callable[[], object] = lambda: None) -> None:
        """Until the step of that number begins; what was sampled is told after each."""
        while self.number < until:
            self.cupti.replay(self.launched(self.number))
            self._net(torch.ones(1, 4)).sum().backward()
            self._optimizer.step()
            then()
            self.tell()

    def tell(self) -> None:
        self.training.beat()
        self.sampler.take()
        self.sampler.beat()

    def told(self) -> list[dict[str, Any]]:
        return [one for one in self.exporter.records if one["type"] == "kernels"]

    def spans(self, name: str) -> list[SpanRecord]:
        return [one for one in self.exporter.spans if one.name == name]

    def end(self) -> None:
        self.training.close(interrupted=False, over=True)
        self.sampler.close(Deadline(30))
        self.native.take_back()
        self._undo()
