"""Tells a native GPU tracer where each training step begins and ends: Datadog's, if that is in the process, or ours.

It is two C functions that some builds of Datadog's have and that no other library should. A library may be loaded at
any time, so what isn't there is looked for again at each :meth:`StepSignals.look`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ddtrace_pytorch.kernels.symbols import functions

_BEGIN, _END = "dd_training_step_begin", "dd_training_step_end"


class StepSignals:
    """Begins a step when it is opened, and ends one when it is closed: n turns give n + 1 pairs. `library`: who is
    told, and nobody else; else whoever in the process has the functions."""

    def __init__(self, library: ctypes.PyDLL | None = None) -> None:
        self._library = library
        self._begin: Callable[[], object] | None = None
        self._end: Callable[[], object] | None = None
        self._open = False

    def look(self) -> None:
        """Look for the functions, if they weren't there yet; a step begins where they are found."""
        if self._begin is not None:
            return
        found = functions(_BEGIN, _END, library=self._library)
        if found is None:
            return
        begin, end = found
        begin.argtypes = end.argtypes = []
        self._begin, self._end = begin, end
        self._open = True
        begin()

    def turn(self) -> None:
        """One step ends, and the next begins."""
        if self._open and self._begin is not None and self._end is not None:
            self._end()
            self._begin()

    def close(self) -> None:
        """The last step ends."""
        if self._open and self._end is not None:
            self._open = False
            self._end()
