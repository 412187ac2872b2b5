"""`ddtrace-pytorch timeline`: what each rank of a job did when, as a file for ui.perfetto.dev."""

from __future__ import annotations

import sys
import time
from collections import Counter

import click
from rich.console import Console

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.choice import (
    NotThere,
    attempt_option,
    job_option,
    jobs_in,
    meant_attempts,
    run_logs,
)
from ddtrace_pytorch.cli.output import STDOUT, written
from ddtrace_pytorch.cli.progress import progress_bar
from ddtrace_pytorch.cli.summary import compact
from ddtrace_pytorch.cli.tables import line, notes, size, span
from ddtrace_pytorch.cli.terminal import console_on
from ddtrace_pytorch.cli.which_job import suspected
from ddtrace_pytorch.runlog.reader import RankLog, size_of
from ddtrace_pytorch.settings import BadValue, rank_choice
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.recovery import left
from ddtrace_pytorch.timeline import pftrace
from ddtrace_pytorch.timeline.attempts import attempts_of
from ddtrace_pytorch.timeline.chrome import Chrome
from ddtrace_pytorch.timeline.clocks import Aligned
from ddtrace_pytorch.timeline.crew import workers_for
from ddtrace_pytorch.timeline.drawing import LIMIT, Asked, NoSuchSteps, Told, draw
from ddtrace_pytorch.timeline.selection import COARSE, FINE, Backwards, Steps
from ddtrace_pytorch.timeline.sink import Format
from ddtrace_pytorch.visible import visible

JOB_ROWS = 10
HOST_ROWS = 20


@click.command("timeline", short_help="A picture of what each rank did when, for ui.perfetto.dev.")
@click.argument("directory", metavar="[DIR]", required=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to write it, otherwise trace.json.gz; compressed if the name ends in .gz; - is standard output.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "pftrace"]),
    default="json",
    show_default=True,
    help="pftrace: Perfetto's own, which is smaller and takes the perfetto package.",
)
@job_option
@attempt_option
@click.option("--ranks", default="all", show_default=True, metavar="0-3,8", help="Which ranks; %8 is every eighth.")
@click.option("--last-steps", type=click.IntRange(min=1), metavar="N", help="Only what belongs to the last N steps.")
@click.option("--steps", metavar="A:B", help="Only what belongs to steps A to B; either may be left out.")
@click.option(
    "--every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of spans and collectives, draw those of every Nth step and number; 1: all of them, however large the file. "
    f"Otherwise, as many as keep it below {LIMIT // 1_000_000} MB.",
)
def timeline_command(
    directory: str | None,
    output: str | None,
    form: str,
    job: str | None,
    attempt: str,
    ranks: str,
    last_steps: int | None,
    steps: str | None,
    every: int | None,
) -> None:
    """Steps, spans, collectives, checkpoints, waiting for data and stalls of each rank, on one clock.

    DIR holds run logs at any depth: a log root, one job, one run, or several hosts' copies. Without it, that is
    DD_PYTORCH_LOG_DIR or, where that is not set, ddtrace-pytorch-<user id> in the temporary directory.
    """
    output = output or f"trace.{form}.gz"
    written_as = _format(form)
    console = console_on(sys.stderr if output == STDOUT else sys.stdout)
    asked = Asked(_steps(steps, last_steps), every)
    found = run_logs(directory)
    here = jobs_in(found)
    chosen = here.meant(job)
    if len(here.ids) > 1 and job is None:
        line(console, "Jobs here, newest first; this is the first, --job names another:")
        for name in here.ids[:JOB_ROWS]:
            line(console, f"  {name}")
        if len(here.ids) > JOB_ROWS:
            line(console, f"  … {len(here.ids) - JOB_ROWS:,} more")
    attempts = attempts_of(here.logs_of(chosen))
    meant = [attempts[at] for at in meant_attempts(attempt, [one.incarnation for one in attempts], chosen)]
    logs = [(one.number if len(meant) > 1 else None, log) for one in meant for log in one.logs]
    logs = _of_ranks(logs, ranks, chosen)

    with written(output) as file, progress_bar() as progress:
        try:
            told = draw(logs, asked, written_as, file, workers_for(size_of(log for _, log in logs)), progress)
        except NoSuchSteps as error:
            raise NotThere(f"no such steps in job {chosen}: {error}") from None
    line(console, f"Job {chosen}" + (f", attempt {meant[0].number}" if len(meant) == 1 else ""), style="bold")
    if job is None:
        other = suspected(left(places.roots(settings.load().state_dir)), found, chosen, None, time.time_ns())
        if other is not None:
            line(console, other, style="yellow")
    _render(told, console)
    unread = (note for log in found.logs if log.damaged for note in log.notes)
    # Each log is read several times.
    notes(console, list(dict.fromkeys([*found.notes, *unread, *told.notes])))
    if output != STDOUT:
        how = " before compression" if output.endswith(".gz") else ""
        line(console, f"{output}: {size(told.written)}{how}; open it in https://ui.perfetto.dev")


