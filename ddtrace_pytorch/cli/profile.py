"""`ddtrace-pytorch profile`: asks a job that is running for a profiler window, by a file beside its run log."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import click

from ddtrace_pytorch.cli.choice import NotReadable, NotThere, jobs_in, run_logs
from ddtrace_pytorch.kernels import requests
from ddtrace_pytorch.kernels.requests import MOST_STEPS, Request
from ddtrace_pytorch.kernels.schedule import Plan
from ddtrace_pytorch.kernels.trace_file import FOLDER
from ddtrace_pytorch.runlog.fields import integer, text
from ddtrace_pytorch.runlog.reader import RankLog
from ddtrace_pytorch.runlog.schema import REQUEST, decode
from ddtrace_pytorch.settings import BadValue, RankChoice, rank_choice
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
    """Of one rank: the last step it has told of, how many it takes in a second, and when it was last heard, in ns since
    the epoch."""

    step: int
    per_second: float
    heard: int


def pace(log: RankLog) -> Pace | None:
    """By the end of its log; None where that has no step, or the rank's end."""
    steps: list[tuple[int, int]] = []
    heard = 0
    for record in _tail(log.segments[-1]):
        heard = max(heard, record["ts"])
        step = integer(record, "step")
        if record["type"] == "step" and step is not None:
            steps.append((step, record["ts"]))
        elif record["type"] == "span" and text(record, "name") == "pytorch.rank" and _is_end(record):
            steps.clear()
    if not steps:
        return None
    (first, began), (last, ended) = steps[0], steps[-1]
    return Pace(last, max(last - first, 0) / max((ended - began) / 1e9, 1e-3), heard)


def _is_end(record: dict[str, Any]) -> bool:
    tags = record.get("tags")
    return isinstance(tags, dict) and "pytorch.end_reason" in tags


def _tail(path: str) -> Iterable[dict[str, Any]]:
    if path.endswith(".gz"):
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


def _running(logs: Sequence[RankLog], directory: str) -> list[Pace]:
    """How far the ranks are.

    Raises:
        NotThere: none of them runs, as far as their logs tell.
    """
    paces = [one for one in map(pace, logs) if one is not None]
    if not paces:
        raise NotThere(f"no rank of the job in {directory} is at a step: it has ended, or takes none; give --at STEP")
    silent = time.time() - max(one.heard for one in paces) / 1e9
    if silent > SILENT_SECONDS:
        raise NotThere(f"nothing was heard of the job in {directory} for {silent:.0f} s; give --at STEP if it runs")
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
    mine = found.logs_of(found.meant(job))
    newest = max(mine, key=lambda log: (integer(log.identity, "ts") or 0, log.incarnation)).incarnation
    logs = [log for log in mine if log.incarnation == newest]
    folders = sorted({os.path.dirname(log.segments[-1]) for log in logs})
    asked = [log.rank for log in logs if log.rank in chosen]
    if not asked:
        raise NotThere(f"none of {in_words(sorted(log.rank for log in logs))} is among {ranks}")
    first = at or first_step(_running(logs, found.directory))
    for folder in folders:
        _ask(folder, Request(Plan(first, steps, min(WARMUP, first - 1)), chosen))
    which = f"steps {first} to {first + steps - 1}" if steps > 1 else f"step {first}"
    where = ", ".join(os.path.join(folder, FOLDER) for folder in folders)
    click.echo(visible(f"Asked {in_words(sorted(asked))} for {which}."))
    click.echo(visible(f"The traces will be in {where}, unless the job has DD_PYTORCH_PROFILE_DIR."))
    size = max(integer(log.identity, "world_size") or 0 for log in logs)
    if at is None and size > len({log.rank for log in logs}):
        click.echo(f"Other ranks have no log here: where theirs are, run it with --at {first} --steps {steps}.")
