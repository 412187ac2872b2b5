"""`ddtrace-pytorch diagnose`: shows a :class:`~ddtrace_pytorch.cli.diagnosis.Diagnosis` in words, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

import click
from rich.console import Console
from rich.table import Table

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.choice import attempt_option, job_option, run_logs
from ddtrace_pytorch.cli.diagnosis import Attempt, Diagnosis, Rank, alike, diagnose
from ddtrace_pytorch.cli.tables import line, notes, row, table
from ddtrace_pytorch.cli.terminal import standard_output
from ddtrace_pytorch.collectives.dump_files import is_dump
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.history import frames_of
from ddtrace_pytorch.stalls.recovery import look
from ddtrace_pytorch.stalls.telling import ranges

RANK_ROWS = 24
TIMELINE_ROWS = 30
FRAMES_OF = 3
HOSTS_SHOWN = 2

# 1 and 2 are for what can't be read or isn't there.
NOTHING_FOUND = 3


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Show it so that it reads well at 80 columns, in a terminal or piped."""
    line(console, f"Job {diagnosis.job}", style="bold")
    for attempt in diagnosis.attempts:
        line(console, "")
        _render_attempt(attempt, console)
    if diagnosis.notes:
        line(console, "")
        notes(console, diagnosis.notes, "; --json has them all")


def _render_attempt(attempt: Attempt, console: Console) -> None:
    line(console, f"Attempt {attempt.number}, incarnation {attempt.incarnation}", style="bold")
    line(console, attempt.what_happened)
    if attempt.flight_recorder is not None:
        line(console, f"{attempt.flight_recorder.message}.")
    line(console, "")
    console.print(_ranks_table(attempt.ranks))
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
    rest = sum(len(several) for several in _alike(ranks)[RANK_ROWS:])
    if rest:
        row(drawn, f"… {rest:,} more", *[""] * (len(columns) - 1))
    return drawn


def rank_rows(ranks: list[Rank]) -> tuple[list[str], list[tuple[list[str], bool]]]:
    """The columns that there is something in, and a row for ranks that ended alike in the same place, which may be
    bad."""
    groups = _alike(ranks)
    columns = ("Ranks", "Host", "Ended", "Last beat", "Was in", "Step", "At")
    kept = [name for name in columns if name not in ("Step", "At") or any(_cell(name, several) for several in groups)]
    return kept, [
        ([_cell(name, several) for name in kept], any(one.ended_badly for one in several)) for several in groups
    ]


def _alike(ranks: list[Rank]) -> list[list[Rank]]:
    groups: dict[tuple[object, ...], list[Rank]] = {}
    for one in ranks:
        key = (one.named, alike(one.ended), one.was_in, one.step, one.where)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _cell(column: str, several: list[Rank]) -> str:
    one = several[0]
    hosts = sorted({rank.host for rank in several if rank.host})
    return {
        "Ranks": _ranges([rank.rank for rank in several]),
        "Host": ", ".join(hosts) if len(hosts) <= HOSTS_SHOWN else f"{len(hosts)} hosts",
        "Ended": alike(one.ended),
        "Last beat": max((rank.last_beat[11:19] for rank in several if rank.last_beat), default="?"),
        "Was in": one.was_in,
        "Step": "" if one.step is None else str(one.step),
        "At": one.where or "",
    }[column]


def _ranges(numbers: list[int]) -> str:
    return ranges(numbers).replace(",", ", ")


def _render_timeline(attempt: Attempt, console: Console) -> None:
    rows = end_rows(attempt, TIMELINE_ROWS)
    drawn = Table.grid(padding=(0, 2))
    for cells in rows:
        row(drawn, *cells)
    console.print(drawn)
    if len(rows) < len(attempt.timeline):
        line(console, f"… {len(attempt.timeline) - len(rows):,} more (--json lists all)")


def end_rows(attempt: Attempt, many: int) -> list[tuple[str, str, str]]:
    """What happened last, the `many` most important in order of time: when, to whom, what."""
    named = {rank.rank for rank in attempt.ranks if rank.named}

    def importance(at: int) -> tuple[bool, bool, int]:
        one = attempt.timeline[at]
        return not named & {*one.ranks}, one.what == "last beat", -at

    kept = sorted(sorted(range(len(attempt.timeline)), key=importance)[:many])
    return [
        (one.at[11:23] if one.at else "?", f"rank{'' if len(one.ranks) == 1 else 's'} {_ranges(one.ranks)}", one.what)
        for one in map(attempt.timeline.__getitem__, kept)
    ]


def _render_frames(attempt: Attempt, console: Console) -> None:
    for title, frames in stacks(attempt):
        line(console, "")
        line(console, title, style="bold")
        for frame in frames:
            line(console, f"  {frame}")


def stacks(attempt: Attempt) -> Iterator[tuple[str, Sequence[str]]]:
    """Where the exception came from, and where those were that everybody waited for."""
    first = attempt.first_failure
    if first is not None and first.frames:
        yield f"Where rank {first.ranks[0]} raised, innermost first", first.frames
    raised = first.ranks if first is not None and first.frames else []
    culprits = attempt.verdict.culprits if attempt.verdict is not None else []
    culprits = [one for one in culprits if one.get("rank") not in raised]
    for one in [culprit for culprit in culprits if frames_of(culprit)][:FRAMES_OF]:
        yield f"Where rank {one.get('rank')} was, innermost first", frames_of(one)


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
    left_behind = partial(look, places.roots(settings.load().state_dir))
    result = diagnose(run_logs(directory, beside=is_dump), job, attempt, left_behind)
    if as_json:
        click.echo(json.dumps(asdict(result), indent=2))
    else:
        render(result, standard_output())
    if not all(one.reason_found for one in result.attempts):
        sys.exit(NOTHING_FOUND)
