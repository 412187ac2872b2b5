"""Optimizer steps, through torch's own global hook: no optimizer is wrapped, and every class of them is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.training.progress import Progress, Step

Undo = Callable[[], None]


class Steps:
    """Calls `first` after the first optimizer step and `every` after each, on the thread that trains."""

    def __init__(self, progress: Progress, first: Callable[[], object], every: Callable[[], object]) -> None:
        self._progress = progress
        self._first = first
        self._every = every
        self._fresh = True

    def begin_anew(self) -> None:
        """The next step is a first one again."""
        self._fresh = True

    def set(self, number: int, relative: int | None = None) -> None:
        """The user says which step begins here."""
        self._progress.step = Step(number, relative)

    def watch(self) -> Undo:
        """Register with torch; gives what undoes it."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        # torch.compile traces the hook too, and finds nothing in it; 2.0 and 2.1 lack the function, and break there.
        is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_compiling():
                return
            if self._fresh:
                self._fresh = False
                self._first()
            self._every()

        undo: Undo = register_optimizer_step_post_hook(after_step).remove
        return undo
