"""The steps of each rank, from the `step` records of its log, and which ranks make each step longer. Pure.

Ranks that train together end each step at about the same time: who is slow spends longer on its *own* (all but
collectives), and the others wait for it in collectives. So of two ranks with equal steps the one that is longer on its
own is the slow one. Where the others wait in collectives that torch issues by itself, in the backward pass, that is
part of their computing. So what a rank computes longer counts only as far as it is longer on its own in all; what it
waits longer for data, or is longer in optimizers, counts in any case. Communication is the reason of a rank whose steps
are longer than the others' without being longer on its own, as far as it is longer in collectives: nobody waits for it
there, or all who do are as long in them.

The first step of a rank has starting, compiling and warming up in it: it is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any

from ddtrace_pytorch.histogram import Times
from ddtrace_pytorch.runlog.fields import TOO_LARGE, integer, mapping, number

# Of the median rank's step, as much as a rank has to be longer on its own to be called slow.
NOTABLE = 0.05

OWN = ("data", "compute", "optimizer")
PARTS = {
    "data": "data loading",
    "compute": "compute",
    "optimizer": "the optimizer",
    "collective": "communication",
}


@dataclass
class RankSteps:
    """The steps that one rank ended. Times in ms; the shares of their time add up to 1. All but `steps` are without the
    first, which took `first_ms`, where there are others (null: it isn't there, or no log says which it is)."""

    rank: int
    steps: int
    first_ms: float | None
    first_step: int | None
    last_step: int | None
    per_second: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    share_data: float
    share_collective: float
    share_optimizer: float
    share_compute: float


@dataclass
class AllSteps:
    """The steps of all ranks together, as in :class:`RankSteps`; `steps` are the most of one rank."""

    steps: int
    per_second: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    share_data: float
    share_collective: float
    share_optimizer: float
    share_compute: float


@dataclass
class SlowRank:
    """A rank that makes each step so many `ms` longer: the sum of what it takes longer than the median rank with each
    of its `parts`, the most first. The first of them is `part`, with `part_ms`."""

    rank: int
    ms: float
    part: str
    part_ms: float
    parts: dict[str, float]


@dataclass
class Steps:
    """Of one attempt: `ranks` that stepped, those that are `slow`, the slowest first, and `all` together (null: nobody
    stepped)."""

    ranks: list[RankSteps] = field(default_factory=list)
    slow: list[SlowRank] = field(default_factory=list)
    all: AllSteps | None = None


def told(of_ranks: Iterable[OfRank]) -> Steps:
    """The steps of one attempt's ranks."""
    together = Times()
    ranks = sorted((one for rank in of_ranks if (one := rank.told(together)) is not None), key=lambda one: one.rank)
    return Steps(ranks, slow_among(ranks), _all(ranks, together))


def _all(ranks: Sequence[RankSteps], together: Times) -> AllSteps | None:
    if not ranks:
        return None
    # A rank's shares are of the time of its steps, those apart that were left out.
    time = {one.rank: one.mean_ms * (one.steps - (one.first_ms is not None and one.steps > 1)) for one in ranks}
    whole = sum(time.values()) or 1.0
    data, collective, optimizer, compute = (
        sum(getattr(one, f"share_{part}") * time[one.rank] for one in ranks) / whole
        for part in ("data", "collective", "optimizer", "compute")
    )
    return AllSteps(
        **_speed(together),
        steps=max(one.steps for one in ranks),
        share_data=data,
        share_collective=collective,
        share_optimizer=optimizer,
        share_compute=compute,
    )


def slow_among(ranks: Sequence[RankSteps]) -> list[SlowRank]:
    """Those of `ranks` that are notably longer than the median of them, on their own or else in collectives."""
    ranks = [one for one in ranks if one.first_ms is None or one.steps > 1]
    if len(ranks) < 2:
        return []
    whole = {one.rank: one.mean_ms for one in ranks}
    each = {one.rank: {part: getattr(one, f"share_{part}") * one.mean_ms for part in PARTS} for one in ranks}
    # Of two ranks the median is the faster one: half of the ranks may be slow.
    usual = {part: median_low(parts[part] for parts in each.values()) for part in PARTS}
    usual_own = median_low(sum(parts[part] for part in OWN) for parts in each.values())
    usual_step = median_low(whole.values())
    step = median(whole.values())
    found = []
    for rank, parts in each.items():
        longer = {part: max(parts[part] - usual[part], 0.0) for part in PARTS}
        others = longer["data"] + longer["optimizer"]
        longer["compute"] = min(longer["compute"], max(sum(parts[part] for part in OWN) - usual_own - others, 0.0))
        others += longer["compute"]
        longer["collective"] = min(longer["collective"], max(whole[rank] - usual_step - others, 0.0))
        ms = others + longer["collective"]
        if ms > NOTABLE * step:
            most_first = sorted((part for part in PARTS if longer[part]), key=lambda part: -longer[part])
            why = {part: longer[part] for part in most_first}
            found.append(SlowRank(rank, ms, most_first[0], longer[most_first[0]], why))
    return sorted(found, key=lambda one: (-one.ms, one.rank))


class OfRank:
    """The `step` records of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._times, self._parts = Times(), dict.fromkeys(("data", "collective", "optimizer"), 0)
        self._first: int | None = None
        self._last: int | None = None
        self._apart: list[Mapping[str, Any]] = []

    def add(self, record: Mapping[str, Any]) -> None:
        took = integer(record, "duration")
        if took is None or not 0 <= took < TOO_LARGE or record.get("unfinished"):
            return
        step = integer(record, "step")
        self._first, self._last = (step if self._first is None else self._first), (self._last if step is None else step)
        if record.get("first"):
            self._apart.append(record)
            return
        self._times.add(took)
        _add(self._parts, mapping(record, "metrics"))

    @property
    def began_with(self) -> int | None:
        """The number of its session's first step; None where that isn't known."""
        return integer(self._apart[0], "step") if self._apart else None

    def told(self, together: Times) -> RankSteps | None:
        """All were added; counts them among those of all ranks `together`, too."""
        times, parts, apart = self._times, self._parts, self._apart
        steps = times.count + len(apart)
        for one in () if times.count else apart:
            times.add(one["duration"])
            _add(parts, mapping(one, "metrics"))
        if not times.count:
            return None
        together.join(times)
        wall = times.total or 1
        shares = {name: part / wall for name, part in parts.items()}
        return RankSteps(
            **_speed(times),
            rank=self._rank,
            steps=steps,
            first_ms=apart[0]["duration"] / 1e6 if apart else None,
            first_step=self._first,
            last_step=self._last,
            share_data=shares["data"],
            share_collective=shares["collective"],
            share_optimizer=shares["optimizer"],
            share_compute=max(1 - sum(shares.values()), 0.0),
        )


def _speed(times: Times) -> dict[str, float]:
    """What is told of a rank, and of all, by the times of the steps alone; there is at least one."""
    return {
        "per_second": times.count / ((times.total or 1) / 1e9),
        "mean_ms": times.total / times.count / 1e6,
        "p50_ms": times.percentile(0.5) / 1e6,
        "p95_ms": times.percentile(0.95) / 1e6,
        "p99_ms": times.percentile(0.99) / 1e6,
        "max_ms": times.longest / 1e6,
    }


def _add(parts: dict[str, int], metrics: Mapping[str, Any]) -> None:
    for name in parts:
        part = number(metrics, f"{name}_ns")
        if part is not None and 0 <= part < TOO_LARGE:
            parts[name] += int(part)
