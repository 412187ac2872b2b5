"""`ddtrace-pytorch report`: what became of a job, rank by rank, from its run log.

:func:`summarise` turns a scan into a :class:`Report`, plain data; :func:`render` shows it. ``--json`` prints the same
data, its keys being the field names of the classes below (adding is free, renaming needs a release note). Times are
local, ISO 8601; durations are seconds; what isn't known is null.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.terminal import standard_output, visible
from ddtrace_pytorch.runlog.reader import RankLog, Scan, read, scan

TYPES = ("identity", "span", "beat", "drop")
GOOD_ENDS = ("destroyed", "exit")
RANK_ROWS = 32
NOTE_ROWS = 20
MESSAGE_SHOWN = 500


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

    `ends` counts ranks by how they ended, the most frequent first.
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


@dataclass
class Attempt(Start):
    """A start in full; ranks as people write them: ``3, 7-9``."""

    ranks_found: str
    ranks_missing: str
    hosts: list[str]
    gpus: list[Gpu]
    dropped: dict[str, int]
    versions: dict[str, str]
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
    """`jobs` are all found, newest first; `job` is the one reported: all its `starts`, and the `attempts` asked for."""

    directory: str
    jobs: list[Job]
    job: Job
    starts: list[Start]
    attempts: list[Attempt]
    notes: list[str]


class Refused(click.ClickException):
    """There is nothing to report; the message says what is wrong, where, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


class NotThere(Refused):
    """What was asked for doesn't exist."""

    exit_code = 2


class NotReadable(Refused):
    """The directory is there, but no run log that can be read is in it."""

    exit_code = 1


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
            self.dropped[_text(record, "reason") or "unknown"] += _integer(record, "count") or 0
        elif kind == "span" and record.get("name") == "pytorch.rank":
            self.last_span = dict(record)
            self.span_ids.add(str(record.get("span_id")))
            begin = _integer(record, "start") or ts
        self.started = min(begin, self.started or begin)
        self.last = max(ts, self.last or ts)

    @property
    def job(self) -> Mapping[str, Any]:
        return _mapping(self.identity, "job")

    def rank(self) -> Rank:
        tags = _mapping(self.last_span, "tags")
        reason = _text(tags, "pytorch.end_reason") or None
        return Rank(
            rank=self.log.rank,
            host=_text(self.identity, "host"),
            node=str(self.identity.get("node", "")),
            pid=_integer(self.identity, "pid"),
            device=_gpu_id(self.identity) or None,
            started=_iso(self.started),
            last_seen=_iso(self.last),
            last_beat=_iso(self.last_beat),
            duration_s=_seconds(self.started, self.last),
            end_reason=reason,
            ended_badly=reason not in GOOD_ENDS or bool(self.last_span.get("error")),
            error_type=_text(tags, "error.type") or None,
            error_message=_text(tags, "error.message") or None,
            pieces=len(self.span_ids),
            dropped=dict(self.dropped),
        )


