"""Which collectives several ranks have, and who came first and last: what an arrow is drawn through. Pure.

Joined by group and number, never by the position in a log, so that a record that is missing changes the arrow of its
own collective and no other. The arrow runs from who came first to who came last, as a trace viewer reads it in time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

# What is kept of the number in an arrow's id, so that the id stays exact in a viewer that has only floats.
NUMBER_BITS = 32

# Incarnation and group.
Where = tuple[str, str]


class Part(Enum):
    BEGIN = "s"
    ON = "t"
    END = "f"


class Point(NamedTuple):
    """Where the arrow `id` begins, goes on or ends."""

    id: int
    part: Part


class Arrows:
    """Add all calls of one rank after the other, then ask for each of them in the same order."""

    def __init__(self) -> None:
        self._slots: dict[Where, dict[int, int]] = {}
        self._ids: dict[Where, int] = {}
        self._ranks = array("l")
        self._first, self._first_at = array("l"), array("q")
        self._last, self._last_at = array("l"), array("q")
        self._spoilt: set[int] = set()

    def add(self, rank: int, calls: Iterable[tuple[Where, int, int]]) -> None:
        """Calls of one rank: group, number, and start on the clock that all share."""
        mine: dict[int, int] = {}
        for where, number, start in calls:
            if not 0 <= number < 1 << NUMBER_BITS:
                continue
            numbers = self._slots.setdefault(where, {})
            slot = numbers.get(number)
            if slot is None:
                slot = numbers[number] = len(self._ranks)
                for column, value in (
                    (self._ranks, 0), (self._first, rank), (self._first_at, start), (self._last, rank),
                    (self._last_at, start),
                ):  # fmt: skip
                    column.append(value)
            if slot in mine:
                # One call may be told twice, as one of many and by itself. Two of one number can't be told apart.
                if mine[slot] != start:
                    self._spoilt.add(slot)
                continue
            mine[slot] = start
            self._ranks[slot] += 1
            if start < self._first_at[slot]:
                self._first[slot], self._first_at[slot] = rank, start
            if start >= self._last_at[slot]:
                self._last[slot], self._last_at[slot] = rank, start

    def settle(self) -> int:
        """All were added; gives how many arrows there are."""
        self._ids = {where: at for at, where in enumerate(sorted(self._slots), 1)}
        return sum(many > 1 for many in self._ranks) - sum(self._ranks[slot] > 1 for slot in self._spoilt)

    def of_rank(self, rank: int) -> OfRank:
        return OfRank(self, rank)

    def _point(self, rank: int, where: Where, number: int, drawn: set[int]) -> Point | None:
        slot = self._slots.get(where, {}).get(number)
        if slot is None or self._ranks[slot] < 2 or slot in self._spoilt or slot in drawn:
            return None
        drawn.add(slot)
        part = Part.BEGIN if self._first[slot] == rank else Part.END if self._last[slot] == rank else Part.ON
        return Point(self._ids[where] << NUMBER_BITS | number, part)


class OfRank:
    """One rank's points; each of them is given once."""

    def __init__(self, arrows: Arrows, rank: int) -> None:
        self._arrows, self._rank = arrows, rank
        self._drawn: set[int] = set()

    def point(self, where: Where, number: int) -> Point | None:
        return self._arrows._point(self._rank, where, number, self._drawn)
