"""Hearing SIGTERM, and dying of it as if we had not been there.

Python runs signal handlers on the main thread between two bytecodes; a main thread blocked in a C++ collective
never gets there. So the Pulse listens on the interpreter's wakeup descriptor, which the C handler writes to at
once. What then happens depends on who else wants the signal:

* nobody (the handler before ours is the default, or ddtrace's, which ends in the default): the session says
  farewell, and the process dies of the same signal, by the default action;
* the user, before or after us: a snapshot is sent, and everything else is left to the user's handler.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from ddtrace_pytorch.border import safely

# How long a main thread that reached the Python handler waits for the Pulse's answer.
ANSWER_SECONDS = 2.5
# How long after the signal was raised again it is certain that the process outlives it (it is PID 1).
OUTLIVED_SECONDS = 0.25

_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p

_NOTHING = b"\0"

_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_waiting: deque[Callable[[], object]] = deque()


def _run_waiting(_: int | None) -> int:
    while _waiting:
        safely("change signal handling on the main thread")(_waiting.popleft())()
    return 0


_run_waiting_in_c = _PendingCall(_run_waiting)


def on_main_thread(call: Callable[[], object]) -> None:
    """Run `call` on the main thread: now if this is it, else as soon as it executes Python again.

    Signal handlers and the wakeup descriptor can be set nowhere else, and some frameworks train on another thread.
    """
    if threading.current_thread() is threading.main_thread():
        call()
    else:
        _waiting.append(call)
        ctypes.pythonapi.Py_AddPendingCall(_run_waiting_in_c, None)


class SignalPipe:
    """A pipe that the interpreter's C signal handler writes signal numbers to; :meth:`poke` only wakes the reader."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def attach(self) -> bool:
        """Become the wakeup descriptor, unless somebody else's (asyncio's) is set; whether it was ours already.

        Main thread only.
        """
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before not in (-1, self._write):
            signal.set_wakeup_fd(before)
        return before == self._write

    def detach(self) -> None:
        """Stop being the wakeup descriptor; somebody else's is left in place. Main thread only."""
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._write):
            signal.set_wakeup_fd(before)

    def wait(self, timeout: float) -> bytes:
        """The bytes written, after at most `timeout` seconds; empty where there was only a poke or nothing."""
        if not self._poll.poll(timeout * 1000):
            return b""
        try:
            return os.read(self._read, 4096).replace(_NOTHING, b"")
        except BlockingIOError:
            return b""

    def poke(self, byte: bytes = _NOTHING) -> None:
        try:
            os.write(self._write, byte)
        except BlockingIOError:
            pass  # full: the reader will wake anyway

    def close(self) -> None:
        """Detach and close. Main thread only: a closed descriptor's number may soon be somebody's file."""
        self.detach()
        os.close(self._read)
        os.close(self._write)


def ends_in_default(handler: Any) -> bool:
    """Whether `handler` does nothing of the user's: the default action, ours over it, or ddtrace's over it."""
    if handler is None or handler == signal.SIG_DFL:
        return True
    if isinstance(handler, Handler):
        return ends_in_default(handler.previous)
    if getattr(handler, "__module__", None) not in ("ddtrace.internal.utils.signals", "ddtrace.internal.atexit"):
        return False
    # ddtrace chains the handler it found in a closure cell; where there is none, it ends in the default.
    names = handler.__code__.co_freevars
    return all(
        ends_in_default(cell.cell_contents)
        for name, cell in zip(names, handler.__closure__ or (), strict=True)
        if name == "old_signal"
    )


class Handler:
    """Our SIGTERM handler and the pipe beside it: installed while we are on, at work while somebody listens.

    It is installed only where nobody else wants the signal; the pipe hears it in any case.
    """

    def __init__(self) -> None:
        self.pipe = SignalPipe()
        self.previous: Any = signal.SIG_DFL
        self._listening = False
        self._answered = threading.Event()

    def install(self) -> None:
        """Install over the present handler if that does nothing of the user's. Main thread only."""
        present: Any = signal.getsignal(signal.SIGTERM)
        if present is not self and ends_in_default(present):
            self.previous = present
            signal.signal(signal.SIGTERM, self)
        self.pipe.attach()

    def remove(self) -> None:
        """Give the handler before ours back if ours is the one installed, and close the pipe. Main thread only."""
        self._listening = False
        installed: Any = signal.getsignal(signal.SIGTERM)
        if installed is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self.previous is None else self.previous)
        self.pipe.close()

    def listen(self) -> None:
        """A Pulse reads the pipe from now on; what was written before is not meant for it."""
        while self.pipe.wait(0.0):
            pass
        self._answered.clear()
        self._listening = True

    def rest(self) -> None:
        """Nobody reads the pipe any more; the signal is passed on."""
        self._listening = False

    def renew(self) -> None:
        """In a forked child: a pipe that is not shared with the parent."""
        self.rest()
        self.pipe.close()
        self.pipe = SignalPipe()
        self.pipe.attach()

    def answered(self) -> None:
        """The Pulse has done what there was to do."""
        self._answered.set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._listening:
            if not self.pipe.attach():
                self.pipe.poke(bytes([number]))
            if self._answered.wait(ANSWER_SECONDS):
                self._answered.clear()  # and we are still here: PID 1, or called by the user's handler
                return
        if callable(self.previous):
            self.previous(number, frame)
        else:
            die(number)


def die(number: int) -> None:
    """Raise `number` again with its default action. Comes back only where the kernel spares the process (PID 1)."""
    before = _libc.signal(number, None)
    os.kill(os.getpid(), number)
    time.sleep(OUTLIVED_SECONDS)
    _libc.signal(number, before)
