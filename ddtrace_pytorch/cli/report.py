"""`ddtrace-pytorch report`: shows a :class:`~ddtrace_pytorch.cli.summary.Report` as tables, or as JSON."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.choice import attempt_option, job_option, run_logs
from ddtrace_pytorch.cli.collective_tables import (
    hides_waiting,
    is_clear,
    render_collectives,
    render_single_calls,
    render_stragglers,
)
from ddtrace_pytorch.cli.output import STDOUT, in_json, written
from ddtrace_pytorch.cli.page.gathering import View
from ddtrace_pytorch.cli.progress import progress_bar
from ddtrace_pytorch.cli.record_tables import render_records
from ddtrace_pytorch.cli.stall_tables import render_stalls
from ddtrace_pytorch.cli.step_tables import render_steps
from ddtrace_pytorch.cli.summary import NO_END, Attempt, Job, Rank, Report, compact, gpus_by_name, summarise
from ddtrace_pytorch.cli.tables import duration, known, line, notes, paragraph, row, show, size, span, table
from ddtrace_pytorch.cli.terminal import standard_output
from ddtrace_pytorch.cli.which_job import suspected, when
from ddtrace_pytorch.cli.window_tables import COUNTED, PROFILED, render_windows
from ddtrace_pytorch.collectives.dump_files import is_dump
from ddtrace_pytorch.identity.introduction import GENERATED
from ddtrace_pytorch.runlog.reader import TRAINER
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.recovery import left

JOB_ROWS = 10
RANK_ROWS = 32
RANGES_SHOWN = 8
NAMES_SHOWN = 8
MESSAGE_SHOWN = 500


def render(report: Report, console: Console, newest_in: str | None, now: int) -> None:
    """Show `report` as tables that read well at 80 columns, in a terminal or piped; `newest_in`: as :func:`when` has
    it."""
    if len(report.jobs) > 1:
        show(console, _jobs_table(report.jobs[:JOB_ROWS], report.job))
        if len(report.jobs) > JOB_ROWS:
            line(console, f"… {len(report.jobs) - JOB_ROWS:,} more (--json lists all)")
        line(console, "")
    job = report.job
    source = "an id made up by its ranks" if job.source == GENERATED else job.source and f"from {job.source}"
    told = ", ".join(part for part in (source, job.launcher and f"launched by {job.launcher}") if part)
    age = when(report.last.last_seen, NO_END not in report.last.ends, now, newest_in)
    paragraph(console, f"Job {job.id}" + (f" ({told})" if told else "") + age, style="bold")
    if report.suspected is not None:
        line(console, report.suspected, style="yellow")
    if len(report.starts) > 1:
        show(console, _attempts_table(report))
    for attempt in report.attempts:
        line(console, "")
        _render_attempt(attempt, report.job.id, console)
    if report.notes:
        line(console, "")
        notes(console, report.notes, "; --json has them all")


def _jobs_table(jobs: list[Job], reported: Job) -> Table:
    drawn = table(
        "Jobs here, newest first", "Attempts", "Started", right=("Attempts",), yielding=("Jobs here, newest first",)
    )
    for job in jobs:
        row(drawn, job.id, str(job.attempts), job.started or "?", style="bold" if job is reported else "")
    return drawn


def _attempts_table(report: Report) -> Table:
    """Narrow enough for two ways to end of a thousand ranks: each attempt says its zone where it is shown in full."""
    drawn = table(
        "No.", "Started", "Duration", "Ranks", "Ended", right=("No.", "Duration", "Ranks"), yielding=("Ended",)
    )
    for one in report.starts:
        started = (one.started or "?")[:19].replace("T", " ")
        trains = one.source == TRAINER
        whole = one.ranks_seen == one.world_size or not trains
        ranks = f"{one.ranks_seen:,}" + ("" if whole else f"/{known(one.world_size)}")
        ends = ", ".join(f"{many:,} {end}" for end, many in one.ends.items())
        ends = ends if trains else f"{one.source}: {ends}"
        row(drawn, str(one.number), started, duration(one.duration_s), ranks, ends)
    return drawn


def _render_attempt(attempt: Attempt, job: str, console: Console) -> None:
    said = "" if attempt.attempt is None else f", numbered {attempt.attempt} by the launcher"
    line(console, f"Attempt {attempt.number}{said}", style="bold")
    facts = {
        "Source": "" if attempt.source == TRAINER else attempt.source,
        "Incarnation": attempt.incarnation,
        "Started": attempt.started or "?",
        "Duration": duration(attempt.duration_s),
        "Ranks": f"{_some_ranks(attempt.ranks_found)} of {known(attempt.world_size)}"
        + (f"; not chosen to write a log: {_some_ranks(attempt.ranks_not_logged)}" if attempt.ranks_not_logged else "")
        + (f"; missing: {_some_ranks(attempt.ranks_missing)}" if attempt.ranks_missing else ""),
        "Hosts": _some(attempt.hosts),
        "GPUs": f"{gpus_by_name(attempt)} (--json lists them)" if len(attempt.gpus) > RANK_ROWS else "",
        "Versions": ", ".join(f"{name} {version}" for name, version in attempt.versions.items()),
        "Dropped": ", ".join(f"{many:,} ({reason})" for reason, many in attempt.dropped.items()) or "nothing",
    }
    for name, value in facts.items():
        if value:
            line(console, f"{name:<12} {value}")
    if 0 < len(attempt.gpus) <= RANK_ROWS:
        line(console, "")
        drawn = table("Ranks", "Host", "GPU", "Name", yielding=("Ranks", "Host", "Name"))
        for gpu in attempt.gpus:
            row(drawn, compact(gpu.ranks), gpu.host, gpu.uuid, gpu.name)
        show(console, drawn)
    line(console, "")
    _render_ranks(attempt, job, console)
    render_steps(attempt.steps, console, hides_waiting(attempt))
    render_records(attempt.recorded, console)
    render_collectives(attempt, console)
    render_single_calls(attempt, console)
    render_windows(attempt.windows, PROFILED, console)
    render_windows(attempt.kernels, COUNTED, console)
    render_stragglers(attempt, console)
    render_stalls(attempt, console)


def _render_ranks(attempt: Attempt, job: str, console: Console) -> None:
    ranks = shown = attempt.ranks
    rest: list[Rank] = []
    if len(ranks) > RANK_ROWS:
        worst_first = sorted(ranks, key=lambda rank: (not rank.ended_badly, rank.rank))
        bad = sum(rank.ended_badly for rank in ranks)
        shown, rest = worst_first[: min(bad, RANK_ROWS)], worst_first[min(bad, RANK_ROWS) :]
    if shown:
        show(console, _ranks_table(shown, _made_others_wait(attempt)))
    for end, many in Counter(rank.end_reason or "without a recorded end" for rank in rest).most_common():
        line(console, f"… {many:,} {'more ' if shown else ''}rank{'s' if many > 1 else ''} ended {end}")

    errors: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank.error_type or rank.error_message:
            errors.setdefault((rank.error_type or "", (rank.error_message or "")[:MESSAGE_SHOWN]), []).append(rank.rank)
    silent = [rank.rank for rank in ranks if rank.end_reason is None]
    if silent:
        why = "killed (SIGKILL, out of memory, a lost host) or still running"
        line(console, f"rank {compact(silent)}: {why}", style="red")
        line(console, f"(`ddtrace-pytorch recover --job {shlex.quote(job)}`, on its host, tells which)", style="red")
    for (kind, message), where in errors.items():
        line(console, f"rank {compact(where)}: {': '.join(part for part in (kind, message) if part)}", style="red")


def _made_others_wait(attempt: Attempt) -> Mapping[int, float]:
    """By rank, in ms over all groups where one of them clearly does: the others' part is for comparison."""
    late: dict[int, float] = {}
    for one in attempt.stragglers:
        for rank in one.ranks if is_clear(one, attempt) else ():
            late[rank.rank] = late.get(rank.rank, 0.0) + rank.made_others_wait_ms
    return late


