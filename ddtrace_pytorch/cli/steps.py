"""The steps of each rank, from the `step` records of its log, and which ranks make each step longer. Pure.

Ranks that train together end each step at about the same time: who is slow spends longer on its *own* (all but
collectives), and the others wait for it in collectives. So of two ranks with equal steps the one that is longer on its
own is the slow one. Where the others wait in collectives that torch issues by itself, in the backward pass, that is
part of their computing. So what a rank computes longer counts only as far as it is longer on its own in all; what it
waits longer for data, or is longer in optimizers, counts in any case. Communication is the reason of a rank whose steps
are longer than the others' without being longer on its own, as far as it is longer in collectives: nobody waits for it
there, or all who do are as long in them.

The first step of a rank has starting, compiling and warming up in it: it is told apart. So are hiccups, the few
steps of a rank that take many times the median: what one of them takes longer says nothing of each step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Any

from ddtrace_pytorch.cli.untimed import Untimed
from ddtrace_pytorch.histogram import Times
from ddtrace_pytorch.runlog.fields import integer, mapping, number

# Of the median rank's step, as much as a rank has to be longer on its own to be called slow.
NOTABLE = 0.05

# Of a rank's steps, so many may be hiccups: each that takes so many times the median.
HICCUPS = 5
TIMES_THE_MEDIAN = 5

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
class Hiccup(SlowRank):
    """As :class:`SlowRank`, of one `step` alone."""

    step: int


@dataclass
class Steps:
    """Of one attempt: `ranks` that stepped, those that are `slow`, the slowest first, and `all` together (null: nobody
    stepped). `hiccups` are single steps that somebody made many times as long, the longest first; `slow` is without.
    `untimed` (null: none) are collectives that are part of no rank's `share_collective`, but of its `share_compute`."""

    ranks: list[RankSteps] = field(default_factory=list)
    slow: list[SlowRank] = field(default_factory=list)
    all: AllSteps | None = None
    hiccups: list[Hiccup] = field(default_factory=list)
    untimed: Untimed | None = None


def told(of_ranks: Iterable[OfRank]) -> Steps:
    """The steps of one attempt's ranks."""
    together = Times()
    ranks, usual = [], []
    long: dict[int, dict[int, _Long]] = {}
    for of_rank in of_ranks:
        one = of_rank.told(together)
        if one is not None:
            ranks.append(one)
            usual.append(of_rank.usual(one))
            for step in of_rank.hiccups():
                long.setdefault(step.step, {})[one.rank] = step
    ranks.sort(key=lambda one: one.rank)
    usual.sort(key=lambda one: one.rank)
    return Steps(ranks, slow_among(usual), _all(ranks, together), _hiccups(usual, long))


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
    whole, each = _means(ranks)
    step = median(whole.values()) if ranks else 0.0
    slow = (one for one in _longer(whole, each) if one.ms > NOTABLE * step)
    return sorted(slow, key=lambda one: (-one.ms, one.rank))


def _hiccups(usual: Sequence[RankSteps], long: Mapping[int, Mapping[int, _Long]]) -> list[Hiccup]:
    """Who made each of the `long` steps, by their number and by rank, as long as it was. A rank for which it was none
    is taken to have had one as usual; where all had it alike, nobody is named."""
    whole, each = _means(usual)
    found = []
    for which, those in long.items():
        took = whole | {rank: one.took / 1e6 for rank, one in those.items()}
        parts = each | {rank: one.parts_ms() for rank, one in those.items()}
        most = max(took[rank] - whole.get(rank, 0.0) for rank in those)
        named = (one for one in _longer(took, parts) if one.ms > most / 2)
        found += [Hiccup(**vars(one), step=which) for one in named]
    return sorted(found, key=lambda one: (-one.ms, one.step, one.rank))


def _means(ranks: Sequence[RankSteps]) -> tuple[dict[int, float], dict[int, dict[str, float]]]:
    """By rank, in ms, how long a step is, and what its parts are."""
    whole = {one.rank: one.mean_ms for one in ranks}
    return whole, {one.rank: {part: getattr(one, f"share_{part}") * one.mean_ms for part in PARTS} for one in ranks}


