"""What is told of steps, as spans and run-log records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ddtrace_pytorch.histogram import Times
from ddtrace_pytorch.spans import Fact
from ddtrace_pytorch.training.progress import Step
from ddtrace_pytorch.training.steps import Reading

STEP = "pytorch.step"
SUMMARY = "pytorch.steps"


class Spent(NamedTuple):
    """What some time went into, each part by itself, all in ns: `data` that was waited for, `collective` calls, the
    `optimizer` without those, and all the `rest`, of the `wall` time. `garbage` was collected in any of them."""

    wall: int = 0
    data: int = 0
    collective: int = 0
    optimizer: int = 0
    garbage: int = 0

    @property
    def rest(self) -> int:
        return self.wall - self.data - self.collective - self.optimizer

    def and_then(self, other: Spent) -> Spent:
        return Spent(
            self.wall + other.wall,
            self.data + other.data,
            self.collective + other.collective,
            self.optimizer + other.optimizer,
            self.garbage + other.garbage,
        )

    def shares(self) -> dict[str, Fact]:
        """The parts of the wall time, which add up to 1."""
        if not self.wall:
            return {}
        parts = {"data": self.data, "collective": self.collective, "optimizer": self.optimizer, "compute": self.rest}
        return {f"step.share.{name}": part / self.wall for name, part in parts.items()}


def spent(start: Reading, end: Reading) -> Spent:
    """What the time between two readings went into.

    Collectives of several threads at once take more time than there is, and torch's own may run while the thread that
    trains does something else: what doesn't fit in the wall time is left out.
    """
    at, data, collective, optimizer, garbage = (now - before for now, before in zip(end, start, strict=True))
    wall = max(at, 0)
    data = min(max(data, 0), wall)
    optimizer = min(max(optimizer, 0), wall - data)
    collective = min(max(collective, 0), wall - data - optimizer)
    return Spent(wall, data, collective, optimizer, garbage)


class Memory(NamedTuple):
    """Of the device, in bytes: what tensors have allocated, and the most that they ever had."""

    allocated: int
    peak: int

    def facts(self) -> dict[str, Fact]:
        return {"device.memory.allocated": self.allocated, "device.memory.peak": self.peak}


def step_record(
    step: Step, start: int, times: Spent, memory: Memory | None, unfinished: bool, first: bool
) -> dict[str, Any]:
    """The record of type ``step`` of the run log; `start` in ns since the epoch. `first`: of its session."""
    parts = {"data": times.data, "collective": times.collective, "optimizer": times.optimizer, "gc": times.garbage}
    record: dict[str, Any] = {
        "type": "step",
        "ts": start + times.wall,
        "step": step.number,
        "relative_step": step.relative,
        "start": start,
        "duration": times.wall,
        "metrics": {f"{name}_ns": part for name, part in parts.items() if part},
    }
    if memory is not None:
        record["metrics"] |= memory.facts()
    if step.tags:
        record["tags"] = list(step.tags)
    if first:
        record["first"] = True
    if unfinished:
        record["unfinished"] = True
    return record


def step_facts(step: Step, times: Spent, memory: Memory | None, unfinished: bool, first: bool) -> dict[str, Fact]:
    """The tags and metrics of the span of one step."""
    facts: dict[str, Fact] = {"step": step.number or 0, "step.time_ms": times.wall / 1e6, **times.shares()}
    if step.relative is not None:
        facts["step.relative"] = step.relative
    if times.garbage:
        facts["step.gc_ms"] = times.garbage / 1e6
    if memory is not None:
        facts |= memory.facts()
    if step.tags:
        facts["step.tags"] = ",".join(step.tags)
    if first:
        facts["step.first"] = "true"
    if unfinished:
        facts["step.unfinished"] = "true"
    return facts


def summary_facts(
    took: Times, times: Spent, first: int | None, memory: Memory | None, more: Mapping[str, Fact]
) -> dict[str, Fact]:
    """The tags and metrics of the summary of the steps that `took` counts; `more`: what else there is to say. `first`:
    if the session's first is among them, how long that took, in ns."""
    facts: dict[str, Fact] = {"pytorch.steps": took.count + (first is not None)}
    if first is not None:
        facts["step.first_ms"] = first / 1e6
    if took.count:
        facts |= {f"step.time_ms.p{share}": took.percentile(share / 100) / 1e6 for share in (50, 95, 99)}
        facts |= {"step.time_ms.max": took.longest / 1e6, "step.per_second": took.count / (took.total / 1e9 or 1.0)}
        facts |= times.shares()
    if memory is not None:
        facts |= memory.facts()
    return facts | dict(more)
