"""Does the same for many logs, in as many processes as there are cores where that is worth it."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

# Less than this is read faster than processes are started.
WORTH_IT = 64_000_000

MOST = 16
# Of what a process has done, so much may wait until it is taken.
PIPE_BYTES = 1 << 20


class Lost(Exception):
    """A process ended before it was done."""


def workers_for(size: int) -> int:
    """How many processes should read so many bytes."""
    return 1 if size < WORTH_IT else max(min(len(os.sched_getaffinity(0)), MOST), 1)


def each(task: Callable[[int], T], many: int, workers: int) -> Iterator[T]:
    """What `task` gives for each number below `many`, in order.

    Raises:
        Lost: one of the processes was killed.
        Exception: what `task` raised.
    """
    workers = min(workers, many)
    if workers < 2:
        yield from map(task, range(many))
        return
    context, crew, taken = get_context("fork"), [], list[Connection]()
    # A child that is interrupted before it has got ready would say so.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for first in range(workers):
            takes, gives = context.Pipe(duplex=False)
            with suppress(OSError):  # the user may have no more of them
                fcntl.fcntl(gives.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            taken.append(takes)
            child = context.Process(target=_work, args=(task, range(first, many, workers), gives, taken), daemon=True)
            child.start()
            crew.append(child)
            gives.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in range(many):
            done, error = taken[number % workers].recv()
            if error is not None:
                raise error
            yield done
    except EOFError:
        raise Lost("a process that read a part of it was killed, perhaps for want of memory") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for child in crew:
            child.kill()
        for child in crew:
            child.join()
        for takes in taken:
            takes.close()


def _work(task: Callable[[int], Any], numbers: range, gives: Connection, others: list[Connection]) -> None:
    """In the child. A Ctrl-C ends it at once, of which the first process tells."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Whoever has the other end keeps a pipe open, though nobody reads it any more.
    for takes in others:
        takes.close()
    try:
        for number in numbers:
            gives.send((task(number), None))
    except BrokenPipeError:
        pass  # nobody wants the rest
    except Exception as error:
        gives.send((None, error))
