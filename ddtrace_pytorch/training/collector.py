"""What Python's garbage collector takes of a step.

By the part in C (``native/collecting.c``), and not at all without it: a callback in Python would lose a Ctrl-C that
comes during a collection.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtrace_pytorch.lifecycle import Lifecycle

try:
    from ddtrace_pytorch.training._collecting import collections
except ImportError:
    collections = None  # type: ignore[assignment]

Undo = Callable[[], None]

# Collections of the younger generations come many times a step, and take microseconds.
LONG_NS = 1_000_000


def watch(lifecycle: Lifecycle) -> Undo:
    """Have each collection that matters on its step; gives what undoes it.

    It runs on whichever thread was about to allocate, and all others wait for the interpreter lock meanwhile.
    """
    if collections is None:
        return lambda: None
    found = lifecycle.steps.garbage = collections(lifecycle, LONG_NS)
    gc.callbacks.append(found)

    def undo() -> None:
        if found in gc.callbacks:
            gc.callbacks.remove(found)

    return undo
