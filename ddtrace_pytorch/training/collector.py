"""What Python's garbage collector takes of a step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddtrace_pytorch.compiler import leave_uncompiled

if TYPE_CHECKING:
    from ddtrace_pytorch.lifecycle import Lifecycle

Undo = Callable[[], None]

OLDEST_GENERATION = 2
# Collections of the younger generations come many times a step, and take microseconds.
LONG_NS = 1_000_000


def watch(lifecycle: Lifecycle) -> Undo:
    """Tell of each collection that matters; gives what undoes it.

    It runs on whichever thread was about to allocate, and all others wait for the interpreter lock meanwhile.
    """
    now = time.monotonic_ns
    started = 0

    def collecting(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if phase == "start":
            started = now()
        elif started and lifecycle.current is not None:
            took, started = now() - started, 0
            if took >= LONG_NS or info["generation"] == OLDEST_GENERATION:
                lifecycle.steps.collected(took)
                lifecycle.progress.tag("gc")

    # A collection may come in the midst of what torch.compile runs.
    leave_uncompiled(collecting.__code__, to_the_end=True)
    gc.callbacks.append(collecting)

    def undo() -> None:
        if collecting in gc.callbacks:
            gc.callbacks.remove(collecting)

    return undo
