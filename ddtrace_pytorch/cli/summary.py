"""What became of a job, rank by rank: run logs in, a :class:`Report` of plain data out.

The field names of the classes below are the keys of ``report --json`` (adding is free, renaming needs a release note).
Times are local, ISO 8601; durations are seconds; what isn't known is null.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from ddtrace_pytorch.cli.choice import jobs_in, meant_attempts
from ddtrace_pytorch.cli.collectives import Group
from ddtrace_pytorch.cli.gathering import gather, of_each
from ddtrace_pytorch.cli.page.gathering import View
from ddtrace_pytorch.cli.progress import Progress, silent
from ddtrace_pytorch.cli.records import Recorded
from ddtrace_pytorch.cli.single_calls import SingleCall
from ddtrace_pytorch.cli.slow_groups import SlowGroup, slow_among
from ddtrace_pytorch.cli.stalls import Stall
from ddtrace_pytorch.cli.starts import InOrder, in_order
from ddtrace_pytorch.cli.steps import Steps
from ddtrace_pytorch.cli.stragglers import Stragglers
from ddtrace_pytorch.cli.untimed import NOT_COUNTED, Untimed, untimed_among
from ddtrace_pytorch.cli.windows import Windows
from ddtrace_pytorch.runlog.fields import integer, mapping, text
from ddtrace_pytorch.runlog.reader import TRAINER, RankLog, Scan, read
from ddtrace_pytorch.settings import BadValue, RankChoice, rank_choice

TYPES = ("identity", "span", "beat", "drop")
GOOD_ENDS = ("destroyed", "exit")
NO_END = "no end recorded"


@dataclass
class Rank:
    """One rank of one attempt. `end_reason` is null if its log has no end: it was killed, or is still running."""

    rank: int
    host: str
    node: str
    pid: int | None
    device: str | None
    started: str | None
    last_seen: str | None
    last_beat: str | None
    duration_s: float | None
    end_reason: str | None
    ended_badly: bool
    error_type: str | None
    error_message: str | None
    pieces: int
    dropped: dict[str, int]


@dataclass
class Gpu:
    """One GPU and every rank that used it; there is one record for a (host, uuid).

    `uuid` is ``<host>:<kind>:<index>`` where NVML gave none.
    """

    host: str
    uuid: str
    name: str
    ranks: list[int]


@dataclass
class Start:
    """One start of the job: `number` counts from 1 in order of time, `attempt` is what the launcher said.

    `ends` counts ranks by how they ended, the most frequent first. `source` is what it was for: what isn't the
    ``trainer`` ran beside the training, and is numbered behind all of its attempts.
    """

    number: int
    attempt: int | None
    incarnation: str
    started: str | None
    last_seen: str | None
    duration_s: float | None
    world_size: int | None
    ranks_seen: int
    ends: dict[str, int]
    source: str


@dataclass
class Attempt(Start):
    """A start in full; ranks as people write them: ``3, 7-9``. `collectives` are totals by group, and in `stragglers`
    is who waited for whom. `collectives_setting` is what DD_PYTORCH_COLLECTIVES was: several words where the ranks
    don't agree, empty where older versions didn't say. Of the `single_calls` told of one by one, as many as were asked
    for are in `slowest_calls`. `slow_groups` talk more slowly than others like them. `recorded` is what the user's code
    said. `stalls_uncounted` are records of stalls beyond the first thousand. `windows` are those of torch's profiler,
    `kernels` the steps whose kernels were counted.

    A rank without a log is in `ranks_not_logged` if every log there is says that it was not to write one
    (DD_PYTORCH_LOG_RANKS), otherwise in `ranks_missing`.
    """

    ranks_found: str
    ranks_missing: str
    ranks_not_logged: str
    hosts: list[str]
    gpus: list[Gpu]
    dropped: dict[str, int]
    versions: dict[str, str]
    collectives_setting: str
    collectives: list[Group]
    single_calls: int
    slowest_calls: list[SingleCall]
    stragglers: list[Stragglers]
    slow_groups: list[SlowGroup]
    steps: Steps
    recorded: Recorded
    stalls: list[Stall]
    stalls_uncounted: int
    windows: Windows
    kernels: Windows
    ranks: list[Rank]


@dataclass
class Job:
    id: str
    source: str
    launcher: str
    started: str | None
    attempts: int


@dataclass
class Report:
    """`jobs` are all found, newest first; `job` is the one reported: all its `starts`, and the `attempts` asked for.
    `suspected`: why another job may be meant, null if nothing says so."""

    directory: str
    jobs: list[Job]
    job: Job
    suspected: str | None
    starts: list[Start]
    attempts: list[Attempt]
    notes: list[str]

    @property
    def last(self) -> Start:
        """The training's last start, or that of what ran beside it where there was no training."""
        return ([one for one in self.starts if one.source == TRAINER] or self.starts)[-1]


