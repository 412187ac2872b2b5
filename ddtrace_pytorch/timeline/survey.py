"""The first look at a rank's log: who it is, when which steps were, how large what is, and when collectives ended."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ddtrace_pytorch.collectives.surface import ALL_WAIT_FOR_ALL
from ddtrace_pytorch.runlog.fields import integer, mapping, text
from ddtrace_pytorch.runlog.reader import RankLog, Sift, read
from ddtrace_pytorch.timeline.clocks import Call, Ends
from ddtrace_pytorch.timeline.marks import span_times
from ddtrace_pytorch.timeline.quick import number_of
from ddtrace_pytorch.timeline.selection import COARSE, FINE, Steps, StepTimes, call_of

# How much larger a record is in the picture; what isn't named here becomes one event.
GROWTH = {b"step": 2.2, b"scalar": 1.6, b"call": 2.0, b"beat": 1.3}
EVENT = 60

_TYPE = re.compile(rb'\{"type":"(\w+)"')

# In the lines of calls that may be of those that are waited for.
_COMPLETE, _BARRIER = b'"source":"completion"', b'"op":"barrier"'

_FINE = frozenset(word.encode() for word in FINE)
_COARSE = frozenset(word.encode() for word in COARSE)


@dataclass
class Surveyed:
    """`tallies` are the lines of each type of record, and their bytes."""

    log: RankLog
    identity: dict[str, Any]
    steps: StepTimes
    tallies: dict[bytes, list[int]] = field(default_factory=dict)

    def weight(self) -> tuple[float, float, float]:
        """Bytes that its picture will take: of what is thinned first, of what is thinned later, of all else."""
        weights = {"fine": 0.0, "coarse": 0.0, "fixed": 0.0}
        for kind, (lines, size) in self.tallies.items():
            sort = "fine" if kind in _FINE else "coarse" if kind in _COARSE else "fixed"
            weights[sort] += size * GROWTH.get(kind, 1.0) + EVENT * lines
        return weights["fine"], weights["coarse"], weights["fixed"]

    @property
    def source(self) -> str:
        return self.log.source

    @property
    def began(self) -> int:
        return integer(self.log.identity, "ts") or 0

    def title(self, attempt: int | None, digits: int) -> str:
        """Who this is: rank, of at least so many `digits`, host, GPU and place in the meshes."""
        who = "rank" if self.log.trains else self.source
        gpu, tags = gpu_of(self.identity), mapping(self.identity, "tags")
        places = [
            f"{name.removeprefix(MESH)}={value}"
            for name, value in tags.items()
            if name.startswith(MESH) and not name.endswith(".size") and type(value) is int
        ]
        return " · ".join(
            part
            for part in (
                "" if attempt is None else f"attempt {attempt}", f"{who} {self.log.rank:0{digits}}", self.log.host, gpu,
                " ".join(places),
            )
            if part
        )  # fmt: skip


MESH = "pytorch.mesh."


def gpu_of(identity: dict[str, Any]) -> str:
    """Enough of its GPU's id to know it among those of a job; nothing if it has none."""
    device = mapping(identity, "device")
    if text(device, "device.kind") == "cpu":
        return ""
    found = text(device, "device.id")
    return found[:12] if found.startswith(("GPU-", "MIG-")) else found.removeprefix(f"{text(identity, 'host')}:")


def survey(log: RankLog, wanted: Steps, ends: Ends | None) -> Surveyed:
    """Look at `log`, and put the ends of its collectives into `ends`, if that is wanted."""
    one = Surveyed(log, log.identity, StepTimes(wanted))
    calls = _calls(one, ends)
    if ends is None:
        deque(calls, maxlen=0)
    else:
        ends.add(log.host, calls)
    return one


def _calls(one: Surveyed, ends: Ends | None) -> Iterator[tuple[Call, int]]:
    for record in read(one.log, sift=_counting(one, ends)):
        if record["type"] == "identity":
            one.identity = {**one.identity, **{name: said for name, said in record.items() if said is not None}}
            continue
        times = span_times(record)
        if times is None:
            continue
        if record["type"] == "step":
            step = integer(record, "step")
            if step is not None:
                one.steps.add(step, *times)
            continue
        called = call_of(record)
        if called is not None and _waited_for(text(record, "op"), text(record, "source")):
            group, number = called
            yield ((one.log.incarnation, group), number), times[1]


def _counting(one: Surveyed, ends: Ends | None) -> Sift:
    """What counts the lines of each type, and has those parsed that are needed: of calls, whose ends are kept."""
    tallies = one.tallies
    parsed = {b"identity"} | (set() if one.steps.wanted.all else {b"step"})

    def sift(lines: list[bytes]) -> Iterator[bytes]:
        for line in lines:
            found = _TYPE.match(line)
            if found is None:
                yield line
                continue
            kind = found[1]
            tally = tallies.get(kind)
            if tally is None:
                tally = tallies[kind] = [0, 0]
            tally[0] += 1
            tally[1] += len(line)
            if kind in parsed or (
                ends is not None
                and kind == b"call"
                and (_COMPLETE in line or _BARRIER in line)
                and not ends.passes(number_of(line))
            ):
                yield line

    return sift


def _waited_for(operation: str, source: str) -> bool:
    """Whether such a call is over when all have come. NCCL's other calls come back when the work is queued."""
    return operation == "barrier" or (source == "completion" and operation in ALL_WAIT_FOR_ALL)