def summarise(found: Scan, job: str | None = None, attempt: str = "last") -> Report:
    """The report of one job in `found`: `job`, or the newest; `attempt` is ``last``, a number or ``all``.

    Raises :class:`Refused` if there is nothing to report or no such job or attempt.
    """
    logs = [log for log in found.logs if not log.damaged]
    if not found.logs:
        raise NotReadable(
            f"no run log in {found.directory}: it should hold rank-00000.jsonl and the like, at any depth; "
            "run a job with DD_PYTORCH_EXPORT=local, or name another directory"
        )
    if not logs:
        first = f" ({found.logs[0].notes[0]})" if found.logs[0].notes else ""
        raise NotReadable(
            f"none of the {len(found.logs)} run log(s) in {found.directory} can be read{first}; "
            "copy them again from where they were written"
        )
    begun = {log.job: 0 for log in logs}
    for log in logs:
        begun[log.job] = max(begun[log.job], _integer(log.identity, "ts") or 0)
    ids = sorted(begun, key=lambda id: begun[id], reverse=True)
    if job is not None and job not in begun:
        raise NotThere(f"no job {job} in {found.directory}; it has {_shorten(ids)}")
    chosen = ids[0] if job is None else job

    attempts = _attempts([log for log in logs if log.job == chosen])
    if attempt == "all":
        asked = attempts
    elif attempt == "last":
        asked = attempts[-1:]
    else:
        asked = [one for one in attempts if str(one.number) == attempt]
        if not asked:
            raise NotThere(f"no attempt {attempt} of job {chosen}; choose last, all, or from 1 to {len(attempts)}")

    jobs = [_job([log for log in logs if log.job == id]) for id in ids]
    shown = [log for log in found.logs if log.job == chosen or log.damaged]
    return Report(
        directory=os.path.abspath(found.directory),
        jobs=jobs,
        job=next(one for one in jobs if one.id == chosen),
        starts=[_start(one) for one in attempts],
        attempts=asked,
        notes=found.notes + [note for log in shown for note in log.notes],
    )


def _job(logs: list[RankLog]) -> Job:
    newest = max(logs, key=lambda log: _integer(log.identity, "ts") or 0)
    told = _mapping(newest.identity, "job")
    return Job(
        id=newest.job,
        source=_text(told, "source"),
        launcher=_text(told, "launcher"),
        started=_iso(min((ts for log in logs if (ts := _integer(log.identity, "ts"))), default=None)),
        attempts=len({log.incarnation for log in logs}),
    )


def _attempts(logs: list[RankLog]) -> list[Attempt]:
    by_incarnation: dict[str, list[_RankFacts]] = {}
    for log in logs:
        facts = _RankFacts(log, log.identity)
        for record in read(log, TYPES):
            facts.add(record)
        by_incarnation.setdefault(log.incarnation, []).append(facts)
    in_time = sorted(by_incarnation.values(), key=lambda ranks: _least(facts.started for facts in ranks) or 0)
    return [_attempt(number, ranks) for number, ranks in enumerate(in_time, 1)]


def _start(attempt: Attempt) -> Start:
    return Start(**{one.name: getattr(attempt, one.name) for one in fields(Start)})


def _attempt(number: int, facts: list[_RankFacts]) -> Attempt:
    ranks = [one.rank() for one in facts]
    sizes = [size for one in facts if (size := _integer(one.identity, "world_size")) is not None]
    world_size = max(sizes, default=None)
    numbers = {rank.rank for rank in ranks}
    dropped: Counter[str] = Counter()
    versions: dict[str, str] = {}
    for one in facts:
        dropped += one.dropped
        versions |= {name: str(value) for name, value in _mapping(one.identity, "versions").items()}
    started = _least(one.started for one in facts)
    last = max((one.last for one in facts if one.last is not None), default=None)
    return Attempt(
        number=number,
        attempt=next((told for one in facts if (told := _integer(one.job, "attempt")) is not None), None),
        incarnation=facts[0].log.incarnation,
        started=_iso(started),
        last_seen=_iso(last),
        duration_s=_seconds(started, last),
        world_size=world_size,
        ranks_seen=len(numbers),
        ends=dict(Counter(rank.end_reason or "no end recorded" for rank in ranks).most_common()),
        ranks_found=compact(numbers),
        ranks_missing=compact(_missing(numbers, world_size or 0)),
        hosts=sorted({rank.host for rank in ranks if rank.host}),
        gpus=_gpus(facts),
        dropped=dict(dropped),
        versions=versions,
        ranks=ranks,
    )


def _gpus(facts: list[_RankFacts]) -> list[Gpu]:
    found: dict[tuple[str, str], Gpu] = {}
    for one in facts:
        if uuid := _gpu_id(one.identity):
            host = _text(one.identity, "host")
            name = _text(_mapping(one.identity, "device"), "device.gpu.name")
            gpu = found.setdefault((host, uuid), Gpu(host, uuid, name, []))
            if one.log.rank not in gpu.ranks:
                gpu.ranks.append(one.log.rank)
    return list(found.values())


