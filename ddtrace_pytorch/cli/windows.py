"""What the GPU did in some steps of one attempt, and who is late in them: in profiler windows, from the `profile`
records of its ranks' logs, and in the steps whose kernels were counted, from the `kernels` records. Pure.

A collective's kernel runs until all ranks have come, so **the rank whose kernels are the shortest is the late one**:
the others' run while they wait for it. Compared are windows over the same steps, which all ranks that have windows took
whole, with as many collectives on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from ddtrace_pytorch.runlog.fields import integer, mapping, number, text

PROFILED, COUNTED = ("profile",), ("kernels",)
COMPLETE = "complete"
# Of the time that windows took, as much as the others have to have waited longer.
NOTABLE = 0.05


@dataclass
class RankWindows:
    """Of one rank: how many `windows` it had; of these, on average, how much of the time something ran (null: not
    known), the time of communication, and what part of that was hidden by computing (null: there was none); and the
    longest time of all in which nothing ran. `top` took longest in all, `top_ms`. `without` are windows that came to
    nothing, by the state."""

    rank: int
    windows: int
    of: str
    busy_share: float | None
    idle_longest_ms: float
    communication_ms: float
    communication_overlap: float | None
    top: str
    top_ms: float
    without: dict[str, int]


@dataclass
class Late:
    """The `rank` whose collectives took `ms` a window, and on the others `others_ms`, in so many `windows`."""

    rank: int
    ms: float
    others_ms: float
    windows: int


@dataclass
class Windows:
    """Of one attempt; `late` is null where nobody is, or it can't be told."""

    ranks: list[RankWindows] = field(default_factory=list)
    late: Late | None = None


@dataclass(frozen=True)
class _Window:
    busy: float | None
    idle: float
    communication: float
    overlap: float | None
    calls: int
    took_ms: float
    whole: bool
    many: int


class Gathering:
    """The records of one kind of all ranks, rank after rank. `each_step`: a record of several steps is as many as
    these."""

    def __init__(self, each_step: bool = False) -> None:
        self._each_step = each_step
        self._windows: dict[int, dict[int, _Window]] = {}
        self._top: dict[int, dict[str, float]] = {}
        self._of: dict[int, str] = {}
        self._without: dict[int, dict[str, int]] = {}

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """One record of `rank`, all of :data:`PROFILED` or all of :data:`COUNTED`."""
        state, metrics, step = text(record, "state"), mapping(record, "metrics"), integer(record, "step")
        if not metrics or step is None:
            counts = self._without.setdefault(rank, {})
            counts[state] = counts.get(state, 0) + 1
            return
        self._windows.setdefault(rank, {})[step] = _Window(
            busy=_sound(metrics, "busy_share") if "busy_share" in metrics else None,
            idle=_sound(metrics, "idle_longest_ms"),
            communication=_sound(metrics, "communication_ms"),
            overlap=_sound(metrics, "communication_overlap") if "communication_overlap" in metrics else None,
            calls=int(_sound(metrics, "communication_calls")),
            took_ms=(integer(record, "duration") or 0) / 1e6,
            whole=state == COMPLETE,
            many=max(integer(record, "steps") or 1, 1) if self._each_step else 1,
        )
        self._of[rank] = text(record, "of")
        kernels = record.get("kernels")
        totals = self._top.setdefault(rank, {})
        for kernel in kernels if isinstance(kernels, list) else ():
            if isinstance(kernel, dict):
                name = text(kernel, "name")
                totals[name] = totals.get(name, 0.0) + _sound(kernel, "total_ns") / 1e6

    def pour(self, other: Gathering) -> None:
        """Add those of other ranks."""
        for mine, theirs in (
            (self._windows, other._windows), (self._top, other._top), (self._of, other._of),
            (self._without, other._without),
        ):  # fmt: skip
            mine.update(theirs)  # type: ignore[arg-type]

    def told(self) -> Windows:
        """What came of it."""
        ranks = sorted(self._windows.keys() | self._without.keys())
        return Windows([self._rank(rank) for rank in ranks], self._late())

    def _rank(self, rank: int) -> RankWindows:
        windows = list(self._windows.get(rank, {}).values())
        many = sum(one.many for one in windows)
        shares = [one.busy for one in windows if one.busy is not None]
        overlaps = [one.overlap for one in windows if one.overlap is not None]
        top, top_ms = max(self._top.get(rank, {}).items(), key=lambda one: (one[1], one[0]), default=("", 0.0))
        return RankWindows(
            rank=rank,
            windows=many,
            of=self._of.get(rank, ""),
            busy_share=mean(shares) if shares else None,
            idle_longest_ms=max((one.idle for one in windows), default=0.0),
            communication_ms=sum(one.communication for one in windows) / many if many else 0.0,
            communication_overlap=mean(overlaps) if overlaps else None,
            top=top,
            top_ms=top_ms,
            without=self._without.get(rank, {}),
        )

    def _late(self) -> Late | None:
        ranks = list(self._windows)
        if len(ranks) < 2:
            return None
        spent, took, windows = dict.fromkeys(ranks, 0.0), 0.0, 0
        for step in set.intersection(*(set(one) for one in self._windows.values())):
            there = {rank: self._windows[rank][step] for rank in ranks}
            calls = {(one.calls, one.many) for one in there.values()}
            if (
                not all(one.whole for one in there.values())
                or len(calls) > 1
                or not any(one.calls for one in there.values())
            ):
                continue
            windows += next(iter(there.values())).many
            took += median(one.took_ms for one in there.values())
            for rank, one in there.items():
                spent[rank] += one.communication
        late = min(ranks, key=lambda rank: (spent[rank], rank))
        others = median(spent[rank] for rank in ranks if rank != late)
        if not windows or others - spent[late] < NOTABLE * took:
            return None
        return Late(late, spent[late] / windows, others / windows, windows)


def _sound(metrics: Mapping[str, Any], name: str) -> float:
    value = number(metrics, name)
    return float(value) if value is not None and math.isfinite(value) else 0.0
