"""What the hot path adds to, as bare numbers in one place of memory each, where the part in C is there to reach them.

Between two collectives a training uses more memory than a processor keeps at hand: what a call costs is then how many
places it has to fetch, and a number of Python's is one more each time, and another when it changes.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import TYPE_CHECKING, Any

try:
    from ddtrace_pytorch.collectives import _counting
except ImportError:
    exist = False
else:
    exist = True

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

        __slots__ = ("calls", "sampled")

        calls: int
        sampled: int

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