def _gpu_id(identity: Mapping[str, Any]) -> str:
    device = _mapping(identity, "device")
    return "" if _text(device, "device.kind") == "cpu" else _text(device, "device.id")


def _missing(found: set[int], world_size: int) -> Iterable[int]:
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


# ---- what a record holds is somebody else's data: a wrong type is the same as nothing ----


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) else ""


def _integer(record: Mapping[str, Any], key: str) -> int | None:
    value = record.get(key)
    return value if type(value) is int else None


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


def _shorten(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# ---- showing it ----


def render(report: Report, console: Console) -> None:
    """Show `report` as tables that read well at 80 columns, in a terminal or piped."""
    if len(report.jobs) > 1:
        console.print(_jobs_table(report))
        _line(console, "")
    job = report.job
    told = ", ".join(
        part for part in (job.source and f"from {job.source}", job.launcher and f"launched by {job.launcher}") if part
    )
    _line(console, f"Job {job.id}" + (f" ({told})" if told else ""), style="bold")
    if len(report.starts) > 1:
        console.print(_attempts_table(report))
    for attempt in report.attempts:
        _line(console, "")
        _render_attempt(attempt, console)
    if report.notes:
        _line(console, "")
        for note in report.notes[:NOTE_ROWS]:
            _line(console, f"note: {note}", style="yellow")
        if len(report.notes) > NOTE_ROWS:
            _line(console, f"note: … {len(report.notes) - NOTE_ROWS} more; --json has them all", style="yellow")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text), style=style), soft_wrap=True)


