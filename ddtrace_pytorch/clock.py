"""Wall-clock times that never jump.

Start times must be wall clock to line up with other hosts, durations must come from a monotonic clock. A
:class:`Clock` reads the wall once and counts on from there, so moving the system's clock during a run neither
bends durations nor opens gaps between pieces of a span.
"""

from __future__ import annotations

import time


class Clock:
    """Nanoseconds since the epoch, steady from the moment it is made."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def now(self) -> int:
        return time.monotonic_ns() + self._offset

    def from_monotonic(self, reading: int) -> int:
        """What this clock showed at a monotonic reading, in ns."""
        return reading + self._offset

    def monotonic(self, wall: int) -> int:
        """The monotonic reading, in ns, at the moment this clock showed `wall`."""
        return wall - self._offset