def _ranks_table(ranks: list[Rank], late: Mapping[int, float]) -> Table:
    columns: list[tuple[str, Callable[[Rank], str]]] = [
        ("Rank", lambda rank: str(rank.rank)),
        ("Host", lambda rank: rank.host),
        ("Duration", lambda rank: duration(rank.duration_s)),
    ]
    if any(rank.pieces > 1 for rank in ranks):
        columns.append(("Pieces", lambda rank: str(rank.pieces)))
    if any(rank.dropped for rank in ranks):
        columns.append(("Dropped", lambda rank: f"{sum(rank.dropped.values()):,}"))
    if late:
        columns.append(("Late", lambda rank: span(late.get(rank.rank))))
    columns.append(("Ended", _end))
    drawn = table(
        *(name for name, _ in columns), right=("Rank", "Duration", "Pieces", "Dropped", "Late"), yielding=("Host",)
    )
    for rank in ranks:
        row(drawn, *(cell(rank) for _, cell in columns), style="red" if rank.ended_badly else "")
    return drawn


def _some_ranks(ranks: str) -> str:
    """`ranks` without its tail if it is long: every eighth of thousands fills a screen."""
    ranges = ranks.split(", ")
    return ranks if len(ranges) <= RANGES_SHOWN else ", ".join(ranges[:RANGES_SHOWN]) + ", … (--json lists all)"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f", … {rest:,} more (--json lists all)" if rest > 0 else "")


