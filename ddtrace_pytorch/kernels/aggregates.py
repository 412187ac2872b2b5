"""What the events of one profiler window come to. Pure; all times in ns.

Of a GPU, what counts are its kernels, copies and fills. Where none was seen, operators on the CPU take their place:
these lie in each other, so that of each only the time counts that is its own.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddtrace_pytorch.kernels.intervals import Interval, gaps, length, overlap, union

TOP = 20
LONGEST = 50

# By their names: NCCL's kernels, and on the CPU what the backends themselves do.
COMMUNICATION = re.compile(r"nccl|rccl|nvshmem|gloo:|mpi:|ucc:", re.IGNORECASE)
# On the CPU: what only issues a collective, or waits for one, computes nothing.
_NO_WORK = re.compile(r"c10d::|record_param_comms|_c10d_functional::|ProfilerStep#")


class Event(NamedTuple):
    """`lane`: what it shares a line with, a thread or a stream; `on_gpu`: it ran there."""

    name: str
    start: int
    end: int
    lane: int
    on_gpu: bool


class Kernel(NamedTuple):
    """All runs of one kernel or operator: how many, how long in all, and how long the longest."""

    name: str
    many: int
    total: int
    longest: int


class Communication(NamedTuple):
    """How long collectives ran, how long of that something was computed as well, and how many there were."""

    busy: int
    overlapped: int
    many: int


class Idle(NamedTuple):
    """How long nothing ran, the longest of these times, and how many there were."""

    total: int
    longest: int
    many: int


class Aggregates(NamedTuple):
    """`of`: ``kernels`` or ``operators``; `window`: its start and end; `busy`: how long of that any of them ran."""

    of: str
    window: Interval
    many: int
    busy: int
    communication: Communication
    idle: Idle
    top: Sequence[Kernel]
    longest: Sequence[Event]


def aggregate(events: Iterable[Event], start: int, end: int) -> Aggregates:
    """Of a window from `start` to `end`."""
    found = list(events)
    on_gpu = [event for event in found if event.on_gpu]
    counted = on_gpu or [event for event in found if not _NO_WORK.match(event.name)]
    communicates = {name: bool(COMMUNICATION.search(name)) for name in {event.name for event in counted}}
    communication = _within([one for one in counted if communicates[one.name]], start, end)
    computing = _within([one for one in counted if not communicates[one.name]], start, end)
    busy = union([*communication, *computing])
    idle = [end - start for start, end in gaps(busy, start, end)]
    return Aggregates(
        of="kernels" if on_gpu else "operators",
        window=(start, end),
        many=len(counted),
        busy=length(busy),
        communication=Communication(
            length(communication),
            length(overlap(communication, computing)),
            sum(communicates[event.name] for event in counted),
        ),
        idle=Idle(sum(idle), max(idle, default=0), len(idle)),
        top=_top(counted, [one.end - one.start for one in counted] if on_gpu else own_times(counted)),
        longest=sorted(heapq.nlargest(LONGEST, counted, key=_duration), key=_start),
    )


def own_times(events: Sequence[Event]) -> list[int]:
    """How long each took without those that lie within it on its lane."""
    own = [max(event.end - event.start, 0) for event in events]
    around: dict[int, list[int]] = {}
    # Of two that begin together, the longer one is around the other.
    for at in sorted(range(len(events)), key=lambda at: (events[at].start, -events[at].end)):
        event = events[at]
        outer = around.setdefault(event.lane, [])
        while outer and events[outer[-1]].end <= event.start:
            outer.pop()
        if outer:
            inner_end = min(event.end, events[outer[-1]].end)
            own[outer[-1]] = max(own[outer[-1]] - max(inner_end - event.start, 0), 0)
        outer.append(at)
    return own


def _duration(event: Event) -> int:
    return event.end - event.start


def _start(event: Event) -> int:
    return event.start


def _within(events: Iterable[Event], start: int, end: int) -> list[Interval]:
    return union((max(event.start, start), min(event.end, end)) for event in events)


def _top(events: Sequence[Event], times: Sequence[int]) -> list[Kernel]:
    totals: dict[str, list[int]] = {}
    for event, time in zip(events, times, strict=True):
        total = totals.setdefault(event.name, [0, 0, 0])
        total[0] += 1
        total[1] += time
        total[2] = max(total[2], time)
    kernels = [Kernel(name, *total) for name, total in totals.items()]
    return heapq.nsmallest(TOP, kernels, key=lambda kernel: (-kernel.total, kernel.name))
