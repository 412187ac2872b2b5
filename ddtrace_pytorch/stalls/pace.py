"""Whether a rank went on training after a signal told it to end, as with a handler that only takes note of it. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Pace(NamedTuple):
    """How many steps, and calls of collectives, a rank has ended."""

    steps: int
    calls: int

    def went_on_since(self, before: Pace) -> bool:
        """The step under way may still have ended; of who counts no steps, the call."""
        return self.steps > before.steps + 1 if self.steps else self.calls > before.calls + 1
