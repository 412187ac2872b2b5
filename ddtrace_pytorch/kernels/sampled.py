"""What is told of the steps whose kernels were sampled: a record of each, and totals, a span once a minute. Pure.

Times in ns. A step's kernels are those that were launched in it; the GPU runs them later.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddtrace_pytorch.kernels.aggregates import COMMUNICATION, TOP, Aggregates, Event, aggregate
from ddtrace_pytorch.kernels.demangling import name_of
from ddtrace_pytorch.kernels.sampler_library import Raw
from ddtrace_pytorch.kernels.window_telling import metrics, short
from ddtrace_pytorch.spans import Fact

NAME = "pytorch.kernels"
RECORD = "kernels"
WHOLE, PARTIAL = "complete", "partial"


class Sum(NamedTuple):
    """All kernels of one name: how many, how long in all, how long the longest."""

    many: int
    total: int
    longest: int


@dataclass(frozen=True)
class Run:
    """Steps in a row that were sampled. `first`: its number; `start`, `end`: on the host's clock, in ns since the
    epoch; `kernels` by name; `lost`: records that CUPTI, or the sampler, dropped, and `is_partial` if some are missing
    of which nobody knows how many; `detail`: of a run whose kernels were kept one by one; `parent`: the ids of the
    trace and of the span that they belong to."""

    first: int
    steps: int
    start: int
    end: int
    kernels: Mapping[str, Sum]
    lost: int
    is_partial: bool = False
    detail: Aggregates | None = None
    parent: tuple[int, int] | None = None

    def record(self) -> dict[str, Any]:
        """The record of type ``kernels`` of the run log."""
        communication = of_communication(self.kernels)
        numbers: dict[str, float] = {
            "events": sum(one.many for one in self.kernels.values()),
            "kernels_ms": _ms(sum(one.total for one in self.kernels.values())),
            "communication_ms": _ms(communication.total),
            "communication_calls": communication.many,
        }
        record: dict[str, Any] = {
            "type": RECORD,
            "ts": self.end,
            "step": self.first,
            "steps": self.steps,
            "state": PARTIAL if self.lost or self.is_partial else WHOLE,
            "start": self.start,
            "duration": self.end - self.start,
            "of": "kernels",
            "metrics": numbers,
        }
        if self.detail is not None:
            # Not its communication_ms: as on all others, it is the sum of what collectives took, not when any ran.
            record["metrics"] = metrics(self.detail) | numbers
            record["longest"] = [
                {"name": short(one.name), "start": one.start, "duration": one.end - one.start, "stream": one.lane}
                for one in self.detail.longest
            ]
            record["kernels"] = [
                {"name": short(name), "count": one.many, "total_ns": one.total, "max_ns": one.longest}
                for name, one in top(self.kernels)
            ]
        return record


def detail(events: Sequence[Event]) -> Aggregates | None:
    """Of kernels one by one, from the first one's start to the end of all; None where there are none."""
    if not events:
        return None
    return aggregate(events, min(event.start for event in events), max(event.end for event in events))


def event(raw: Raw, ahead: int) -> Event:
    """A record that was kept, on the clock that CUPTI's is `ahead` of."""
    return Event(name_of(raw.name), raw.start - ahead, raw.end - ahead, raw.stream, True)


@dataclass
class Totals:
    """Of all runs since it was made."""

    steps: int = 0
    lost: int = 0
    host: int = 0
    kernels: dict[str, Sum] = field(default_factory=dict)
    details: list[Aggregates] = field(default_factory=list)

    def add(self, run: Run) -> None:
        self.steps += run.steps
        self.lost += run.lost
        self.host += run.end - run.start
        add_up(self.kernels, run.kernels.items())
        if run.detail is not None:
            self.details.append(run.detail)

    def facts(self, every: int, cost: float | None) -> dict[str, Fact]:
        """The tags and metrics of their span; `every` how many steps one is sampled, and the share that it costs."""
        steps = max(self.steps, 1)
        communication = of_communication(self.kernels)
        facts: dict[str, Fact] = {
            "kernels.steps": self.steps,
            "kernels.every": every,
            "kernels.per_step": sum(one.many for one in self.kernels.values()) / steps,
            "kernels.time_ms": _ms(sum(one.total for one in self.kernels.values()) / steps),
            "kernels.communication_ms": _ms(communication.total / steps),
            "kernels.communication_calls": communication.many / steps,
            "kernels.lost": self.lost,
            "kernels.top": json.dumps(
                [
                    [short(name), one.many, _ms(one.total), _ms(one.total / one.many), _ms(one.longest)]
                    for name, one in top(self.kernels)
                ],
                separators=(",", ":"),
            ),
        }
        if cost is not None:
            facts["kernels.cost_share"] = round(cost, 6)
        if self.details:
            took = sum(end - start for start, end in (one.window for one in self.details))
            talked = sum(one.communication.busy for one in self.details)
            facts["kernels.busy_share"] = sum(one.busy for one in self.details) / max(took, 1)
            facts["kernels.idle_longest_ms"] = _ms(max(one.idle.longest for one in self.details))
            facts["kernels.idle_gaps"] = sum(one.idle.many for one in self.details) / len(self.details)
            if talked:
                facts["kernels.communication_overlap"] = (
                    sum(one.communication.overlapped for one in self.details) / talked
                )
        return facts


def add_up(into: dict[str, Sum], more: Iterable[tuple[str, Sum]]) -> None:
    """Add sums to those of the same names."""
    for name, one in more:
        before = into.get(name)
        into[name] = (
            one
            if before is None
            else Sum(before.many + one.many, before.total + one.total, max(before.longest, one.longest))
        )


def of_communication(kernels: Mapping[str, Sum]) -> Sum:
    """All of NCCL's kernels, and of others like it."""
    found = [one for name, one in kernels.items() if COMMUNICATION.search(name)]
    return Sum(
        sum(one.many for one in found), sum(one.total for one in found), max((one.longest for one in found), default=0)
    )


def top(kernels: Mapping[str, Sum]) -> list[tuple[str, Sum]]:
    """Those that took longest in all."""
    return heapq.nsmallest(TOP, kernels.items(), key=lambda one: (-one[1].total, one[0]))


def _ms(ns: float) -> float:
    return round(ns / 1e6, 6)
