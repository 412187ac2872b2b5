"""How far a command is that reads many logs: a bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ddtrace_pytorch.cli.terminal import console_on

# Is told what is being done, to how many logs that was done, and of how many.
Progress = Callable[[str, int, int], None]

SECONDS_BETWEEN = 0.1


def silent(what: str, done: int, of: int) -> None:
    """Shows nothing."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Shows what it is told, and takes it away at the end."""
    if not sys.stderr.isatty():
        yield silent
        return
    # Not refreshed by itself: that would be a thread, and processes are forked meanwhile.
    bars = Bars(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("logs"), TimeRemainingColumn(),
        console=console_on(sys.stderr), auto_refresh=False, transient=True,
    )  # fmt: skip
    task: tuple[str, TaskID] | None = None
    shown = 0.0

    def told(what: str, done: int, of: int) -> None:
        nonlocal task, shown
        if task is None or task[0] != what:
            if task is not None:
                bars.remove_task(task[1])
            task = what, bars.add_task(what, total=of)
        bars.update(task[1], completed=done, total=of)
        now = time.monotonic()
        if now >= shown + SECONDS_BETWEEN:
            shown = now
            bars.refresh()

    with bars:
        yield told