def _end(rank: Rank) -> str:
    if rank.end_reason is not None:
        return rank.end_reason
    if rank.last_beat:
        return f"{NO_END} (last beat {rank.last_beat[11:19]})"
    return NO_END + (f" (last seen {rank.last_seen[11:19]})" if rank.last_seen else "")


@click.command(short_help="What became of a job and its ranks, from its run log.")
@click.argument("directory", metavar="[DIR]", required=False)
@job_option
@attempt_option
@click.option(
    "--calls",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="How many to list of the collectives told of one by one, the slowest first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    help="Write the report, with pictures and the verdict of `diagnose`, as one page to this file, instead.",
)
def report(
    directory: str | None, job: str | None, attempt: str, calls: int, as_json: bool, html_file: str | None
) -> None:
    """Ranks, hosts, GPUs, attempts, how each rank ended, and what was dropped.

    DIR holds run logs at any depth: a log root, one job, one run, or several hosts' copies. Without it, that is
    DD_PYTORCH_LOG_DIR or, where that is not set, ddtrace-pytorch-<user id> in the temporary directory.
    """
    if as_json and html_file == STDOUT:
        raise click.UsageError("--json and --html - can't both be on standard output")
    found = run_logs(directory, beside=is_dump)
    if html_file is None:
        with progress_bar() as progress:
            result = summarise(found, job, attempt, calls, progress)
    else:
        # Most reports need nothing of it.
        from ddtrace_pytorch.cli.page.telling import page_of

        views: dict[str, View] = {}
        # Before the reading: who waits for long should not hear then that it was for nothing.
        with written(html_file) as file, progress_bar() as progress:
            result = summarise(found, job, attempt, calls, progress, views)
            page = page_of(found, result, views)
            file.write(page)
    now = time.time_ns()
    if job is None:
        there = left(places.roots(settings.load().state_dir))
        result.suspected = suspected(there, found, result.job.id, result.last.last_seen, now)
    if as_json:
        click.echo(in_json(asdict(result)))
    elif html_file is None:
        render(result, standard_output(), found.directory if job is None else None, now)
    elif html_file != STDOUT:
        line(standard_output(), f"{html_file}: {size(len(page))}; open it in a browser, it needs nothing else")
