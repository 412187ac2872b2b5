"""`ddtrace-pytorch profile`: asks a job that is running for a profiler window, by a file beside its run log."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.choice import NotReadable, NotThere, jobs_in, run_logs
from ddtrace_pytorch.cli.starts import in_order
from ddtrace_pytorch.cli.which_job import ago, past
from ddtrace_pytorch.kernels import requests
from ddtrace_pytorch.kernels.requests import MOST_STEPS, Request
from ddtrace_pytorch.kernels.schedule import Plan
from ddtrace_pytorch.kernels.trace_file import FOLDER
from ddtrace_pytorch.runlog.fields import integer, mapping, text
from ddtrace_pytorch.runlog.reader import RankLog, read_file
from ddtrace_pytorch.runlog.schema import REQUEST, decode
from ddtrace_pytorch.settings import BadValue, RankChoice, rank_choice
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.last_words import LastWords
from ddtrace_pytorch.stalls.recovery import look
from ddtrace_pytorch.stalls.telling import in_words
from ddtrace_pytorch.visible import visible

# How much of the end of a log is read.
TAIL = 256 * 1024
# Until a rank has seen the request, and its steps so far have come into its log.
AHEAD_SECONDS = 5.0
# A log tells of a step when the next one's optimizer steps, and there is one more to be under way by then.
UNTOLD_STEPS = 2
WARMUP = 1
SILENT_SECONDS = 60.0


class Pace(NamedTuple):
    """Of one rank: the last step it has told of, and how many it takes in a second."""

    step: int
    per_second: float


class Trail(NamedTuple):
    """What the end of a rank's log says: when the rank was last `heard`, in ns since the epoch, as what it has `ended`
    (empty: as far as is known, it has not), and its pace, if it has taken a step and may take another."""

    rank: int
    heard: int
    ended: str
    pace: Pace | None


def trail(log: RankLog) -> Trail:
    steps: list[tuple[int, int]] = []
    heard, ended = log.began, ""
    for record in _tail(log.segments[-1]):
        heard = max(heard, record["ts"])
        step = integer(record, "step")
        if record["type"] == "step" and step is not None:
            steps.append((step, record["ts"]))
            ended = ""
        elif record["type"] == "span" and text(record, "name") == "pytorch.rank":
            ended = text(mapping(record, "tags"), "pytorch.end_reason")
            if ended:
                steps.clear()
    return Trail(log.rank, heard, ended, _pace(steps) if steps else None)


def _pace(steps: Sequence[tuple[int, int]]) -> Pace:
    (first, began), (last, until) = steps[0], steps[-1]
    return Pace(last, max(last - first, 0) / max((until - began) / 1e9, 1e-3))


def _tail(path: str) -> Iterable[dict[str, Any]]:
    if path.endswith(".gz"):
        yield from read_file(path, [])
        return
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - TAIL, 0))
        lines = file.read(TAIL).split(b"\n")
    for line in lines[1 if size > TAIL else 0 :]:
        record = decode(line)
        if record is not None:
            yield record


def first_step(paces: Iterable[Pace]) -> int:
    """Where a window may begin, so that all ranks have heard of it when they come there."""
    known = list(paces)
    quickest = max(one.per_second for one in known)
    return max(one.step for one in known) + UNTOLD_STEPS + WARMUP + math.ceil(quickest * AHEAD_SECONDS)


def _ranks(raw: str) -> RankChoice:
    try:
        return rank_choice(raw)
    except BadValue as accepted:
        raise click.BadParameter(f"{raw!r} is not {accepted}") from None


def _ask(directory: str, request: Request) -> str:
    try:
        return requests.write(directory, request)
    except FileExistsError:
        path = os.path.join(directory, REQUEST)
        raise NotReadable(f"another window was asked for, and is still to come: remove {path} to ask anew") from None
    except OSError as error:
        raise NotReadable(f"can't write to {directory}: {error.strerror or error}") from None


def _running(logs: Sequence[RankLog], gone: Mapping[int, LastWords], job: str) -> list[Trail]:
    """The trails of the ranks that have not ended. `gone`: what those left by rank that died on this host.

    Raises:
        NotThere: all have.
    """
    trails = []
    for one in map(trail, logs):
        words = gone.get(one.rank)
        if words is not None and not one.ended:
            one = one._replace(ended=words.end_reason, heard=max(one.heard, words.state.as_of), pace=None)
        trails.append(one)
    running = [one for one in trails if not one.ended]
    if not running:
        ways: dict[str, list[int]] = {}
        for one in sorted(trails, key=lambda one: one.rank):
            ways.setdefault(one.ended, []).append(one.rank)
        how = "; ".join(f"{in_words(ranks)} {way}" for way, ranks in ways.items())
        ended = past(max(one.heard for one in trails) / 1e9, time.time_ns())
        raise NotThere(f"{job} has ended, {ended} ({how}); only a job that runs can be asked for a window")
    return running


def _paces(running: Sequence[Trail], job: str) -> list[Pace]:
    """How far the ranks are.

    Raises:
        NotThere: they are at no step, as far as their logs tell.
    """
    silent = time.time() - max(one.heard for one in running) / 1e9
    if silent > SILENT_SECONDS:
        raise NotThere(
            f"nothing was heard of {job} for {ago(silent)}: it hangs, or was killed, which `ddtrace-pytorch diagnose` "
            "tells; give --at STEP if it runs"
        )
    paces = [one.pace for one in running if one.pace is not None]
    if not paces:
        raise NotThere(f"no rank of {job} has taken a step yet, as far as its log tells; give --at STEP, or wait")
    return paces


@click.command("profile", short_help="Asks a job that is running for a window of torch's profiler.")
@click.argument("directory", metavar="[DIR]", required=False)
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), default=2, show_default=True, help="How many it takes.")
@click.option("--ranks", default="all", show_default=True, metavar="0-3,8", help="Whose; %8 is every eighth.")
@click.option("--at", type=click.IntRange(min=1), metavar="STEP", help="The first step, otherwise one soon to come.")
@click.option("--job", metavar="ID", help="The job to ask, by its id or the beginning of it; otherwise the newest.")
def profile_command(directory: str | None, steps: int, ranks: str, at: int | None, job: str | None) -> None:
    """Has the ranks of the newest job in DIR, or in the usual place, record some steps with torch's profiler.

    Nothing has to be set in the job but that it writes a run log. All ranks take the same steps. The traces are in
    `profiles` beside the run log soon after.

    Where each host has a run log of its own, run it on each, with the same --at.
    """
    chosen = _ranks(ranks)
    found = jobs_in(run_logs(directory))
    job = found.meant(job)
    order = in_order(found.logs_of(job))
    incarnation, logs = (order.training or order.beside)[-1]
    folders = sorted({os.path.dirname(log.segments[-1]) for log in logs})
    asked = [log.rank for log in logs if log.rank in chosen]
    if not asked:
        raise NotThere(f"none of {in_words(sorted(log.rank for log in logs))} is among {ranks}")
    roots = places.roots(settings.load().state_dir)
    gone = {words.identity.rank: words for words, alive in look(roots, job, incarnation) if not alive}
    named = f"job {job} in {found.directory}"
    running = _running(logs, gone, named)
    first = at or first_step(_paces(running, named))
    for folder in folders:
        _ask(folder, Request(Plan(first, steps, min(WARMUP, first - 1)), chosen))
    which = f"steps {first} to {first + steps - 1}" if steps > 1 else f"step {first}"
    where = ", ".join(os.path.join(folder, FOLDER) for folder in folders)
    click.echo(visible(f"Asked {in_words(sorted(asked))} for {which}."))
    click.echo(visible(f"The traces will be in {where}, unless the job has DD_PYTORCH_PROFILE_DIR."))
    size = max(integer(log.identity, "world_size") or 0 for log in logs)
    if at is None and size > len({log.rank for log in logs}):
        click.echo(f"Other ranks have no log here: where theirs are, run it with --at {first} --steps {steps}.")
