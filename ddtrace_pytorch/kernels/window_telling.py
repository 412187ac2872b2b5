"""What is told of a profiler window: its span, those of its longest kernels, and its record in the run log. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddtrace_pytorch.kernels.aggregates import Aggregates
from ddtrace_pytorch.kernels.schedule import Plan
from ddtrace_pytorch.spans import Fact

NAME = "pytorch.profile"
KERNEL = "pytorch.kernel"

# Names of kernels are as long as their templates are deep.
NAME_LIMIT = 160

WHOLE = "complete"
PARTIAL = "partial"
SHORT = "cut short"
EMPTY = "empty"
FAILED = "failed"
SKIPPED = "skipped"
ABANDONED = "abandoned"


@dataclass(frozen=True)
class Told:
    """One window that is over, or that was not to be. `how`: ``schedule``, …; `start` in ns since the epoch, `duration`
    in ns; `why`: the reason, of one that is not whole or has no file; `memory`: the path of a snapshot."""

    how: str
    state: str
    plan: Plan
    start: int
    duration: int = 0
    activity: str = ""
    why: str | None = None
    path: str | None = None
    bytes: int | None = None
    memory: str | None = None
    results: Aggregates | None = None

    def record(self) -> dict[str, Any]:
        """The record of type ``profile`` of the run log."""
        record: dict[str, Any] = {
            "type": "profile",
            "ts": self.start + self.duration,
            "step": self.plan.first,
            "steps": self.plan.active,
            "how": self.how,
            "state": self.state,
            "start": self.start,
            "duration": self.duration,
        }
        record |= {
            name: value
            for name, value in (
                ("why", self.why), ("activity", self.activity), ("path", self.path), ("bytes", self.bytes),
                ("memory", self.memory),
            )
            if value
        }  # fmt: skip
        if self.results is not None:
            record["of"] = self.results.of
            record["metrics"] = metrics(self.results)
            record["kernels"] = [
                {"name": short(one.name), "count": one.many, "total_ns": one.total, "max_ns": one.longest}
                for one in self.results.top
            ]
            record["longest"] = [
                {"name": short(one.name), "start": one.start, "duration": one.end - one.start}
                for one in self.results.longest
            ]
        return record

    def facts(self) -> dict[str, Fact]:
        """The tags and metrics of its span."""
        facts: dict[str, Fact] = {
            "step": self.plan.first,
            "profile.steps": self.plan.active,
            "profile.how": self.how,
            "profile.state": self.state,
        }
        for name, value in (
            ("why", self.why), ("activity", self.activity), ("path", self.path), ("bytes", self.bytes),
            ("memory", self.memory),
        ):  # fmt: skip
            if value:
                facts[f"profile.{name}"] = value
        if self.results is not None:
            facts["profile.of"] = self.results.of
            facts |= {f"profile.{name}": value for name, value in metrics(self.results).items()}
            facts["profile.top"] = json.dumps(
                [
                    [short(one.name), one.many, _ms(one.total), _ms(one.total / one.many), _ms(one.longest)]
                    for one in self.results.top
                ],
                separators=(",", ":"),
            )
        return facts

    def kernels(self) -> Iterator[tuple[str, int, int]]:
        """The name, start and duration of each of the longest, for a span of its own."""
        for one in self.results.longest if self.results is not None else ():
            yield short(one.name), one.start, one.end - one.start


def metrics(results: Aggregates) -> dict[str, float]:
    """The numbers by name, times in ms."""
    start, end = results.window
    communication, idle = results.communication, results.idle
    found: dict[str, float] = {
        "events": results.many,
        "busy_share": results.busy / max(end - start, 1),
        "busy_ms": _ms(results.busy),
        "idle_ms": _ms(idle.total),
        "idle_longest_ms": _ms(idle.longest),
        "idle_gaps": idle.many,
        "communication_ms": _ms(communication.busy),
        "communication_calls": communication.many,
    }
    if communication.busy:
        found["communication_overlap"] = communication.overlapped / communication.busy
    return found


def short(name: str) -> str:
    return name if len(name) <= NAME_LIMIT else name[: NAME_LIMIT - 1] + "…"


def _ms(ns: float) -> float:
    return round(ns / 1e6, 6)