@dataclass
class _RankFacts:
    """What one pass over a rank's log leaves in memory, times in nanoseconds."""

    log: RankLog
    identity: dict[str, Any]
    started: int | None = None
    last: int | None = None
    last_beat: int | None = None
    last_span: dict[str, Any] = field(default_factory=dict)
    span_ids: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, record: Mapping[str, Any]) -> None:
        kind, ts = record["type"], record["ts"]
        begin = ts
        if kind == "identity":
            self.identity = {**self.identity, **record}
        elif kind == "beat":
            self.last_beat = max(ts, self.last_beat or ts)
        elif kind == "drop":
            self.dropped[text(record, "reason") or "unknown"] += integer(record, "count") or 0
        elif kind == "span" and record.get("name") == "pytorch.rank":
            self.last_span = dict(record)
            self.span_ids.add(str(record.get("span_id")))
            begin = integer(record, "start") or ts
        self.started = min(begin, self.started or begin)
        self.last = max(ts, self.last or ts)

    @property
    def job(self) -> Mapping[str, Any]:
        return mapping(self.identity, "job")

    def rank(self) -> Rank:
        tags = mapping(self.last_span, "tags")
        reason = text(tags, "pytorch.end_reason") or None
        return Rank(
            rank=self.log.rank,
            host=text(self.identity, "host"),
            node=str(self.identity.get("node", "")),
            pid=integer(self.identity, "pid"),
            device=_gpu_id(self.identity) or None,
            started=_iso(self.started),
            last_seen=_iso(self.last),
            last_beat=_iso(self.last_beat),
            duration_s=_seconds(self.started, self.last),
            end_reason=reason,
            ended_badly=reason not in GOOD_ENDS or bool(self.last_span.get("error")),
            error_type=text(tags, "error.type") or None,
            error_message=text(tags, "error.message") or None,
            pieces=len(self.span_ids),
            dropped=dict(self.dropped),
        )


def summarise(
    found: Scan,
    job: str | None = None,
    attempt: str = "last",
    calls: int = 0,
    progress: Progress = silent,
    views: dict[str, View] | None = None,
) -> Report:
    """The report of one job in `found`: `job`, or the newest; `attempt`: ``last``, ``all``, a number or an incarnation.

    The beginning of a job's id or an incarnation is enough, where no other has it. Of single calls the `calls` slowest
    are listed. What there is for pictures and the diagnosis of each attempt is put into `views`, by incarnation, if
    that is wanted.

    Raises:
        Refused: there is nothing to report, or no such job or attempt.
    """
    here = jobs_in(found)
    chosen = here.meant(job)
    in_job = here.logs_of(chosen)
    order = in_order(in_job)
    attempts = _attempts(order, in_job, progress)
    incarnations = [one.incarnation for one in attempts]
    asked = [attempts[at] for at in meant_attempts(attempt, incarnations, chosen, len(order.beside))]

    for one in asked:
        logs = [log for log in in_job if log.incarnation == one.incarnation]
        view = View() if views is not None else None
        gathered = gather(logs, calls, progress, view)
        if views is not None and view is not None:
            views[one.incarnation] = view
        said = gathered.collectives
        one.steps, one.recorded = gathered.steps, gathered.records
        one.windows, one.kernels = gathered.windows, gathered.kernels
        one.stalls, one.stalls_uncounted = gathered.stalls.told(), gathered.stalls.uncounted
        one.collectives, one.stragglers = said.groups, said.stragglers
        one.steps.untimed = _untimed(one)
        one.slow_groups = slow_among(said.talks, one.duration_s or 0.0)
        one.single_calls, one.slowest_calls = said.single, said.slowest

    jobs = [_job(here.logs_of(id)) for id in here.ids]
    shown = [log for log in found.logs if log.job == chosen or log.damaged]
    return Report(
        directory=os.path.abspath(found.directory),
        jobs=jobs,
        job=next(one for one in jobs if one.id == chosen),
        suspected=None,
        starts=[_start(one) for one in attempts],
        attempts=asked,
        notes=found.notes + [note for log in shown for note in log.notes],
    )


def _job(logs: list[RankLog]) -> Job:
    newest = max(logs, key=lambda log: log.began)
    told = mapping(newest.identity, "job")
    return Job(
        id=newest.job,
        source=text(told, "source"),
        launcher=text(told, "launcher"),
        started=_iso(min((log.began for log in logs if log.began), default=None)),
        attempts=len({log.incarnation for log in logs if log.trains}),
    )


def _facts(log: RankLog) -> _RankFacts:
    facts = _RankFacts(log, log.identity)
    for record in read(log, TYPES):
        facts.add(record)
    return facts


