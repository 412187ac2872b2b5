"""What the ranks of one attempt recorded by name, and their checkpoints, from the records of their logs. Pure.

From the records one by one, not from the totals that are told once a minute: those of a rank that was killed lack the
last minute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ddtrace_pytorch.histogram import Times
from ddtrace_pytorch.records.totals import fact, named
from ddtrace_pytorch.runlog.fields import integer, mapping, number, text
from ddtrace_pytorch.spans import Fact

T = TypeVar("T")

TYPES = ("user_span", "event", "scalar", "span")
CHECKPOINT = "pytorch.checkpoint"


@dataclass
class UserSpan:
    """All spans of one name. Times in ms; the slowest was on `slowest_rank`, at the place `slowest_at`."""

    name: str
    count: int
    errors: int
    total_ms: float
    mean_ms: float
    p95_ms: float
    max_ms: float
    slowest_rank: int
    slowest_at: str


@dataclass
class Scalar:
    """All numbers of one name, in order of time. Those that are not finite are words (``NaN``), and neither `min` nor
    `max`, which are null where there is no other. `not_finite` is how many these are; the first of them was on
    `first_not_finite_rank`, in the step `first_not_finite_step` (null: not known, or there is none)."""

    name: str
    count: int
    first: Fact
    last: Fact
    min: Fact | None
    max: Fact | None
    not_finite: int
    first_not_finite_step: int | None
    first_not_finite_rank: int | None


@dataclass
class Event:
    name: str
    count: int


@dataclass
class Checkpoints:
    """All of one operation. `bytes`: null where no size is known; `last_path`: null where it went to no path."""

    op: str
    count: int
    errors: int
    bytes: int | None
    total_ms: float
    slowest_ms: float
    slowest_rank: int
    last_path: str | None


@dataclass
class Recorded:
    """Spans: who took longest in all comes first; scalars, events and checkpoints: who is there most often."""

    spans: list[UserSpan] = field(default_factory=list)
    scalars: list[Scalar] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    checkpoints: list[Checkpoints] = field(default_factory=list)


@dataclass
class _Spans:
    times: Times = field(default_factory=Times)
    errors: int = 0
    slowest: tuple[int, int, str] = (-1, 0, "")

    def pour(self, other: _Spans) -> None:
        self.times.join(other.times)
        self.errors += other.errors
        if other.slowest[0] > self.slowest[0]:
            self.slowest = other.slowest


@dataclass
class _Numbers:
    count: int = 0
    first: tuple[int, float] = (0, math.nan)
    last: tuple[int, float] = (0, math.nan)
    least: float = math.inf
    most: float = -math.inf
    not_finite: int = 0
    # When, in which step and on which rank the first of these was.
    lost: tuple[int, int | None, int] | None = None

    def add(self, at: int, value: float, step: int | None, rank: int) -> None:
        if not self.count or at < self.first[0]:
            self.first = at, value
        if not self.count or at >= self.last[0]:
            self.last = at, value
        self.count += 1
        if isinstance(value, int) or math.isfinite(value):
            self.least, self.most = min(value, self.least), max(value, self.most)
        else:
            self.not_finite += 1
            if self.lost is None or at < self.lost[0]:
                self.lost = at, step, rank

    def pour(self, other: _Numbers) -> None:
        if not other.count:
            return
        if not self.count or other.first[0] < self.first[0]:
            self.first = other.first
        if not self.count or other.last[0] >= self.last[0]:
            self.last = other.last
        self.count += other.count
        self.least, self.most = min(other.least, self.least), max(other.most, self.most)
        self.not_finite += other.not_finite
        if other.lost is not None and (self.lost is None or other.lost[0] < self.lost[0]):
            self.lost = other.lost


@dataclass
class _Events:
    count: int = 0


@dataclass
class _Checkpoints:
    count: int = 0
    errors: int = 0
    bytes: int | None = None
    ms: float = 0.0
    slowest: tuple[float, int] = (-1.0, 0)
    last: tuple[int, str | None] = (0, None)

    def pour(self, other: _Checkpoints) -> None:
        self.count += other.count
        self.errors += other.errors
        self.ms += other.ms
        if other.bytes is not None:
            self.bytes = (self.bytes or 0) + other.bytes
        self.slowest = max(self.slowest, other.slowest)
        if other.last[0] >= self.last[0]:
            self.last = other.last


class Gathering:
    """What some ranks recorded. Of more than a thousand names of a kind the others count together."""

    def __init__(self) -> None:
        self.spans: dict[str, _Spans] = {}
        self.scalars: dict[str, _Numbers] = {}
        self.events: dict[str, _Events] = {}
        self.checkpoints: dict[str, _Checkpoints] = {}

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """One record of `rank`, of one of the :data:`TYPES`."""
        kind = record["type"]
        if kind == "user_span":
            self._span(rank, record)
        elif kind == "scalar":
            for name, value in mapping(record, "metrics").items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    named(self.scalars, name, _Numbers).add(record["ts"], value, integer(record, "step"), rank)
        elif kind == "event":
            # Those without a number are our own.
            if "seq" in record:
                named(self.events, text(record, "name"), _Events).count += 1
        elif record.get("name") == CHECKPOINT:
            self._checkpoint(rank, record)

    def _span(self, rank: int, record: Mapping[str, Any]) -> None:
        took = integer(record, "duration")
        if took is None or took < 0:
            return
        one = named(self.spans, text(record, "name"), _Spans)
        one.times.add(took)
        one.errors += "error" in record
        if took > one.slowest[0]:
            one.slowest = took, rank, text(record, "at")

    def _checkpoint(self, rank: int, record: Mapping[str, Any]) -> None:
        tags, metrics = mapping(record, "tags"), mapping(record, "metrics")
        took = integer(record, "duration") or 0
        if took < 0:
            return
        one = named(self.checkpoints, text(tags, "checkpoint.op"), _Checkpoints)
        many = max(int(_sound(metrics, "checkpoint.count") or 1), 1)
        one.count += many
        one.errors += many if record.get("error") else 0
        one.ms += _sound(metrics, "checkpoint.ms") or 0.0
        size = _sound(metrics, "checkpoint.bytes")
        if size is not None:
            one.bytes = (one.bytes or 0) + int(size)
        one.slowest = max(one.slowest, (took / 1e6, rank))
        path = text(tags, "checkpoint.path") or None
        if record["ts"] >= one.last[0]:
            one.last = record["ts"], path

    def pour(self, other: Gathering) -> None:
        """Add what other ranks recorded."""
        for name, spans in other.spans.items():
            named(self.spans, name, _Spans).pour(spans)
        for name, numbers in other.scalars.items():
            named(self.scalars, name, _Numbers).pour(numbers)
        for name, events in other.events.items():
            named(self.events, name, _Events).count += events.count
        for name, checkpoints in other.checkpoints.items():
            named(self.checkpoints, name, _Checkpoints).pour(checkpoints)

    def told(self) -> Recorded:
        spans = [_of_spans(name, one) for name, one in self.spans.items()]
        scalars = [_of_numbers(name, one) for name, one in self.scalars.items()]
        events = [Event(name, one.count) for name, one in self.events.items()]
        checkpoints = [
            Checkpoints(
                op, one.count, one.errors, one.bytes, one.ms, one.slowest[0], one.slowest[1], one.last[1]
            )
            for op, one in self.checkpoints.items()
        ]  # fmt: skip
        return Recorded(
            spans=sorted(spans, key=lambda one: (-one.total_ms, one.name)),
            scalars=sorted(scalars, key=lambda one: (-one.count, one.name)),
            events=sorted(events, key=lambda one: (-one.count, one.name)),
            checkpoints=sorted(checkpoints, key=lambda one: (-one.count, one.op)),
        )


def _of_spans(name: str, one: _Spans) -> UserSpan:
    times, (_, rank, at) = one.times, one.slowest
    return UserSpan(
        name=name,
        count=times.count,
        errors=one.errors,
        total_ms=times.total / 1e6,
        mean_ms=times.total / times.count / 1e6,
        p95_ms=times.percentile(0.95) / 1e6,
        max_ms=times.longest / 1e6,
        slowest_rank=rank,
        slowest_at=at,
    )


def _of_numbers(name: str, one: _Numbers) -> Scalar:
    some = one.least <= one.most
    least, most = (fact(one.least), fact(one.most)) if some else (None, None)
    _, step, rank = one.lost or (0, None, None)
    return Scalar(name, one.count, fact(one.first[1]), fact(one.last[1]), least, most, one.not_finite, step, rank)


def _sound(metrics: Mapping[str, Any], name: str) -> float | None:
    value = number(metrics, name)
    return value if value is not None and value >= 0 else None
