"""Tells the native GPU tracer where each training step begins and ends: Datadog's, if that is in the process, or ours.

It is two C functions that some builds of Datadog's have and that no other library should. A library may be loaded at
any time, so what isn't there is looked for again at each :meth:`StepSignals.look`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ddtrace_pytorch.kernels.symbols import functions

_BEGIN, _END = "dd_training_step_begin", "dd_training_step_end"

Pair = tuple[Callable[[], object], Callable[[], object]]


class StepSignals:
    """Begins a step when it is opened, and ends one when it is closed: n turns give n + 1 pairs.

    `ours` is the kernel sampler's library, and hears of steps where nobody else does; with `theirs` false nobody else
    is asked for.
    """

    def __init__(self, ours: ctypes.PyDLL | None = None, theirs: bool = True) -> None:
        self._chosen = _pair(ours) if ours is not None else None
        self._looking = theirs
        self._told: Pair | None = None
        self._open = False

    def look(self) -> None:
        """Look for the functions, if they weren't there yet; a step begins where they are found, and where others were
        told of it, it ends there."""
        told, found = self._told, self._found()
        if found is None or found is told or (told is not None and not self._open):
            return
        # In this order: a turn that another thread makes meanwhile is told to those who have begun.
        found[0]()
        self._open = True
        self._told = found
        if told is not None:
            told[1]()

    def _found(self) -> Pair | None:
        if self._looking and (theirs := _pair()) is not None:
            self._looking, self._chosen = False, theirs
        return self._chosen

    def turn(self) -> None:
        """One step ends, and the next begins."""
        told = self._told
        if self._open and told is not None:
            begin, end = told
            end()
            begin()
            if self._told is not told:
                # Another was found just now, by another thread.
                end()

    def close(self) -> None:
        """The last step ends."""
        if self._open and self._told is not None:
            self._open = False
            self._told[1]()


def _pair(library: ctypes.PyDLL | None = None) -> Pair | None:
    found = functions(_BEGIN, _END, library=library)
    if found is None:
        return None
    begin, end = found
    begin.argtypes = end.argtypes = []
    return begin, end
