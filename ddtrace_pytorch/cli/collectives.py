"""What the ranks of one attempt said to each other, from their run logs: totals of each operation on each group.

The field names of the classes below are keys of ``report --json`` (adding is free, renaming needs a release note).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddtrace_pytorch.cli.single_calls import SingleCall, Slowest
from ddtrace_pytorch.cli.slow_groups import Talk
from ddtrace_pytorch.cli.stragglers import COMPLETION, Stragglers, Waiting
from ddtrace_pytorch.collectives.telling import CALL, SUMMARY
from ddtrace_pytorch.histogram import BUCKETS, percentile
from ddtrace_pytorch.runlog.fields import mapping, number, text
from ddtrace_pytorch.runlog.reader import Sift

TYPES = ("summary", "call", "span")

# Totals of what torch counted on a group and no instrument saw; not an operation.
UNSEEN = "unseen"


@dataclass
class Times:
    """Of the callers' time in ms. The percentiles are of all ranks' calls together, right to a factor of two and
    mostly much better, since calls are only counted by the power of two of their time."""

    total: float
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass
class Operation:
    """All calls of one operation on one group that were made in one way, over all `ranks` (a number) that made any.

    `how` is ``waited`` (for completion), ``issued`` (and perhaps waited for later) or ``native`` (by torch's C++ side).
    `time_source` says what `time_ms` (null: no time) is: ``completion`` of the collective, ``issue`` of the call alone,
    or ``none``; ``mixed`` if the logs don't agree. `calls` and `bytes` are sums over the ranks; `calls_least` and
    `calls_most` the calls of one rank. The bandwidths, in GB/s (10^9 bytes), are of bytes over time, where that is of
    completion. `wait_ms` is what callers then waited for issued calls. `slowest_at` is the ``file:line`` of the
    slowest call, on `slowest_rank`.
    """

    operation: str
    how: str
    time_source: str
    ranks: int
    calls: int
    calls_least: int
    calls_most: int
    bytes: int
    time_ms: Times | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    waits: int
    wait_ms: float
    errors: int
    slowest_at: str | None
    slowest_rank: int | None


@dataclass
class Unseen:
    """What torch launched itself on a group and no instrument saw, summed over the ranks. `recorded_as` is what torch's
    flight recorder calls it, null where that isn't known; of `sized` of the `calls` the size is known: `bytes`."""

    recorded_as: str | None
    calls: int
    sized: int
    bytes: int


@dataclass
class Group:
    """One process group. `group` is what a person calls it, `name` what torch does.

    `launched` is how many collectives torch counted on the group and `seen` how many of them were recorded, on the
    rank that saw the least part; null, and `coverage` with them, where torch doesn't count. `cross_node` is null where
    it wasn't known. `ranks_told` ranks told of the group.
    """

    group: str
    name: str
    size: int | None
    backend: str
    cross_node: bool | None
    launched: int | None
    seen: int | None
    coverage: float | None
    operations: list[Operation]
    unseen: list[Unseen]
    ranks_told: int


class Collectives(NamedTuple):
    """Of one attempt: `groups` and, in each, the operations, those that took longest first; of the `single` calls
    told of one by one the `slowest`; and how long each group talks."""

    groups: list[Group]
    stragglers: list[Stragglers]
    single: int
    slowest: list[SingleCall]
    talks: list[Talk]


# A call as it is written, of which so much is counted that parsing would take most of the time.
_CALL = re.compile(
    rb'\{"type":"call","ts":\d{1,19},"op":"(\w+)","group":"([ !#-\[\]-~]*)","key":(\d{1,19}),"start":\d{1,19},'
    rb'"duration":(\d{1,19}),"bytes":\d{1,19},"source":"(\w+)"(?:,"step":(\d{1,18}))?\}'
)
_COMPLETION = COMPLETION.encode()
_A_CALL = b'{"type":"call",'


class Gathering:
    """What is known of the collectives of some ranks; the `calls` slowest single calls are kept.

    Memory goes with the number of groups and of sampled calls.
    """

    def __init__(self, calls: int) -> None:
        self._groups: dict[str, _GroupTotals] = {}
        self._slowest = Slowest(calls)

    def sift(self, rank: int) -> Sift:
        """What counts the calls of `rank` that need no parsing, and leaves the rest."""

        waiting: dict[bytes, Waiting] = {}

        def sift(lines: list[bytes]) -> Iterator[bytes]:
            for line in lines:
                found = _CALL.fullmatch(line) if line.startswith(_A_CALL) else None
                if found is None:
                    yield line
                    continue
                operation, group, key, took, source, step = found.groups()
                if source == _COMPLETION:
                    one = waiting.get(group)
                    if one is None:
                        one = waiting[group] = self._group(group.decode()).waiting
                    one.count(rank, operation.decode(), int(key), int(took), None if step is None else int(step))

        return sift

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """One record of `rank`, of one of the :data:`TYPES`."""
        if record["type"] == "call":
            self._group(text(record, "group")).waiting.add(rank, record)
        elif record["type"] == "span":
            if record.get("name") == CALL:
                self._slowest.add(rank, record)
        elif record.get("name") == SUMMARY:
            self._group(text(mapping(record, "tags"), "collective.group_name")).add(rank, record)

    def began_with(self, step: int) -> None:
        """The first step of the one rank that is here was that one."""
        for totals in self._groups.values():
            totals.waiting.began_with(step)

    def pour(self, other: Gathering) -> None:
        """Add what is known of other ranks, which come after those that are here."""
        for name, totals in other._groups.items():
            mine = self._groups.setdefault(name, totals)
            if mine is not totals:
                mine.pour(totals)
        self._slowest.pour(other._slowest)

    def told(self) -> Collectives:
        told = sorted(self._groups.items(), key=lambda item: -item[1].time())
        stragglers = [totals.waiting.told(totals.label or name, name) for name, totals in told]
        return Collectives(
            [totals.told(name) for name, totals in told if totals.summed_up],
            [one for one in stragglers if one is not None],
            self._slowest.seen,
            self._slowest.told(),
            [totals.talk(name) for name, totals in told if totals.ranks],
        )

    def _group(self, name: str) -> _GroupTotals:
        found = self._groups.get(name)
        if found is None:
            found = self._groups[name] = _GroupTotals()
        return found


class _GroupTotals:
    """What one pass over the logs leaves of a group."""

    def __init__(self) -> None:
        self.summed_up = False
        self.label = ""
        self.backend = ""
        self.size: int | None = None
        self.crosses_nodes: bool | None = None
        self.cells: dict[tuple[str, str], _CellTotals] = {}
        self.waiting = Waiting()
        self.ranks: set[int] = set()
        self.unseen: dict[str | None, Unseen] = {}
        # By rank: what torch counted since the session began, and what was seen of it.
        self._coverage: dict[int, tuple[int, int]] = {}

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """One `summary` record of `rank`."""
        tags, metrics = mapping(record, "tags"), mapping(record, "metrics")
        self.summed_up = True
        self.label = text(tags, "collective.group") or self.label
        self.backend = text(tags, "collective.backend") or self.backend
        self.size = _whole(metrics, "collective.group_size") or self.size
        self.crosses_nodes = {"true": True, "false": False}.get(text(tags, "collective.cross_node"), self.crosses_nodes)
        launched, seen = number(metrics, "collective.group_launched"), _whole(metrics, "collective.group_seen")
        if launched is not None:
            self._coverage[rank] = int(launched), seen
        operation = text(tags, "collective.op")
        self.ranks.add(rank)
        if operation == UNSEEN:
            name = text(tags, "collective.recorded_as") or None
            unseen = self.unseen.setdefault(name, Unseen(name, 0, 0, 0))
            unseen.calls += _whole(metrics, "collective.count")
            unseen.sized += _whole(metrics, "collective.sized")
            unseen.bytes += _whole(metrics, "collective.bytes")
        else:
            self.cells.setdefault((operation, text(record, "how")), _CellTotals()).add(rank, record)

    def pour(self, other: _GroupTotals) -> None:
        self.summed_up |= other.summed_up
        self.label = other.label or self.label
        self.backend = other.backend or self.backend
        self.size = other.size or self.size
        self.crosses_nodes = self.crosses_nodes if other.crosses_nodes is None else other.crosses_nodes
        self.ranks |= other.ranks
        self._coverage |= other._coverage
        self.waiting.pour(other.waiting)
        for name, theirs in other.unseen.items():
            unseen = self.unseen.setdefault(name, theirs)
            if unseen is not theirs:
                unseen.calls += theirs.calls
                unseen.sized += theirs.sized
                unseen.bytes += theirs.bytes
        for how, totals in other.cells.items():
            cell = self.cells.setdefault(how, totals)
            if cell is not totals:
                cell.pour(totals)

    def talk(self, name: str) -> Talk:
        """Of all ways to call together: who came last waited least."""
        by_rank: dict[int, Spent] = {}
        for cell in self.cells.values():
            for rank, one in cell.spent.items():
                by_rank[rank] = by_rank.get(rank, NOTHING).and_also(one)
        spent = (one.without_longest() for one in by_rank.values())
        least = min(spent, key=lambda one: one.ms / max(one.calls, 1), default=NOTHING)
        size = self.size or len(self.ranks)
        return Talk(
            self.label or name, name, size, self.backend, sorted(self.ranks), least.ms, least.calls, least.squares
        )

    def time(self) -> float:
        return sum(cell.time for cell in self.cells.values())

    def told(self, name: str) -> Group:
        least = min(self._coverage.values(), key=lambda one: _share(*one), default=None)
        in_time = sorted(self.cells.items(), key=lambda item: (-item[1].time, item[0]))
        return Group(
            group=self.label or name,
            name=name,
            size=self.size,
            backend=self.backend,
            cross_node=self.crosses_nodes,
            launched=None if least is None else least[0],
            seen=None if least is None else least[1],
            coverage=None if least is None else _share(*least),
            operations=[cell.told(operation, how) for (operation, how), cell in in_time],
            unseen=sorted(self.unseen.values(), key=lambda one: -one.calls),
            ranks_told=len(self.ranks),
        )


class Spent(NamedTuple):
    """What calls took one rank until they were complete, in ms; `squares`: the sum of the squares of their times, or
    more, as they are counted by powers of two."""

    ms: float
    calls: int
    squares: float
    longest: float

    def and_also(self, other: Spent) -> Spent:
        longest = max(self.longest, other.longest)
        return Spent(self.ms + other.ms, self.calls + other.calls, self.squares + other.squares, longest)

    def without_longest(self) -> Spent:
        if self.calls < 2:
            return NOTHING
        bound = _bound_ms(round(self.longest * 1e6).bit_length())
        squares = max(self.squares - bound**2, 0.0)
        return Spent(max(self.ms - self.longest, 0.0), self.calls - 1, squares, self.longest)


NOTHING = Spent(0.0, 0, 0.0, 0.0)


class _CellTotals:
    """Sums over the summaries of all ranks; times in ms."""

    def __init__(self) -> None:
        self.time = 0.0
        # By rank, where times are those of the whole collective.
        self.spent: dict[int, Spent] = {}
        self._calls: dict[int, int] = {}
        self._bytes = self._errors = self._waits = 0
        self._waited = 0.0
        self._buckets = [0] * BUCKETS
        self._sources: set[str] = set()
        # Of the calls that have a bandwidth: a gather has one on its root.
        self._moved = self._moving = 0.0
        self._bus_factor: float | None = None
        self._slowest = 0.0
        self._slowest_at: str | None = None
        self._slowest_rank: int | None = None

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        tags, metrics = mapping(record, "tags"), mapping(record, "metrics")
        self._calls[rank] = self._calls.get(rank, 0) + _whole(metrics, "collective.count")
        self._bytes += _whole(metrics, "collective.bytes")
        self._errors += _whole(metrics, "collective.errors")
        self._waits += _whole(metrics, "collective.waits")
        self._waited += number(metrics, "collective.wait_ms.total") or 0.0
        self.time += number(metrics, "collective.time_ms.total") or 0.0
        self._sources.add(text(tags, "collective.time_source"))
        counted = mapping(record, "buckets")
        buckets = [_whole(counted, str(bucket)) for bucket in range(BUCKETS)]
        self._buckets = [before + many for before, many in zip(self._buckets, buckets, strict=True)]
        if text(tags, "collective.time_source") == COMPLETION:
            total, longest = (number(metrics, f"collective.time_ms.{one}") or 0.0 for one in ("total", "max"))
            squares = sum(many * _bound_ms(bucket) ** 2 for bucket, many in enumerate(buckets) if many)
            spent = Spent(total, _whole(metrics, "collective.count"), squares, longest)
            self.spent[rank] = self.spent.get(rank, NOTHING).and_also(spent)
        bus, algorithm = (number(metrics, f"collective.{one}_gbps") for one in ("busbw", "algbw"))
        if bus is not None and algorithm:
            self._bus_factor = bus / algorithm
            self._moved += _whole(metrics, "collective.bytes")
            self._moving += number(metrics, "collective.time_ms.total") or 0.0
        slowest = number(metrics, "collective.time_ms.max") or 0.0
        if slowest > self._slowest:
            self._slowest, self._slowest_rank = slowest, rank
            self._slowest_at = text(tags, "collective.slowest_at") or None

    def pour(self, other: _CellTotals) -> None:
        for rank, spent in other.spent.items():
            self.spent[rank] = self.spent.get(rank, NOTHING).and_also(spent)
        for rank, calls in other._calls.items():
            self._calls[rank] = self._calls.get(rank, 0) + calls
        self.time += other.time
        self._bytes += other._bytes
        self._errors += other._errors
        self._waits += other._waits
        self._waited += other._waited
        self._buckets = [mine + theirs for mine, theirs in zip(self._buckets, other._buckets, strict=True)]
        self._sources |= other._sources
        self._moved += other._moved
        self._moving += other._moving
        self._bus_factor = self._bus_factor if other._bus_factor is None else other._bus_factor
        if other._slowest > self._slowest:
            self._slowest, self._slowest_at = other._slowest, other._slowest_at
            self._slowest_rank = other._slowest_rank

    def told(self, operation: str, how: str) -> Operation:
        calls = sum(self._calls.values())
        source = next(iter(self._sources)) if len(self._sources) == 1 else "mixed"
        longest = round(self._slowest * 1e6)
        p50, p95, p99 = (percentile(self._buckets, share, longest) / 1e6 for share in (0.5, 0.95, 0.99))
        timed = source != "none" and calls > 0
        # Bytes over ns are GB/s.
        speed = self._moved / (self._moving * 1e6) if source == "completion" and self._moving else None
        return Operation(
            operation=operation,
            how=how,
            time_source=source,
            ranks=len(self._calls),
            calls=calls,
            calls_least=min(self._calls.values()),
            calls_most=max(self._calls.values()),
            bytes=self._bytes,
            time_ms=Times(self.time, self.time / calls, p50, p95, p99, self._slowest) if timed else None,
            algbw_gbps=speed,
            busbw_gbps=None if speed is None or self._bus_factor is None else speed * self._bus_factor,
            waits=self._waits,
            wait_ms=self._waited,
            errors=self._errors,
            slowest_at=self._slowest_at,
            slowest_rank=self._slowest_rank,
        )


def _bound_ms(bucket: int) -> float:
    """What all times that were counted there are less than."""
    return float(2**bucket) / 1e6


def _whole(record: Mapping[str, Any], key: str) -> int:
    return max(0, int(number(record, key) or 0))


def _share(launched: int, seen: int) -> float:
    return min(1.0, seen / launched) if launched > 0 else 1.0