def _table(*columns: str, right: tuple[str, ...] = (), yielding: tuple[str, ...] = ()) -> Table:
    """A table whose columns keep their width, but for those in `yielding`, which fold over more lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in yielding,
            overflow="fold",
        )
    return table


def _row(table: Table, *cells: str, style: str = "") -> None:
    table.add_row(*(Text(visible(cell)) for cell in cells), style=style)


def _jobs_table(report: Report) -> Table:
    table = _table(
        "Jobs here, newest first", "Attempts", "Started", right=("Attempts",), yielding=("Jobs here, newest first",)
    )
    for job in report.jobs:
        _row(table, job.id, str(job.attempts), job.started or "?", style="bold" if job is report.job else "")
    return table


def _attempts_table(report: Report) -> Table:
    table = _table("Attempt", "Started", "Duration", "Ranks", "Ended", right=("Duration", "Ranks"), yielding=("Ended",))
    for one in report.starts:
        ranks = f"{one.ranks_seen:,}/{_known(one.world_size)}"
        ends = ", ".join(f"{many} {end}" for end, many in one.ends.items())
        _row(table, str(one.number), one.started or "?", _duration(one.duration_s), ranks, ends)
    return table


def _render_attempt(attempt: Attempt, console: Console) -> None:
    said = "" if attempt.attempt is None else f", numbered {attempt.attempt} by the launcher"
    _line(console, f"Attempt {attempt.number}{said}", style="bold")
    facts = {
        "Incarnation": attempt.incarnation,
        "Started": attempt.started or "?",
        "Duration": _duration(attempt.duration_s),
        "Ranks": f"{attempt.ranks_found} of {_known(attempt.world_size)}"
        + (f"; missing: {attempt.ranks_missing}" if attempt.ranks_missing else ""),
        "Hosts": ", ".join(attempt.hosts),
        "Versions": ", ".join(f"{name} {version}" for name, version in attempt.versions.items()),
        "Dropped": ", ".join(f"{many:,} ({reason})" for reason, many in attempt.dropped.items()) or "nothing",
    }
    for name, value in facts.items():
        if value:
            _line(console, f"{name:<12} {value}")
    if attempt.gpus:
        _line(console, "")
        table = _table("Ranks", "Host", "GPU", "Name", yielding=("Ranks", "Host", "Name"))
        for gpu in attempt.gpus:
            _row(table, compact(gpu.ranks), gpu.host, gpu.uuid, gpu.name)
        console.print(table)
    _line(console, "")
    _render_ranks(attempt.ranks, console)


def _render_ranks(ranks: list[Rank], console: Console) -> None:
    shown, rest = ranks, []
    if len(ranks) > RANK_ROWS:
        worst_first = sorted(ranks, key=lambda rank: (not rank.ended_badly, rank.rank))
        bad = sum(rank.ended_badly for rank in ranks)
        shown, rest = worst_first[: min(bad, RANK_ROWS)], worst_first[min(bad, RANK_ROWS) :]
    if shown:
        console.print(_ranks_table(shown))
    for end, many in Counter(rank.end_reason or "without a recorded end" for rank in rest).most_common():
        _line(console, f"… {many:,} {'more ' if shown else ''}rank{'s' if many > 1 else ''} ended {end}")

    errors: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank.error_type or rank.error_message:
            errors.setdefault((rank.error_type or "", (rank.error_message or "")[:MESSAGE_SHOWN]), []).append(rank.rank)
    for (kind, message), where in errors.items():
        _line(console, f"rank {compact(where)}: {': '.join(part for part in (kind, message) if part)}", style="red")


def _ranks_table(ranks: list[Rank]) -> Table:
    columns: list[tuple[str, Callable[[Rank], str]]] = [
        ("Rank", lambda rank: str(rank.rank)),
        ("Host", lambda rank: rank.host),
        ("Duration", lambda rank: _duration(rank.duration_s)),
    ]
    if any(rank.pieces > 1 for rank in ranks):
        columns.append(("Pieces", lambda rank: str(rank.pieces)))
    if any(rank.dropped for rank in ranks):
        columns.append(("Dropped", lambda rank: f"{sum(rank.dropped.values()):,}"))
    columns.append(("Ended", _end))
    table = _table(*(name for name, _ in columns), right=("Rank", "Duration", "Pieces", "Dropped"), yielding=("Host",))
    for rank in ranks:
        _row(table, *(cell(rank) for _, cell in columns), style="red" if rank.ended_badly else "")
    return table


def _end(rank: Rank) -> str:
    if rank.end_reason is not None:
        return rank.end_reason
    if rank.last_beat:
        return f"no end recorded (last beat {rank.last_beat[11:19]})"
    return "no end recorded" + (f" (last seen {rank.last_seen[11:19]})" if rank.last_seen else "")


def _known(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


@click.command()
@click.argument("directory", metavar="[DIR]", required=False)
@click.option("--job", metavar="ID", help="The job to report; otherwise the newest.")
@click.option(
    "--attempt",
    default="last",
    show_default=True,
    metavar="last|N|all",
    help="Which of the job's attempts, numbered from 1 in order of time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(directory: str | None, job: str | None, attempt: str, as_json: bool) -> None:
    """Ranks, hosts, GPUs, attempts, how each rank ended, and what was dropped.

    DIR holds run logs at any depth: a log root, one job, one run, or several hosts' copies. Without it, that is
    DD_PYTORCH_LOG_DIR or the directory that run logs go to when nobody says.
    """
    place = directory or settings.load().log_root
    try:
        found = scan(place)
    except FileNotFoundError:
        why = "" if directory else " (where run logs go when nobody says)"
        raise NotThere(f"no directory {place}{why}; give the one that DD_PYTORCH_LOG_DIR had in the job") from None
    except NotADirectoryError:
        raise NotThere(f"{place} is a file; give the directory it is in") from None
    except OSError as error:
        raise NotReadable(f"can't look into {place}: {error.strerror or error}") from None
    result = summarise(found, job, attempt)
    if as_json:
        click.echo(json.dumps(asdict(result), indent=2))
    else:
        render(result, standard_output())
