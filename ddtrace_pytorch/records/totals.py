"""What was recorded by name, in constant memory: how often, how long, between which numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

from ddtrace_pytorch.histogram import BUCKETS, percentile
from ddtrace_pytorch.records.attributes import NUMBER_LIMIT
from ddtrace_pytorch.records.recorder import MOST_NAMES, OTHER
from ddtrace_pytorch.spans import Fact

T = TypeVar("T")

# Of fewer spans the median says little.
ENOUGH = 20
SLOW = 3
# So many names of scalars and of events go onto one span.
FACTS = 100


def named(by_name: dict[str, T], name: str, new: type[T]) -> T:
    """What is counted for `name`; for one too many, what is counted for all of those."""
    found = by_name.get(name)
    if found is None:
        if len(by_name) >= MOST_NAMES:
            name = OTHER
        found = by_name.setdefault(name, new())
    return found


@dataclass
class SpanTotals:
    """All spans of one name. `count` and what follows it: since the last summary; times in
    ns. `slowest_at`: its place. `not_sent`: there were too many in their step."""

    ever: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    ever_count: int = 0
    count: int = 0
    errors: int = 0
    time: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    slowest: int = -1
    slowest_at: str = ""
    not_sent: int = 0

    def is_slow(self, took: int) -> bool:
        """Whether one that took so long is far from what is usual for the name."""
        return self.ever_count >= ENOUGH and took > SLOW * percentile(self.ever, 0.5, took)

    def add(self, took: int, failed: bool, at: str) -> None:
        bucket = took.bit_length()
        self.ever[bucket] += 1
        self.ever_count += 1
        self.count += 1
        self.errors += failed
        self.time += took
        self.buckets[bucket] += 1
        if took > self.slowest:
            self.slowest, self.slowest_at = took, at

    def take(self) -> dict[str, Fact]:
        """The facts of a summary of at least one; what is counted begins anew."""
        facts: dict[str, Fact] = {
            "span.count": self.count,
            "span.errors": self.errors,
            "span.time_ms.total": self.time / 1e6,
            "span.time_ms.mean": self.time / self.count / 1e6,
            "span.time_ms.max": self.slowest / 1e6,
            "span.slowest_at": self.slowest_at,
        }
        for share in (50, 95, 99):
            facts[f"span.time_ms.p{share}"] = percentile(self.buckets, share / 100, self.slowest) / 1e6
        if self.not_sent:
            facts["span.not_sent"] = self.not_sent
        self.count = self.errors = self.time = self.not_sent = 0
        self.buckets = [0] * BUCKETS
        self.slowest, self.slowest_at = -1, ""
        return facts


@dataclass
class Numbers:
    """The numbers of one scalar: the `last`, and between which they lie, if they are any (NaN lies nowhere)."""

    last: float = math.nan
    least: float = math.inf
    most: float = -math.inf

    def add(self, number: float) -> None:
        self.last = number
        if number < self.least:
            self.least = number
        if number > self.most:
            self.most = number


@dataclass
class Said:
    """The scalars and events of one step, or since the last summary."""

    scalars: dict[str, Numbers] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)

    def scalar(self, name: str, number: float) -> None:
        named(self.scalars, name, Numbers).add(number)

    def event(self, name: str) -> None:
        if name not in self.events and len(self.events) >= MOST_NAMES:
            name = OTHER
        self.events[name] = self.events.get(name, 0) + 1

    def facts(self, summary: bool) -> dict[str, Fact]:
        """As tags and metrics: of a step the last of each number, in a `summary` also the least and the most."""
        facts: dict[str, Fact] = {}
        for name, numbers in [*self.scalars.items()][:FACTS]:
            key = f"scalar.{name}"
            if not summary:
                facts[key] = fact(numbers.last)
                continue
            facts[f"{key}.last"] = fact(numbers.last)
            if numbers.least <= numbers.most:
                facts[f"{key}.min"] = fact(numbers.least)
                facts[f"{key}.max"] = fact(numbers.most)
        for name, many in [*self.events.items()][:FACTS]:
            facts[f"event.{name}.count"] = many
        return facts


# What ddtrace sends of a larger one is another number.
EXACT = 1 << 53


def fact(number: float) -> Fact:
    """`number` as a span can have it: what isn't finite, or is too large, in words."""
    if isinstance(number, float):
        return number if math.isfinite(number) else "NaN" if math.isnan(number) else f"{'-' * (number < 0)}Infinity"
    if -EXACT <= number <= EXACT:
        return number
    # Python refuses to write one of thousands of digits.
    return str(number) if number.bit_length() <= NUMBER_LIMIT else "int"
