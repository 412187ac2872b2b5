"""On which thread and in which asyncio task something is recorded."""

from __future__ import annotations

import threading
from _thread import get_native_id
from asyncio import _get_running_loop, current_task
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtrace_pytorch.records.user_span import Open

running_loop = _get_running_loop


class Here:
    """One thread. `innermost`: the span it is in; `foreign`: Python didn't start it, such as autograd's threads;
    `deaf`: a thread of ours, which records nothing."""

    __slots__ = ("deaf", "foreign", "innermost", "name")

    def __init__(self, name: str, foreign: bool) -> None:
        self.name = name
        self.foreign = foreign
        self.deaf = False
        self.innermost: Open | None = None


class _Local(threading.local):
    here: Here


local = _Local()
# Where a thread that Python didn't start looks for the span it works for: the thread that waits for it.
main: Here | None = None

_numbers = count(1)
# Of the task, its id() and our number for it. A task begins with a copy of what its maker had.
_numbered: ContextVar[tuple[int, int]] = ContextVar("ddtrace_pytorch.task", default=(0, 0))


def arrive() -> Here:
    """Make this thread known: what :data:`local` lacks."""
    global main
    thread: Any = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    foreign = thread is None or isinstance(thread, threading._DummyThread)
    here = local.here = Here(f"thread {get_native_id()}" if foreign else thread.name, foreign)
    if thread is threading.main_thread():
        main = here
    return here


def be_deaf() -> None:
    """From now on nothing is recorded on this thread, which is one of ours."""
    try:
        local.here.deaf = True
    except AttributeError:
        arrive().deaf = True


def task_number() -> int | None:
    """A small number for the asyncio task that runs on this thread, where a loop does; None between tasks."""
    task = current_task()
    if task is None:
        return None
    known, number = _numbered.get()
    if known != id(task):
        number = next(_numbers)
        _numbered.set((id(task), number))
    return number
