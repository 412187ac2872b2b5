"""`ddtrace-pytorch diagnose`: shows a :class:`~ddtrace_pytorch.cli.diagnosis.Diagnosis` in words, or as JSON."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from functools import partial

import click
from rich.console import Console
from rich.table import Column, Table

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.choice import attempt_option, job_option, run_logs
from ddtrace_pytorch.cli.diagnosis import Attempt, Diagnosis, Rank, diagnose
from ddtrace_pytorch.cli.diagnosis_tables import end_rows, ended_alike, rank_rows, stacks
from ddtrace_pytorch.cli.output import in_json
from ddtrace_pytorch.cli.tables import line, notes, paragraph, row, show, table
from ddtrace_pytorch.cli.terminal import standard_output
from ddtrace_pytorch.cli.which_job import suspected, when
from ddtrace_pytorch.collectives.dump_files import is_dump
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.recovery import left, look

RANK_ROWS = 24
TIMELINE_ROWS = 30

# 1 and 2 are for what can't be read or isn't there.
NOTHING_FOUND = 3


def render(diagnosis: Diagnosis, console: Console, newest_in: str | None, now: int) -> None:
    """Show it so that it reads well at 80 columns, in a terminal or piped; `newest_in`: as :func:`when` has it."""
    age = when(diagnosis.last_seen, diagnosis.ended, now, newest_in)
    paragraph(console, f"Job {diagnosis.job}{age}", style="bold")
    if diagnosis.suspected is not None:
        line(console, diagnosis.suspected, style="yellow")
    for attempt in diagnosis.attempts:
        line(console, "")
        _render_attempt(attempt, console)
    if diagnosis.notes:
        line(console, "")
        notes(console, diagnosis.notes, "; --json has them all")


def _render_attempt(attempt: Attempt, console: Console) -> None:
    line(console, f"Attempt {attempt.number}, incarnation {attempt.incarnation}", style="bold")
    paragraph(console, attempt.what_happened)
    if attempt.flight_recorder is not None:
        paragraph(console, f"{attempt.flight_recorder.message}.")
    line(console, "")
    show(console, _ranks_table(attempt.ranks))
    if attempt.ended_well:
        return
    line(console, "")
    line(console, "The end", style="bold")
    _render_timeline(attempt, console)
    _render_frames(attempt, console)


def _ranks_table(ranks: list[Rank]) -> Table:
    columns, rows = rank_rows(ranks)
    drawn = table(*columns, right=("Step",), yielding=("Ranks", "Host", "Ended", "Was in", "At"), gap=1)
    for cells, bad in rows[:RANK_ROWS]:
        row(drawn, *cells, style="red" if bad else "")
    rest = sum(len(several) for several in ended_alike(ranks)[RANK_ROWS:])
    if rest:
        row(drawn, f"… {rest:,} more", *[""] * (len(columns) - 1))
    return drawn


def _render_timeline(attempt: Attempt, console: Console) -> None:
    rows = end_rows(attempt, TIMELINE_ROWS)
    drawn = Table.grid(Column(no_wrap=True), Column(overflow="fold"), Column(overflow="fold"), padding=(0, 2))
    for cells in rows:
        row(drawn, *cells)
    show(console, drawn)
    if len(rows) < len(attempt.timeline):
        line(console, f"… {len(attempt.timeline) - len(rows):,} more (--json lists all)")


def _render_frames(attempt: Attempt, console: Console) -> None:
    for title, frames in stacks(attempt):
        line(console, "")
        line(console, title, style="bold")
        for frame in frames:
            line(console, f"  {frame}")


@click.command("diagnose", short_help="What a job died of: the first failure and who was the reason.")
@click.argument("directory", metavar="[DIR]", required=False)
@job_option
@attempt_option
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as JSON.")
def diagnose_command(directory: str | None, job: str | None, attempt: str, as_json: bool) -> None:
    """The first failure, who everybody waited for, how each rank ended, and the last 30 seconds.

    DIR holds the run logs of all hosts, or of some of them, as for `report`. On a host of the job, what ranks left that
    died there and were not recovered yet is read too. Dumps of torch's flight recorder in DIR (nccl_trace_rank_0, …)
    are compared with what is found.

    The exit status is 0 if a reason was found, or all ended well; 3 if nothing was found.
    """
    roots = places.roots(settings.load().state_dir)
    found = run_logs(directory, beside=is_dump)
    result = diagnose(found, job, attempt, partial(look, roots))
    now = time.time_ns()
    if job is None:
        result.suspected = suspected(left(roots), found, result.job, result.last_seen, now)
    if as_json:
        click.echo(in_json(asdict(result)))
    else:
        render(result, standard_output(), found.directory if job is None else None, now)
    if not all(one.reason_found for one in result.attempts):
        sys.exit(NOTHING_FOUND)
