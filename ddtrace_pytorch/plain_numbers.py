"""What the hot path adds to, as bare numbers in one place of memory each, where the part in C is there to reach them.

Between two collectives a training uses more memory than a processor keeps at hand: what a call costs is then how many
places it has to fetch, and a number of Python's is one more each time, and another when it changes.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from enum import Enum
from typing import TYPE_CHECKING, Any

# The part in C has the same number, and whoever changes what Python sees of it changes both: one that was built for
# another version, as beside a checkout that has moved on, is not used.
INTERFACE = 2


# How many of the last collectives of a group are remembered; a power of two.
RECENT = 32


class Part(Enum):
    """Whether there is the part in C."""

    BUILT = "built"
    MISSING = "not built"
    OTHER = "built for another version"


try:
    from ddtrace_pytorch.collectives import _counting
except ImportError:
    part = Part.MISSING
else:
    part = Part.BUILT if getattr(_counting, "INTERFACE", None) == INTERFACE else Part.OTHER
exist = part is Part.BUILT

BUILD_ANEW = "build it anew, with `pip install -e .` in a checkout, or `pip install --force-reinstall ddtrace-pytorch`"

if TYPE_CHECKING or not exist:

    class CellNumbers:
        """Those of a :class:`~ddtrace_pytorch.ledger.Cell`."""

        __slots__ = ("bytes", "notable", "number", "time", "unsized", "waited", "waits")

        bytes: int
        notable: int
        number: int
        time: int
        unsized: int
        waited: int
        waits: int

    class GroupNumbers:
        """Those of a :class:`~ddtrace_pytorch.ledger.Group`."""

        __slots__ = ("address", "calls", "sampled")

        address: int
        calls: int
        sampled: int
        recent: MutableSequence[int]

        def number(self, cell: CellNumbers, size: int, /) -> int:
            """Count a collective of `cell` that moved `size` bytes among the group's; gives its number."""
            self.calls = key = self.calls + 1
            place = 2 * (key & (RECENT - 1))
            self.recent[place] = cell.number + 1
            self.recent[place + 1] = size
            return key

    class SlotNumbers:
        """Those of a :class:`~ddtrace_pytorch.collectives.in_flight.Slot`."""

        __slots__ = ("address", "started")

        address: int
        started: int

    class LineNumbers:
        """Those of a :class:`~ddtrace_pytorch.ledger.Line`."""

        __slots__ = ("asked",)

        asked: int

else:
    CellNumbers = _counting.CellNumbers
    GroupNumbers = _counting.GroupNumbers
    SlotNumbers = _counting.SlotNumbers
    LineNumbers = _counting.LineNumbers


def series(owner: Any, many: int) -> MutableSequence[int]:
    """The series of `many` numbers of 64 bits, all 0 at first, that is `owner`'s."""
    if exist:
        return memoryview(owner).cast("q")  # type: ignore[return-value]
    return [0] * many
