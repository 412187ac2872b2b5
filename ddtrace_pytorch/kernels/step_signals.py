"""Tells Datadog's native GPU tracer, if it is in the process, where each training step begins and ends.

It is two C functions that some builds of the tracer have and that no other library should. A library may be loaded at
any time, so what isn't there is looked for again at each :meth:`StepSignals.look`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.kernels.symbols import functions

_BEGIN, _END = "dd_training_step_begin", "dd_training_step_end"


class StepSignals:
    """Begins a step when it is opened, and ends one when it is closed: n turns give n + 1 pairs."""

    def __init__(self, ours: Any = None) -> None:
        self._ours = ours
        self._begin: Callable[[], object] | None = None
        self._end: Callable[[], object] | None = None
        self._open = False

    def look(self) -> None:
        """Look for the functions, if they weren't there yet; a step begins where they are found."""
        if self._begin is not None:
            return
        found = functions(_BEGIN, _END) or ([self._ours[_BEGIN], self._ours[_END]] if self._ours else None)
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