def _longer(whole: Mapping[int, float], each: Mapping[int, Mapping[str, float]]) -> Iterator[SlowRank]:
    """Those that are longer than the median at all, of ranks whose steps are `whole` with `each` of their parts."""
    if len(whole) < 2:
        return
    # Of two ranks the median is the faster one: half of the ranks may be slow.
    usual = {part: median_low(parts[part] for parts in each.values()) for part in PARTS}
    usual_own = median_low(sum(parts[part] for part in OWN) for parts in each.values())
    usual_step = median_low(whole.values())
    for rank, parts in each.items():
        longer = {part: max(parts[part] - usual[part], 0.0) for part in PARTS}
        others = longer["data"] + longer["optimizer"]
        longer["compute"] = min(longer["compute"], max(sum(parts[part] for part in OWN) - usual_own - others, 0.0))
        others += longer["compute"]
        longer["collective"] = min(longer["collective"], max(whole[rank] - usual_step - others, 0.0))
        ms = others + longer["collective"]
        if ms > 0:
            most_first = sorted((part for part in PARTS if longer[part]), key=lambda part: -longer[part])
            why = {part: longer[part] for part in most_first}
            yield SlowRank(rank, ms, most_first[0], longer[most_first[0]], why)


@dataclass(order=True)
class _Long:
    """One of the longest steps of a rank; in ns."""

    took: int
    step: int
    data: int = 0
    collective: int = 0
    optimizer: int = 0

    def parts_ms(self) -> dict[str, float]:
        known = {part: getattr(self, part) / 1e6 for part in PARTS if part != "compute"}
        return known | {"compute": max(self.took / 1e6 - sum(known.values()), 0.0)}


class OfRank:
    """The `step` records of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._times, self._parts = Times(), dict.fromkeys(("data", "collective", "optimizer"), 0)
        self._first: int | None = None
        self._last: int | None = None
        self._apart: list[Mapping[str, Any]] = []
        self._longest: list[_Long] = []

    def add(self, record: Mapping[str, Any]) -> None:
        took = integer(record, "duration")
        if took is None or took < 0 or record.get("unfinished"):
            return
        step = integer(record, "step")
        self._first, self._last = (step if self._first is None else self._first), (self._last if step is None else step)
        if record.get("first"):
            self._apart.append(record)
            return
        self._times.add(took)
        _add(self._parts, mapping(record, "metrics"))
        if step is not None and (len(self._longest) < HICCUPS or took > self._longest[0].took):
            parts = dict.fromkeys(self._parts, 0)
            _add(parts, mapping(record, "metrics"))
            keep = heapq.heappush if len(self._longest) < HICCUPS else heapq.heappushpop
            keep(self._longest, _Long(took, step, **parts))

    @property
    def began_with(self) -> int | None:
        """The number of its session's first step; None where that isn't known."""
        return integer(self._apart[0], "step") if self._apart else None

    def hiccups(self) -> list[_Long]:
        usual = self._times.percentile(0.5)
        return [one for one in self._longest if one.took > TIMES_THE_MEDIAN * usual]

    def usual(self, whole: RankSteps) -> RankSteps:
        """`whole`, which was told of it, as if there had been no hiccups."""
        count, total, hiccups = self._times.count, self._times.total, self.hiccups()
        left = total - sum(one.took for one in hiccups)
        if not hiccups or left <= 0:
            return whole
        shares = {
            name: (part - sum(getattr(one, name) for one in hiccups)) / left for name, part in self._parts.items()
        }
        return replace(
            whole,
            mean_ms=left / (count - len(hiccups)) / 1e6,
            share_data=shares["data"],
            share_collective=shares["collective"],
            share_optimizer=shares["optimizer"],
            share_compute=max(1 - sum(shares.values()), 0.0),
        )

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


_METRICS = tuple((name, f"{name}_ns") for name in ("data", "collective", "optimizer"))


def _add(parts: dict[str, int], metrics: Mapping[str, Any]) -> None:
    for name, key in _METRICS:
        part = number(metrics, key)
        if part is not None and part >= 0:
            parts[name] += int(part)
