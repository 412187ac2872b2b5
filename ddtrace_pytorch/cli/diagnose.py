"""`ddtrace-pytorch diagnose`: shows a :class:`~ddtrace_pytorch.cli.diagnosis.Diagnosis` in words, or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial

import click
from rich.console import Console
from rich.table import Table

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.choice import attempt_option, job_option, run_logs
from ddtrace_pytorch.cli.diagnosis import Attempt, Diagnosis, Rank, Row, alike, diagnose
from ddtrace_pytorch.cli.tables import line, row, table
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
NOTE_ROWS = 20

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
        for note in diagnosis.notes[:NOTE_ROWS]:
            line(console, f"note: {note}", style="yellow")
        if len(diagnosis.notes) > NOTE_ROWS:
            line(console, f"note: … {len(diagnosis.notes) - NOTE_ROWS} more; --json has them all", style="yellow")


def _render_attempt(attempt: Attempt, console: Console) -> None:
    line(console, f"Attempt {attempt.number}, incarnation {attempt.incarnation}", style="bold")
    line(console, attempt.what_happened)
    if attempt.flight_recorder is not None:
        line(console, f"{attempt.flight_recorder.message}.")
    line(console, "")
    console.print(_ranks_table(attempt.ranks, console))
    if attempt.ended_well:
        return
    line(console, "")
    line(console, "The end", style="bold")
    _render_timeline(attempt, console)
    _render_frames(attempt, console)


def _ranks_table(ranks: list[Rank], console: Console) -> Table:
    """One row for ranks that ended alike in the same place."""
    groups: dict[tuple[object, ...], list[Rank]] = {}
    for one in ranks:
        key = (one.named, alike(one.ended), one.was_in, one.step, one.where)
        groups.setdefault(key, []).append(one)
    columns = ("Ranks", "Host", "Ended", "Last beat", "Was in", "Step", "At")
    kept = [
        name
        for name in columns
        if name not in ("Step", "At") or any(_cell(name, several) for several in groups.values())
    ]
    drawn = table(*kept, right=("Step",), yielding=("Ranks", "Host", "Ended", "Was in", "At"), gap=1)
    shown = list(groups.values())[:RANK_ROWS]
    for several in shown:
        bad = any(one.ended_badly for one in several)
        row(drawn, *(_cell(name, several) for name in kept), style="red" if bad else "")
    rest = sum(map(len, groups.values())) - sum(map(len, shown))
    if rest:
        row(drawn, f"… {rest:,} more", *[""] * (len(kept) - 1))
    return drawn


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
    named = {rank.rank for rank in attempt.ranks if rank.named}

    def importance(at: int) -> tuple[bool, bool, int]:
        one = attempt.timeline[at]
        return not named & {*one.ranks}, one.what == "last beat", -at

    kept = sorted(sorted(range(len(attempt.timeline)), key=importance)[:TIMELINE_ROWS])
    drawn = Table.grid(padding=(0, 2))
    for at in kept:
        _draw(drawn, attempt.timeline[at])
    console.print(drawn)
    if len(kept) < len(attempt.timeline):
        line(console, f"… {len(attempt.timeline) - len(kept):,} more (--json lists all)")


def _draw(into: Table, one: Row) -> None:
    row(
        into,
        one.at[11:23] if one.at else "?",
        f"rank{'' if len(one.ranks) == 1 else 's'} {_ranges(one.ranks)}",
        one.what,
    )


def _render_frames(attempt: Attempt, console: Console) -> None:
    first = attempt.first_failure
    if first is not None and first.frames:
        line(console, "")
        line(console, f"Where rank {first.ranks[0]} raised, innermost first", style="bold")
        for frame in first.frames:
            line(console, f"  {frame}")
    raised = first.ranks if first is not None and first.frames else []
    culprits = attempt.verdict.culprits if attempt.verdict is not None else []
    culprits = [one for one in culprits if one.get("rank") not in raised]
    for one in [culprit for culprit in culprits if frames_of(culprit)][:FRAMES_OF]:
        line(console, "")
        line(console, f"Where rank {one.get('rank')} was, innermost first", style="bold")
        for frame in frames_of(one):
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
    left_behind = partial(look, places.roots(settings.load().state_dir))
    result = diagnose(run_logs(directory, beside=is_dump), job, attempt, left_behind)
    if as_json:
        click.echo(json.dumps(asdict(result), indent=2))
    else:
        render(result, standard_output())
    if not all(one.reason_found for one in result.attempts):
        sys.exit(NOTHING_FOUND)
