"""Does the same for many logs, in as many processes as there are cores where that is worth it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")

# Less than this is read faster than processes are started.
WORTH_IT = 64_000_000

MOST = 16

# What a child that is forked finds to do; so that nothing of it has to be sent there.
_task: Callable[[int], Any] | None = None


def workers_for(size: int) -> int:
    """How many processes should read so many bytes."""
    return 1 if size < WORTH_IT else max(min(len(os.sched_getaffinity(0)), MOST), 1)


def each(task: Callable[[int], T], many: int, workers: int) -> Iterator[T]:
    """What `task` gives for each number below `many`, in order."""
    if workers < 2 or many < 2:
        yield from map(task, range(many))
        return
    global _task
    _task = task
    with ProcessPoolExecutor(min(workers, many), mp_context=get_context("fork"), initializer=_end_at_once) as pool:
        yield from pool.map(_do, range(many), chunksize=max(many // workers // 16, 1))


def _end_at_once() -> None:
    """By Ctrl-C, of which the first process tells."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _do(at: int) -> Any:
    assert _task is not None
    return _task(at)
