"""Who waits for whom, from the sampled calls of all ranks. Pure.

In a collective that needs all ranks everybody comes back at about the same time, so who came late spent the least time
inside: **the rank that waits least is the late one**. For one call,

- a rank *waited for the others* as much longer than the rank that waited least;
- that rank, the *late* one, *made the others wait* what they waited so, on average over them.

Calls are joined by what all ranks of a group know them by (its name and the call's number there), never by their
position in a log. One counts if every rank of the group that wrote sampled calls at all wrote it, once, of the same
operation, and as long as it really took (`source` is ``completion``): a call that was only issued tells nothing of who
came when. Operations with a root are left out, for their root needs not wait for anybody.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtrace_pytorch.collectives.surface import ALL_WAIT_FOR_ALL
from ddtrace_pytorch.runlog.fields import TOO_LARGE, integer, text

# Of a group's waiting, as much as one rank has to be the reason of to be called late.
MOST = 0.5

COMPLETION = "completion"


@dataclass
class Lateness:
    """One rank's part in the waiting of a group; `late_calls` are those it was the last to come to."""

    rank: int
    made_others_wait_ms: float
    waited_for_others_ms: float
    late_calls: int


@dataclass
class Stragglers:
    """Who waited for whom in one group, over the `calls` that could be joined.

    `late_rank` is the one that made the others wait longest, null if nobody waited; `late_share` its part of all that
    waiting. `unmatched` counts records of calls that were not joined, because another rank has none of the same call.
    """

    group: str
    name: str
    calls: int
    unmatched: int
    late_rank: int | None
    late_share: float | None
    ranks: list[Lateness]


class Waiting:
    """Joins the sampled calls of one group, rank after rank; keeps four bytes for each call of each rank."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._operations: list[str] = []
        self._took: dict[int, array[float]] = {}
        self._spoilt: set[int] = set()
        self._records = 0

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """One `call` record of `rank`."""
        key, took = integer(record, "key"), integer(record, "duration")
        if text(record, "source") == COMPLETION and key is not None and took is not None:
            self.count(rank, text(record, "op"), key, took)

    def count(self, rank: int, operation: str, key: int, took: int) -> None:
        """One call of `rank` that took so long until it was complete."""
        if operation not in ALL_WAIT_FOR_ALL or not 0 <= took < TOO_LARGE:
            return
        self._records += 1
        mine = self._took.get(rank)
        if mine is None:
            # What a rank before it has not got is not joined; only the first one's calls are kept.
            first = not self._took
            mine = self._took[rank] = array("f", () if first else [math.nan]) * (1 if first else len(self._slots))
        slot = self._slots.get(key)
        if slot is None:
            if len(self._took) > 1:
                return
            self._slots[key] = len(mine)
            self._operations.append(operation)
            mine.append(took)
        elif math.isnan(mine[slot]) and operation == self._operations[slot]:
            mine[slot] = took
        else:
            self._spoilt.add(slot)

    def pour(self, other: Waiting) -> None:
        """Add the calls of other ranks, which come after those that are here."""
        if not self._took:
            self.__dict__ = other.__dict__
            return
        self._records += other._records
        if self._slots == other._slots:
            places = list(range(len(self._slots)))
        else:
            places = [other._slots.get(key, -1) for key in self._slots]
        for slot, place in enumerate(places):
            if place >= 0 and (place in other._spoilt or other._operations[place] != self._operations[slot]):
                self._spoilt.add(slot)
        for rank, took in other._took.items():
            theirs = array("f", (took[place] if place >= 0 else math.nan for place in places))
            mine = self._took.setdefault(rank, theirs)
            if mine is not theirs:
                # Two that were the same rank.
                for slot, one in enumerate(theirs):
                    if math.isnan(mine[slot]):
                        mine[slot] = one
                    elif not math.isnan(one):
                        self._spoilt.add(slot)

    def told(self, group: str, name: str) -> Stragglers | None:
        """What came of it; None if no call could be joined."""
        ranks = sorted(self._took)
        made, waited, late = (dict.fromkeys(ranks, 0.0) for _ in range(3))
        calls = 0
        rows = [self._took[rank] for rank in ranks]
        for slot in range(len(self._slots)) if len(ranks) > 1 else ():
            took = [row[slot] for row in rows]
            least = min(took)
            everybody = sum(took)  # not a number if one is missing
            if slot in self._spoilt or math.isnan(everybody):
                continue
            calls += 1
            for rank, one in zip(ranks, took, strict=True):
                waited[rank] += one - least
            last = ranks[took.index(least)]
            together = everybody - least * len(ranks)
            made[last] += together / (len(ranks) - 1)
            late[last] += together > 0
        if not calls:
            return None
        waiting = sum(made.values())
        late_rank = max(ranks, key=lambda rank: made[rank]) if waiting else None
        return Stragglers(
            group=group,
            name=name,
            calls=calls,
            unmatched=self._records - calls * len(ranks),
            late_rank=late_rank,
            late_share=None if late_rank is None else made[late_rank] / waiting,
            ranks=[Lateness(rank, made[rank] / 1e6, waited[rank] / 1e6, int(late[rank])) for rank in ranks],
        )
