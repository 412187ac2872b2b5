"""`ddtrace-pytorch recover`: tells of ranks of this host that were gone before they could say how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table

from ddtrace_pytorch import settings
from ddtrace_pytorch.aftermath import Teller
from ddtrace_pytorch.cli.choice import NotThere, Refused, matching, run_logs, shorten
from ddtrace_pytorch.cli.tables import line, notes, row, show, table
from ddtrace_pytorch.cli.terminal import standard_output
from ddtrace_pytorch.cli.which_job import own_logs
from ddtrace_pytorch.runlog.reader import Scan
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.recovery import Fate, Found, left, recover
from ddtrace_pytorch.visible import visible

SAID = {
    Fate.ALIVE: "lives",
    Fate.TOLD: "told",
    Fate.UNTOLD: "not told",
    Fate.FORGOTTEN: "forgotten",
    Fate.TAKEN: "told by another",
    Fate.ELSEWHERE: "not of this host",
}


class Several(Refused):
    """More than one job could be meant: they are listed, and nothing is done."""

    exit_code = 2

    def __init__(self, there: Sequence[Found], jobs: int) -> None:
        super().__init__(
            f"{jobs} jobs left something to tell here, and nothing was done: name one with --job ID (the beginning of "
            "it is enough) or by the directory of its run log, or take --all of them"
        )
        self._there = there

    def show(self, file: IO[Any] | None = None) -> None:
        show(standard_output(), _jobs_table(self._there))
        super().show(file)


class Untold(click.ClickException):
    """Nobody took what there was to tell."""

    exit_code = 1


def render(found: list[Found], console: Console) -> None:
    """One line for each rank that has a state here."""
    for (job, incarnation), ranks in _attempts(found).items():
        line(console, f"Job {job}, incarnation {incarnation}", style="bold")
        show(console, _table(ranks))


def _attempts(found: Sequence[Found]) -> dict[tuple[str, str], list[Found]]:
    """By job and incarnation."""
    attempts: dict[tuple[str, str], list[Found]] = {}
    for one in found:
        attempts.setdefault((one.words.identity.job, one.words.identity.incarnation), []).append(one)
    return attempts


def _render_notes(logs: Scan, console: Console) -> None:
    """What in a directory could not be looked at."""
    notes(console, [*logs.notes, *(note for log in logs.logs if log.damaged for note in log.notes)])


def _meant(asked: str | None, logs: Scan | None, there: Sequence[Found]) -> set[str] | None:
    """Which of the jobs that are `there` are meant: the one that is `asked` for, else those that have a log among
    `logs`, else the only one that there is something to tell of; None: all, where there is nothing to tell.

    Raises:
        NotThere: several begin with what is asked for.
        Several: there is something to tell of more than one.
    """
    jobs = {one.words.identity.job for one in there}
    if asked is not None:
        found = matching(asked, sorted(jobs))
        if len(found) > 1:
            raise NotThere(f"{len(found)} jobs that left something behind here begin with {asked}: {shorten(found)}")
        return set(found)
    if logs is not None:
        return {log.job for log in logs.logs if not log.damaged} & jobs
    untold = {one.words.identity.job for one in there if one.fate is Fate.UNTOLD}
    if len(untold) > 1:
        raise Several(there, len(untold))
    return untold or None


def _jobs_table(found: Sequence[Found]) -> Table:
    """The jobs that there is something to tell of, and how many of their ranks are dead, or live."""
    columns = ("Job", "Incarnation", "Dead", "Alive", "Last beat", "Run log")
    drawn = table(*columns, right=("Dead", "Alive"), yielding=("Job", "Run log"))
    for (job, incarnation), ranks in _attempts(found).items():
        fates = Counter(one.fate for one in ranks)
        if fates[Fate.UNTOLD]:
            where = next(filter(None, (own_logs(one.words.identity) for one in ranks)), "none found")
            last = _time(max(one.words.state.as_of for one in ranks))
            row(drawn, job, incarnation, f"{fates[Fate.UNTOLD]:,}", f"{fates[Fate.ALIVE]:,}", last, where)
    return drawn


def _table(found: list[Found]) -> Table:
    columns = ("Rank", "Host", "Last beat", "Was in", "Ended", "Outcome")
    drawn = table(*columns, right=("Rank",), yielding=("Host", "Was in"))
    for one in found:
        words = one.words
        ended = "" if one.fate in (Fate.ALIVE, Fate.ELSEWHERE) else words.end_reason
        row(
            drawn, str(words.identity.rank), words.identity.host, _time(words.state.as_of), words.was_in(), ended,
            SAID[one.fate], style="red" if ended else "",
        )  # fmt: skip
    return drawn


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9).astimezone().strftime("%m-%d %H:%M:%S")


@click.command("recover", short_help="Tells of ranks that were killed here, at the Agent and in their run log.")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--job", metavar="ID", help="Of this job alone, by its id or the beginning of it.")
@click.option("--all", "everything", is_flag=True, help="Of all jobs, where several left something behind.")
@click.option("--forget", is_flag=True, help="Delete what there is no Agent and no run log for, rather than keep it.")
def recover_command(directory: str | None, job: str | None, everything: bool, forget: bool) -> None:
    """Finishes the spans of ranks that died on this host by SIGKILL, out of memory, abort or os._exit.

    Each is sent to the Agent once, with its own ids, as an error that ends with the rank's last beat, and is added to
    the rank's run log, if it has one: in DIR, at any depth, or else where the rank had it. A rank that lives, stopped
    or not, is left alone. The next attempt of the same job on this host does the same by itself.

    Of the one job of this user that left something to tell; where there are several, it lists them and does nothing.
    With DIR, of those that have a run log in it; with --job, of that one; with --all, of all.

    Their states are found in DD_PYTORCH_STATE_DIR, if set, or else in /dev/shm and the temporary directory.
    """
    chosen = settings.load()
    roots = places.roots(chosen.state_dir)
    if everything and (job is not None or directory is not None):
        raise click.UsageError("--all can't be given with --job or DIR")
    logs = run_logs(directory) if directory is not None else None
    there = left(roots)
    meant = None if everything else _meant(job, logs, there)
    tell = Teller(chosen, directory)
    found = list(recover(roots, tell, lambda words: meant is None or words.identity.job in meant, forget))
    console = standard_output()
    render(found, console)
    if logs is not None:
        _render_notes(logs, console)
    if not found:
        whose = f"of job {job} " if job is not None else f"of a job in {directory} " if logs is not None else ""
        click.echo(visible(f"No rank {whose}has left anything behind here."))
    if others := sum(meant is not None and one.words.identity.job not in meant for one in there):
        many = f"{others} ranks of other jobs have" if others > 1 else "A rank of another job has"
        click.echo(f"{many} a state here, too: --job ID takes one of them, --all takes all.")
    untold = sum(one.fate is Fate.UNTOLD for one in found)
    if untold:
        raise Untold(
            f"{untold} not told: no Agent answers, and there is no run log of it that could be added to; "
            "start the Agent, or set DD_TRACE_AGENT_URL, or give the directory of the run log; "
            "to be rid of what nobody is to take any more: --forget"
        )