def _attempts(order: InOrder, logs: list[RankLog], progress: Progress) -> list[Attempt]:
    found: dict[int, _RankFacts] = {}
    for done, (log, facts) in enumerate(zip(logs, of_each(_facts, logs), strict=True), 1):
        log.notes = facts.log.notes
        progress("looking", done, len(logs))
        found[id(log)] = facts
    return [_attempt(number, [found[id(log)] for log in start.logs]) for number, start in enumerate(order.all, 1)]


def _untimed(attempt: Attempt) -> Untimed | None:
    if "off" in attempt.collectives_setting.split(", ") and (attempt.world_size or 0) > 1:
        return NOT_COUNTED
    return untimed_among(attempt.collectives, sum(one.steps for one in attempt.steps.ranks))


def _start(attempt: Attempt) -> Start:
    return Start(**{one.name: getattr(attempt, one.name) for one in fields(Start)})


def _attempt(number: int, facts: list[_RankFacts]) -> Attempt:
    ranks = [one.rank() for one in facts]
    sizes = [size for one in facts if (size := integer(one.identity, "world_size")) is not None]
    world_size = max(sizes, default=None)
    source = next((one.log.source for one in facts if one.log.trains), facts[0].log.source)
    numbers = {rank.rank for rank in ranks}
    choices = {_choice(one.identity) for one in facts}

    def absent(chosen: bool) -> Iterable[int]:
        # Of what is no trainer nobody knows how many there should be.
        missing = _absent(numbers, world_size or 0) if source == TRAINER else ()
        return (rank for rank in missing if any(rank in choice for choice in choices) is chosen)

    dropped: Counter[str] = Counter()
    versions: dict[str, str] = {}
    for one in facts:
        dropped += one.dropped
        versions |= {name: str(value) for name, value in mapping(one.identity, "versions").items()}
    started = _least(one.started for one in facts)
    last = max((one.last for one in facts if one.last is not None), default=None)
    return Attempt(
        number=number,
        attempt=next((told for one in facts if (told := integer(one.job, "attempt")) is not None), None),
        incarnation=facts[0].log.incarnation,
        started=_iso(started),
        last_seen=_iso(last),
        duration_s=_seconds(started, last),
        world_size=world_size,
        ranks_seen=len(numbers),
        ends=dict(Counter(rank.end_reason or NO_END for rank in ranks).most_common()),
        source=source,
        ranks_found=compact(numbers),
        ranks_missing=compact(absent(chosen=True)),
        ranks_not_logged=compact(absent(chosen=False)),
        hosts=sorted({rank.host for rank in ranks if rank.host}),
        gpus=_gpus(facts),
        dropped=dict(dropped),
        versions=versions,
        collectives_setting=", ".join(sorted({word for one in facts if (word := text(one.identity, "collectives"))})),
        collectives=[],
        single_calls=0,
        slowest_calls=[],
        stragglers=[],
        slow_groups=[],
        steps=Steps(),
        recorded=Recorded(),
        stalls=[],
        stalls_uncounted=0,
        windows=Windows(),
        kernels=Windows(),
        ranks=ranks,
    )


def _gpus(facts: list[_RankFacts]) -> list[Gpu]:
    found: dict[tuple[str, str], Gpu] = {}
    for one in facts:
        if uuid := _gpu_id(one.identity):
            host = text(one.identity, "host")
            name = text(mapping(one.identity, "device"), "device.gpu.name")
            gpu = found.setdefault((host, uuid), Gpu(host, uuid, name, []))
            if one.log.rank not in gpu.ranks:
                gpu.ranks.append(one.log.rank)
    return list(found.values())


def _gpu_id(identity: Mapping[str, Any]) -> str:
    device = mapping(identity, "device")
    return "" if text(device, "device.kind") == "cpu" else text(device, "device.id")


def _choice(identity: Mapping[str, Any]) -> RankChoice:
    """The ranks that were to write a log; all of them where nothing says otherwise (older versions didn't)."""
    try:
        return rank_choice(text(identity, "log_ranks"))
    except BadValue:
        return rank_choice("all")


def _absent(found: set[int], world_size: int) -> Iterable[int]:
    """Ranks below `world_size` that are not in `found`; a damaged, absurd size must not cost memory."""
    return (rank for rank in range(min(world_size, 10_000_000)) if rank not in found)


def compact(numbers: Iterable[int]) -> str:
    """Numbers as people write them: ``3, 7-9``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def gpus_by_name(attempt: Attempt) -> str:
    """How many of each kind it had."""
    names = Counter(gpu.name or "of unknown kind" for gpu in attempt.gpus)
    return ", ".join(f"{many:,} {name}" for name, many in names.items())


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _local(ns: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(ns / 1e9).astimezone()
    except (OverflowError, ValueError, OSError):
        return None


def _iso(ns: int | None) -> str | None:
    moment = _local(ns) if ns is not None else None
    return moment.isoformat(timespec="seconds") if moment else None


def _seconds(first: int | None, last: int | None) -> float | None:
    return round((last - first) / 1e9, 3) if first is not None and last is not None else None
