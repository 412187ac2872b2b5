"""Who waits for whom, from the sampled calls of all ranks. Pure.

In a collective that needs all ranks everybody comes back at about the same time, so who came late spent the least time
inside: **the rank that waits least is the late one**. For one call,

- a rank *waited for the others* as much longer than the rank that waited least;
- that rank, the *late* one, *made the others wait* what they waited so, on average over them.

Calls are joined by what all ranks of a group know them by (its name and the call's number there), never by their
position in a log. One counts if every rank of the group that wrote sampled calls at all wrote it, once, of the same
operation, and as long as it really took (`source` is ``completion``): a call that was only issued tells nothing of who
came when. Operations with a root are left out, for their root needs not wait for anybody; and so are the calls of the
first step and those before it, in which groups connect and everything is still warming up.

One call can be longer than all others together. So who is *the* late rank is told without the one longest wait that
each is the reason of.

Of ranks that are all alike, one is the late one of the calls there are, too. Whether a rank is late is told by how
often it was the last, which doesn't depend on how much times vary: each of *n* equal ranks is that in one call of *n*,
and how likely it is that one of them is it much more often, by chance, is known.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddtrace_pytorch.collectives.surface import ALL_WAIT_FOR_ALL
from ddtrace_pytorch.runlog.fields import TOO_LARGE, integer, text

COMPLETION = "completion"

# So rarely may equal ranks look as uneven for one of them to be called late.
RARELY = 1e-6
# And in no fewer calls, however clear they are: what is near in time may have one reason.
CALLS_NEEDED = 20

_NO_STEP = -1


@dataclass
class Lateness:
    """One rank's part in the waiting of a group; `late_calls` are those it was the last to come to, and half of them
    made the others wait `typical_wait_ms` or more (null: there is none)."""

    rank: int
    made_others_wait_ms: float
    waited_for_others_ms: float
    late_calls: int
    typical_wait_ms: float | None


@dataclass
class Stragglers:
    """Who waited for whom in one group, over the `calls` that could be joined.

    `late_rank` is the one that made the others wait longest, null if nobody waited; `late_share` its part of all that
    waiting; both without the longest wait that each rank is the reason of, where there are others. `late_by_chance`: at
    most how likely it is that one of equal ranks is the last in as many of the calls. `first_step_calls` are left out.
    `unmatched` counts records of calls that were not joined, because another rank has none of the same call.
    """

    group: str
    name: str
    calls: int
    first_step_calls: int
    unmatched: int
    late_rank: int | None
    late_share: float | None
    late_by_chance: float | None
    ranks: list[Lateness]

    @property
    def are_enough(self) -> bool:
        """Whether the calls are enough to tell that the late rank is late."""
        return self.calls >= CALLS_NEEDED and self.late_by_chance is not None and self.late_by_chance <= RARELY


class Waiting:
    """Joins the sampled calls of one group, rank after rank; keeps four bytes for each call of each rank."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._operations: list[str] = []
        self._took: dict[int, array[float]] = {}
        self._spoilt: set[int] = set()
        # By slot, the step that the first rank was in; and the slots of its first step, once that is known.
        self._steps = array("q")
        self._first_step: set[int] = set()
        self._records = 0

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """One `call` record of `rank`."""
        key, took = integer(record, "key"), integer(record, "duration")
        if text(record, "source") == COMPLETION and key is not None and took is not None:
            self.count(rank, text(record, "op"), key, took, integer(record, "step"))

    def count(self, rank: int, operation: str, key: int, took: int, step: int | None = None) -> None:
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
            self._steps.append(step if step is not None and step >= 0 else _NO_STEP)
            mine.append(took)
        elif math.isnan(mine[slot]) and operation == self._operations[slot]:
            mine[slot] = took
        else:
            self._spoilt.add(slot)

    def began_with(self, step: int) -> None:
        """The first step of the rank whose calls were counted was that one."""
        self._first_step = {slot for slot, one in enumerate(self._steps) if one in (_NO_STEP, step)}

    def pour(self, other: Waiting) -> None:
        """Add the calls of other ranks, which come after those that are here."""
        if not self._took:
            self.__dict__ = other.__dict__
            return
        self._records += other._records
        # As in most jobs.
        alike = self._slots == other._slots and self._operations == other._operations
        places = [] if alike else [other._slots.get(key, -1) for key in self._slots]
        if alike:
            self._spoilt |= other._spoilt
        for slot, place in enumerate(places):
            if place >= 0 and (place in other._spoilt or other._operations[place] != self._operations[slot]):
                self._spoilt.add(slot)
        for rank, took in other._took.items():
            theirs = took if alike else array("f", (took[place] if place >= 0 else math.nan for place in places))
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
        waited = dict.fromkeys(ranks, 0.0)
        made = {rank: array("d") for rank in ranks}
        calls = early = 0
        rows = [self._took[rank] for rank in ranks]
        for slot in range(len(self._slots)) if len(ranks) > 1 else ():
            took = [row[slot] for row in rows]
            least = min(took)
            everybody = sum(took)  # not a number if one is missing
            if slot in self._spoilt or math.isnan(everybody):
                continue
            if slot in self._first_step:
                early += 1
                continue
            calls += 1
            for rank, one in zip(ranks, took, strict=True):
                waited[rank] += one - least
            last = ranks[took.index(least)]
            together = everybody - least * len(ranks)
            if together > 0:
                made[last].append(together / (len(ranks) - 1))
        if not calls:
            return None
        late_rank, late_share = _late({rank: made[rank] for rank in ranks if made[rank]})
        return Stragglers(
            group=group,
            name=name,
            calls=calls,
            first_step_calls=early,
            unmatched=self._records - (calls + early) * len(ranks),
            late_rank=late_rank,
            late_share=late_share,
            late_by_chance=None if late_rank is None else by_chance(len(made[late_rank]), calls, len(ranks)),
            ranks=[
                Lateness(
                    rank,
                    sum(made[rank]) / 1e6,
                    waited[rank] / 1e6,
                    len(made[rank]),
                    median(made[rank]) / 1e6 if made[rank] else None,
                )
                for rank in ranks
            ],
        )


def by_chance(last_in: int, calls: int, ranks: int) -> float:
    """At most how likely it is that any one of so many equal `ranks` is the last in as many of the `calls`: Chernoff's
    bound for one of them, as many times."""
    fair, share = 1 / ranks, last_in / calls
    if share <= fair:
        return 1.0
    surprise = share * math.log(share / fair)
    if share < 1:
        surprise += (1 - share) * math.log((1 - share) / (1 - fair))
    return min(1.0, ranks * math.exp(-calls * surprise))


def _late(made: Mapping[int, array[float]]) -> tuple[int | None, float | None]:
    """Who made the others wait longest, and its part of all that."""
    if not made:
        return None, None
    without_longest = {rank: sum(waits) - max(waits) for rank, waits in made.items()}
    sums = without_longest if any(without_longest.values()) else {rank: sum(waits) for rank, waits in made.items()}
    late = max(sums, key=lambda rank: sums[rank])
    return late, sums[late] / sum(sums.values())
