"""Optimizer steps, through torch's own global hook: no optimizer is wrapped, and every class of them is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


class Steps:
    """Calls `first` after the first optimizer step and `every` after each, on the thread that trains."""

    def __init__(self, first: Callable[[], object], every: Callable[[], object]) -> None:
        self._first = first
        self._every = every
        self.begin_anew()

    def begin_anew(self) -> None:
        """The next step is a first one again."""
        self._fresh = True
        self.data_ns = 0
        self.gc_ns = 0
        # By their numbers: the main thread and those that step, for some frameworks train on another one.
        self.trains_on = {threading.main_thread().ident}

    def fetched(self, started: int, ended: int) -> None:
        """The thread that trains waited for data from `started` to `ended`, readings of time.monotonic_ns()."""
        self.data_ns += ended - started

    def collected(self, duration: int) -> None:
        """The garbage collector held the process up for `duration` ns."""
        self.gc_ns += duration

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
            self.trains_on.add(threading.get_ident())
            self._every()

        undo: Undo = register_optimizer_step_post_hook(after_step).remove
        return undo
