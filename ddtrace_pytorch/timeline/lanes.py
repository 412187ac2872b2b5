"""Which line of a track a stretch of time is drawn on, so that what shares a line nests or is apart. Pure."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Hashable, Sequence
from itertools import islice

# Of the lanes that an owner has, so many are looked at for a place; so the time it takes grows with the spans alone.
TRIED = 8


def pack(starts: Sequence[int], ends: Sequence[int], owners: Sequence[Hashable]) -> array[int]:
    """The lane, from 0, of each span of one thread, given in the order in which they ended.

    An owner (an asyncio task, or the thread itself) keeps its lane for as long as it has spans open, with all of them
    below each other on it; then the lane is free for another. Spans of one owner that overlap and don't nest, as those
    of generators may, are on different lanes. The lowest lane that is free is taken.
    """
    lanes = array("i", bytes(4 * len(starts)))
    held: dict[Hashable, dict[int, list[int]]] = {}  # by owner and lane, until when its open spans are
    busy: list[tuple[int, int, int]] = []  # until when, lane, the span that took it
    free: list[int] = []
    lane_count = 0
    # Of two that took the same time the one that was recorded last is around the other.
    for at in sorted(range(len(starts)), key=lambda at: (starts[at], -ends[at], -at)):
        start, end, owner = starts[at], ends[at], owners[at]
        while busy and busy[0][0] <= start:
            _, lane, root = heapq.heappop(busy)
            del held[owners[root]][lane]
            heapq.heappush(free, lane)
        mine = held.setdefault(owner, {})
        for there, around in islice(reversed(mine.items()), TRIED):
            while around[-1] <= start:
                around.pop()
            if around[-1] >= end:
                around.append(end)
                lane = there
                break
        else:
            if free:
                lane = heapq.heappop(free)
            else:
                lane, lane_count = lane_count, lane_count + 1
            mine[lane] = [end]
            heapq.heappush(busy, (end, lane, at))
        lanes[at] = lane
    return lanes


class InTurn:
    """Lanes for what comes one after the other, in about the order of time, and is not nested."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._until: list[int] = []
        self._busy: list[tuple[int, int]] = []
        self._free: list[int] = []

    def lane(self, start: int, end: int) -> int:
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        # What comes late may begin before a lane was free.
        if self._free and self._until[self._free[0]] <= start:
            lane = heapq.heappop(self._free)
            self._until[lane] = end
        else:
            lane = len(self._until)
            self._until.append(end)
        heapq.heappush(self._busy, (end, lane))
        return self._first + lane
