"""`ddtrace-pytorch recover`: tells of ranks of this host that were gone before they could say how they ended."""

from __future__ import annotations

from datetime import datetime

import click
from rich.console import Console
from rich.table import Table

from ddtrace_pytorch import settings
from ddtrace_pytorch.aftermath import Teller
from ddtrace_pytorch.cli.choice import run_logs
from ddtrace_pytorch.cli.tables import line, notes, row, table
from ddtrace_pytorch.cli.terminal import standard_output
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.recovery import Fate, Found, recover

SAID = {
    Fate.ALIVE: "lives",
    Fate.TOLD: "told",
    Fate.UNTOLD: "not told",
    Fate.TAKEN: "told by another",
    Fate.ELSEWHERE: "not of this host",
}


class Untold(click.ClickException):
    """Nobody took what there was to tell."""

    exit_code = 1


def render(found: list[Found], console: Console) -> None:
    """One line for each rank that has a state here."""
    jobs = list(dict.fromkeys((one.words.identity.job, one.words.identity.incarnation) for one in found))
    for job, incarnation in jobs:
        line(console, f"Job {job}, incarnation {incarnation}", style="bold")
        console.print(
            _table(
                [one for one in found if (one.words.identity.job, one.words.identity.incarnation) == (job, incarnation)]
            )
        )


def _render_notes(directory: str | None, console: Console) -> None:
    """What in `directory` could not be looked at."""
    if directory is None:
        return
    logs = run_logs(directory)
    notes(console, [*logs.notes, *(note for log in logs.logs if log.damaged for note in log.notes)])


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
def recover_command(directory: str | None) -> None:
    """Finishes the spans of ranks that died on this host by SIGKILL, out of memory, abort or os._exit.

    Each is sent to the Agent once, with its own ids, as an error that ends with the rank's last beat, and is added to
    the rank's run log, if it has one: in DIR, at any depth, or else where the rank had it. A rank that lives, stopped
    or not, is left alone. The next attempt of the same job on this host does the same by itself.

    Their states are found in DD_PYTORCH_STATE_DIR, if set, or else in /dev/shm and the temporary directory.
    """
    chosen = settings.load()
    found = list(recover(places.roots(chosen.state_dir), Teller(chosen, directory)))
    console = standard_output()
    render(found, console)
    _render_notes(directory, console)
    untold = sum(one.fate is Fate.UNTOLD for one in found)
    if untold:
        raise Untold(
            f"{untold} not told: no Agent answers, and there is no run log of it to add to; "
            "start the Agent, or set DD_TRACE_AGENT_URL, or give the directory of the run log"
        )
    if not found:
        click.echo("No rank has left anything behind here.")
