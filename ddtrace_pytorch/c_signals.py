"""Signals as the C library has them: the action below Python's handlers, which :mod:`signal` neither shows nor sets."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

# How long after the signal was raised again it is certain that the process outlives it (it is PID 1).
OUTLIVED_SECONDS = 0.25

# Begins with the handler (None is the default) and is smaller than this on every platform.
_Action = ctypes.c_void_p * 64

_libc = ctypes.CDLL(None)
_libc.sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def handled_in_c(number: int) -> bool:
    """Whether somebody's C code handles the signal, of which Python knows nothing (`faulthandler.register`)."""
    known: Any = signal.getsignal(number)
    if known is None:
        return True
    action = _Action()
    _libc.sigaction(number, None, action)
    return known == signal.SIG_DFL and bool(action[0])


@contextlib.contextmanager
def default_action(number: int) -> Iterator[None]:
    """The signal's default action, with no Python handler in between; one that is set meanwhile stays."""
    known = signal.getsignal(number)
    before = _Action()
    # Not signal(3): what it puts back has system calls go on after the signal, and Python's handlers never run then.
    _libc.sigaction(number, _Action(), before)
    try:
        yield
    finally:
        if signal.getsignal(number) is known:
            _libc.sigaction(number, before, None)


def die(number: int) -> None:
    """Raise `number` again with its default action, on the main thread.

    Comes back only where the kernel spares the process (PID 1), or while the main thread blocks the signal: it is
    then heard again as soon as it no longer does.
    """
    with default_action(number):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        time.sleep(OUTLIVED_SECONDS)
