"""Sums along an axis whose length nobody knows beforehand, in constant memory. Pure.

A bin is a power of two wide and begins at a multiple of it. So what was gathered with narrower bins, elsewhere or
earlier, can be poured into wider ones without a rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S")


class Cell(Protocol):
    """What is in a bin: a dataclass."""

    def join(self: S, other: S) -> None:
        """Add what is in `other`."""


C = TypeVar("C", bound=Cell)

MOST = 256


@dataclass
class Bins(Generic[C]):
    """At most :data:`MOST` bins, which are 2**`shift` wide; those with nothing in them aren't there. `extent` is the
    first and the last place that they have to reach."""

    new: type[C]
    shift: int = 0
    cells: dict[int, C] = field(default_factory=dict)
    extent: tuple[int, int] | None = None

    def reach(self, first: int, last: int) -> None:
        """Make room for `first` to `last`."""
        if self.extent is not None:
            low, high = self.extent
            if low <= first and last <= high:
                return
            first, last = low if low < first else first, high if high > last else last
        self.extent = first, last
        shift = self.shift
        while (last >> shift) - (first >> shift) >= MOST:
            shift += 1
        if shift > self.shift:
            self.widen(shift)

    def at(self, place: int) -> C:
        """The bin that `place` is in."""
        found, extent = self.cells.get(place >> self.shift), self.extent
        if found is not None and extent is not None:
            # It is wide enough for all of its own places.
            if place > extent[1]:
                self.extent = extent[0], place
            elif place < extent[0]:
                self.extent = place, extent[1]
            return found
        self.reach(place, place)
        found = self.cells.get(place >> self.shift)
        if found is None:
            found = self.cells[place >> self.shift] = self.new()
        return found

    def __reduce__(self) -> Any:
        # By itself each cell would be an object of its own, with the names of all its fields.
        values = attrgetter(*(one.name for one in fields(self.new)))  # type: ignore[arg-type]
        return _again, (self.new, self.shift, {at: values(cell) for at, cell in self.cells.items()}, self.extent)

    def widen(self, shift: int) -> None:
        """Make the bins 2**`shift` wide, if they are narrower."""
        if shift <= self.shift:
            return
        narrow, self.cells = self.cells, {}
        for at, cell in narrow.items():
            wide = self.cells.setdefault(at >> (shift - self.shift), cell)
            if wide is not cell:
                wide.join(cell)
        self.shift = shift

    def cover(self, other: Bins[C]) -> None:
        """Reach as far as `other`, with bins that are not narrower."""
        if other.extent is not None:
            self.widen(other.shift)
            self.reach(*other.extent)

    def pour(self, other: Bins[C]) -> None:
        """Add what is in `other`, which is spent afterwards."""
        self.cover(other)
        other.widen(self.shift)
        for at, cell in other.cells.items():
            mine = self.cells.setdefault(at, cell)
            if mine is not cell:
                mine.join(cell)


def _again(
    new: type[Cell], shift: int, values: Mapping[int, tuple[Any, ...]], extent: tuple[int, int] | None
) -> Bins[Any]:
    return Bins(new, shift, {at: new(*those) for at, those in values.items()}, extent)