def _format(form: str) -> Format:
    if form == "json":
        return Chrome()
    try:
        return pftrace.Perfetto()
    except pftrace.NotInstalled as error:
        raise NotThere(str(error)) from None


def _steps(written: str | None, last: int | None) -> Steps:
    if written is None:
        return Steps(latest=last)
    if last is not None:
        raise click.UsageError("--steps and --last-steps can't both be given")
    try:
        return Steps.parse(written)
    except Backwards as error:
        raise click.BadParameter(visible(str(error)), param_hint="--steps") from None
    except ValueError:
        why = f"{visible(written)} is not of the form A:B, such as 100:200, 100:, :200 or 100"
        raise click.BadParameter(why, param_hint="--steps") from None


def _of_ranks(logs: list[tuple[int | None, RankLog]], ranks: str, job: str) -> list[tuple[int | None, RankLog]]:
    try:
        choice = rank_choice(ranks)
    except BadValue as error:
        raise click.BadParameter(visible(str(error)), param_hint="--ranks") from None
    chosen = [(number, log) for number, log in logs if log.rank in choice]
    if not chosen:
        raise NotThere(f"no rank {ranks} in job {job}; the ranks there: {compact({log.rank for _, log in logs})}")
    return chosen


def _render(told: Told, console: Console) -> None:
    drawn, read = sum(told.drawn.values()), sum(told.read.values())
    line(console, f"{_many(told.ranks, 'process|processes')}, {_many(drawn, 'record')} drawn of {read:,}, "
                  f"{_many(told.arrows, 'collective')} joined across ranks")  # fmt: skip
    if told.outside:
        line(console, f"left out, not of these steps: {_counts(told.outside)}")
    if told.thinned:
        line(console, f"left out, {_how(told)}: {_counts(told.thinned)} (--every 1 draws all)", style="yellow")
    for one in told.clocks[:HOST_ROWS]:
        line(
            console,
            _clock(one),
            style="" if one.by is not None else "yellow" if one.host != told.clocks[0].host else "",
        )
    if len(told.clocks) > HOST_ROWS:
        line(console, f"… {len(told.clocks) - HOST_ROWS} more hosts")
    alone = [one.host or "an unknown host" for one in told.clocks[1:] if one.by is None]
    if alone:
        line(
            console,
            f"WARNING: no collective that all wait in links {', '.join(alone[:HOST_ROWS])} to {told.clocks[0].host}: "
            "their clocks are not aligned, and their times may be apart",
            style="yellow",
        )


def _how(told: Told) -> str:
    fine = f"of {', '.join(sorted(FINE))} all but every {_nth(told.thinning.fine)}"
    coarse = f", of {', '.join(sorted(COARSE))} all but every {_nth(told.thinning.coarse)}"
    return fine + (coarse if told.thinning.coarse > 1 else "")


def _clock(one: Aligned) -> str:
    host = one.host or "an unknown host"
    if one.by is None:
        return f"clock of {host}: as it is"
    sign = "-" if one.offset < 0 else "+"
    return (
        f"clock of {host}: {sign}{span(abs(one.offset) / 1e6)} by {_many(one.calls, 'collective')} with {one.by}, "
        f"residual {span(one.residual / 1e6)}"
    )


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{many:,} {name}" for name, many in counts.most_common(10))


def _many(many: int, word: str) -> str:
    one, _, other = word.partition("|")
    return f"{many:,} {one if many == 1 else other or one + 's'}"


def _nth(number: int) -> str:
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"
