"""One end to several waits in a row."""

from __future__ import annotations

import math
import time


class Deadline:
    """A moment, `seconds` from now, that whoever waits before it shares with the others."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self, at_most: float = math.inf) -> float:
        """How many seconds there are until then, but no more than `at_most`; 0 once it is over."""
        return min(max(0.0, self._at - time.monotonic()), at_most)

    def earlier(self, seconds: float) -> Deadline:
        """The one that leaves so many `seconds` until this one."""
        return Deadline(self.left() - seconds)
