"""Which records are drawn: those of some steps, and of them some. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtrace_pytorch.runlog.fields import integer, mapping, number, text

COLLECTIVE = "pytorch.collective"

# What is thinned first, and what else if that is not enough. Everything else is always drawn.
FINE = frozenset(("user_span", "call", "span"))
COARSE = frozenset(("step", "scalar", "event", "beat"))


class Backwards(ValueError):
    """Of two steps the last comes before the first."""


@dataclass(frozen=True)
class Steps:
    """Steps from `first` to `last`, both among them; or the `latest` so many, until it is known which these are."""

    first: int | None = None
    last: int | None = None
    latest: int | None = None

    @property
    def all(self) -> bool:
        return self.first is self.last is self.latest is None

    def __contains__(self, step: int) -> bool:
        return (self.first is None or step >= self.first) and (self.last is None or step <= self.last)

    @classmethod
    def parse(cls, written: str) -> Steps:
        """``100:200``, ``100:``, ``:200``, ``100``.

        Raises:
            Backwards: the last comes before the first.
            ValueError: it is none of these.
        """
        first, colon, last = written.partition(":")
        if not colon:
            return cls(int(first), int(first))
        steps = cls(int(first) if first.strip() else None, int(last) if last.strip() else None)
        if steps.first is not None and steps.last is not None and steps.first > steps.last:
            raise Backwards(f"{written} ends before it begins")
        return steps


ALL_STEPS = Steps()


@dataclass
class StepTimes:
    """When the steps that may be drawn were, on one rank: `begin` to `end`, once it is known which are."""

    wanted: Steps
    seen: int = 0
    chosen: int = 0
    highest: int | None = None
    begin: int | None = None
    end: int | None = None
    _latest: deque[tuple[int, int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._latest = deque(maxlen=self.wanted.latest or 0)

    def add(self, step: int, start: int, end: int) -> None:
        self.seen += 1
        self.highest = step if self.highest is None else max(step, self.highest)
        if self.wanted.latest is not None:
            self._latest.append((step, start, end))
        elif step in self.wanted:
            self._choose(start, end)

    def settle(self, steps: Steps) -> None:
        """The latest are these `steps`."""
        for step, start, end in self._latest:
            if step in steps:
                self._choose(start, end)
        self._latest.clear()

    def _choose(self, start: int, end: int) -> None:
        self.chosen += 1
        self.begin = start if self.begin is None else min(start, self.begin)
        self.end = end if self.end is None else max(end, self.end)


@dataclass(frozen=True)
class Window:
    """What of one rank belongs to `steps`: what says so, and what has no step and was between `begin` and `end`."""

    steps: Steps
    begin: int
    end: int

    def __contains__(self, record: Mapping[str, Any]) -> bool:
        if record["type"] == "identity":
            return True
        step = integer(record, "step")
        if step is not None:
            return step in self.steps
        start = integer(record, "start")
        return record["ts"] >= self.begin and (record["ts"] if start is None else start) <= self.end


@dataclass(frozen=True)
class Thinning:
    """Of what is thinned every so many: calls by the number that all ranks know them by, so that they stay whole, and
    all else by its step, so that these are whole. What failed is always drawn."""

    fine: int = 1
    coarse: int = 1

    def __contains__(self, record: Mapping[str, Any]) -> bool:
        kind = record["type"]
        if kind in FINE:
            return self.fine == 1 or _of_fine(record, self.fine)
        if kind in COARSE and self.coarse > 1:
            return _number(record) % self.coarse == 0
        return True


def _of_fine(record: Mapping[str, Any], every: int) -> bool:
    if record.get("error"):
        return True
    if record["type"] == "user_span":
        return _number(record) % every == 0
    called = call_of(record)
    if called is not None:
        return called[1] % every == 0
    # A transfer between two ranks has no number that both know.
    return record["type"] == "span" and (record.get("name") != COLLECTIVE or record["ts"] // 1000 % every == 0)


def _number(record: Mapping[str, Any]) -> int:
    step = integer(record, "step")
    return (integer(record, "seq") or 0) if step is None else step


def call_of(record: Mapping[str, Any]) -> tuple[str, int] | None:
    """The group and number by which all its ranks know the collective of a `call` or `span`; None if it is none."""
    if record["type"] == "call":
        key = integer(record, "key")
        return None if key is None else (text(record, "group"), key)
    if record["type"] == "span" and record.get("name") == COLLECTIVE:
        seq = number(mapping(record, "metrics"), "collective.seq")
        return None if seq is None or not seq.is_integer() else (
            text(mapping(record, "tags"), "collective.group_name"), int(seq)
        )  # fmt: skip
    return None


def thinning_for(fine: float, coarse: float, fixed: float, limit: float) -> Thinning:
    """As much as keeps bytes of these three kinds together below `limit`, as far as that can be."""
    if fine + coarse + fixed <= limit:
        return Thinning()
    room = max(limit - fixed, limit / 4)
    every = max(-int(-coarse // (room * 3 / 4)), 1)
    left = max(room - coarse / every, room / 4)
    fewer = max(-int(-fine // left), 1)
    # Of the steps that are drawn, some have their spans.
    return Thinning(fine=-(-fewer // every) * every, coarse=every)
