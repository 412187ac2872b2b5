"""Hearing SIGTERM, and dying of it as if we had not been there.

Python runs signal handlers on the main thread between two bytecodes; a main thread blocked in a C++ collective
never gets there. So the Pulse listens on the interpreter's wakeup descriptor, which the C handler writes to at
once. What then happens depends on who else wants the signal:

* nobody (the handler before ours is the default, or ddtrace's, which ends in the default): the session says
  farewell, and the process dies of the same signal, by the default action;
* the user, before or after us: a snapshot is sent, and everything else is left to the user's handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
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
_libc.sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

_NOTHING = b"\0"

# Descriptors of ours are numbered from here, out of the way of code that closes or counts upwards from 3.
HIGH_DESCRIPTOR = 512

# What a thread of ours leaves to the others; a fault of its own must still be its own.
_LEFT_TO_OTHERS = signal.valid_signals() - {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS,
}  # fmt: skip

_PendingCall = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_waiting: deque[Callable[[], object]] = deque()


def _run_waiting(_: int | None) -> int:
    while _waiting:
        _waiting.popleft()()
    return 0


_run_waiting_in_c = _PendingCall(_run_waiting)


def on_main_thread(call: Callable[[], object]) -> None:
    """Run `call` on the main thread: now if this is it, else as soon as it executes Python again.

    Signal handlers and the wakeup descriptor can be set nowhere else, and some frameworks train on another thread.
    """
    call = safely("change signal handling on the main thread")(call)
    if threading.current_thread() is threading.main_thread():
        call()
    else:
        _waiting.append(call)
        ctypes.pythonapi.Py_AddPendingCall(_run_waiting_in_c, None)


def leave_signals_to_others() -> None:
    """Called first by each thread of ours: where the user blocks a signal, no thread of ours may take it instead."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_OTHERS)


def _high(descriptor: int) -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, min(HIGH_DESCRIPTOR, limit // 2)))
    finally:
        os.close(descriptor)


class SignalPipe:
    """A pipe that the interpreter's C signal handler writes signal numbers to; :meth:`poke` only wakes the reader."""

    def __init__(self) -> None:
        self._make()

    def _make(self) -> None:
        read, write = os.pipe()
        self._read, self._write = _high(read), _high(write)
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        found = os.fstat(self._read)
        self._identity = found.st_dev, found.st_ino
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def _is_ours(self, descriptor: int) -> bool:
        """Whether the number still stands for our pipe: user code closes descriptors wholesale, and gets them anew."""
        try:
            found = os.fstat(descriptor)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def attach(self) -> bool:
        """Become the wakeup descriptor, unless somebody else's (asyncio's) is set; whether it was ours already.

        Makes the pipe anew where it was closed. Main thread only.
        """
        if not (self._is_ours(self._read) and self._is_ours(self._write)):
            self.close()
            self._make()
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
        if not self._is_ours(self._read):
            time.sleep(timeout)
            return b""
        try:
            return os.read(self._read, 4096).replace(_NOTHING, b"")
        except BlockingIOError:
            return b""

    def poke(self, byte: bytes = _NOTHING) -> None:
        if not self._is_ours(self._write):
            return
        try:
            os.write(self._write, byte)
        except BlockingIOError:
            pass  # full: the reader will wake anyway

    def close(self) -> None:
        """Detach and close. Main thread only: a closed descriptor's number may soon be somebody's file."""
        self.detach()
        for descriptor in (self._read, self._write):
            if self._is_ours(descriptor):
                os.close(descriptor)


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


def _handled_in_c(number: int, present: Any) -> bool:
    """Whether somebody's C code handles the signal, of which Python knows nothing (`faulthandler.register`)."""
    if present is None:
        return True
    action = (ctypes.c_void_p * 64)()  # struct sigaction begins with the handler, and is smaller on every platform
    _libc.sigaction(number, None, action)
    return present == signal.SIG_DFL and bool(action[0])


class Handler:
    """Our SIGTERM handler and the pipe beside it: installed while we are on, at work while somebody listens.

    It is installed only where nobody else wants the signal; the pipe hears it in any case.
    """

    def __init__(self) -> None:
        self.pipe = SignalPipe()
        self.previous: Any = signal.SIG_DFL
        self._listening = False
        self._answering = False
        self._answered = threading.Event()
        self._left_to_the_user = False
        self._called = False
        self._nobody_else_before = True
        self._closing = False
        self._held: int | None = None

    def install(self) -> None:
        """Install over the present handler if that does nothing of the user's. Main thread only."""
        present: Any = signal.getsignal(signal.SIGTERM)
        if present is not self and ends_in_default(present) and not _handled_in_c(signal.SIGTERM, present):
            self.previous = present
            signal.signal(signal.SIGTERM, self)
        self.pipe.attach()

    def remove(self) -> None:
        """Give the handler before ours back if ours is the one installed, and close the pipe. Main thread only."""
        self._listening = False
        installed: Any = signal.getsignal(signal.SIGTERM)
        if installed is self:
            signal.signal(signal.SIGTERM, self.previous)
        self.pipe.close()

    def listen(self) -> None:
        """A Pulse reads the pipe from now on; what was written before is not meant for it."""
        while self.pipe.wait(0.0):
            pass
        self._answered.clear()
        self._called = False
        self.look()
        self._listening = True

    def look(self) -> None:
        """Remember who handles the signal, for when it comes; called at every beat."""
        self._nobody_else_before = ends_in_default(signal.getsignal(signal.SIGTERM))

    def nobody_else_wants_it(self) -> bool:
        """Whether the signal just heard is ours to die of.

        A handler of the user's may have put the default or ours back as the first thing it did. The default cannot
        have been there (nothing would have been heard), and ours must have been there before, or have been called.
        """
        present: Any = signal.getsignal(signal.SIGTERM)
        called, self._called = self._called, False
        ours = present != signal.SIG_DFL and ends_in_default(present) and (self._nobody_else_before or called)
        self._left_to_the_user = not ours
        return ours

    def hold(self, heard: int | None = None) -> None:
        """The session is closing: a signal, perhaps one that was just `heard`, waits until :meth:`rest`."""
        self._closing = True
        self._held = heard or self._held

    def rest(self) -> None:
        """Nobody reads the pipe any more; the signal is passed on, one that came meanwhile too."""
        self._listening = self._closing = False
        held, self._held = self._held, None
        if held is not None:
            die(held)

    @contextlib.contextmanager
    def stand_aside(self) -> Iterator[None]:
        """While a rendezvous may block in C++ and nobody listens yet: the signal kills at once, as it would without
        ddtrace, whose Python handler could not run."""
        present: Any = signal.getsignal(signal.SIGTERM)
        if self._listening or present == signal.SIG_DFL or not ends_in_default(present):
            yield
            return
        handler = _libc.signal(signal.SIGTERM, None)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is present:
                _libc.signal(signal.SIGTERM, handler)

    def renew(self) -> None:
        """In a forked child: a pipe that is not shared with the parent."""
        self._listening = self._closing = self._answering = False
        self._held = None
        self.pipe.close()
        self.pipe = SignalPipe()
        self.pipe.attach()

    def answered(self) -> None:
        """The Pulse has done what there was to do."""
        self._answered.set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A handler of the user's that calls the one before it, if that is callable, goes on after us; with the
        # default action before it, it would not have called anything.
        for_us = sys._getframe().f_back is frame or self._under_ddtraces(number)
        if self._answering:
            return  # one of many: the first is being seen to
        if self._closing:
            if for_us:
                self._held = number
            return
        if self._listening and self._ask(number, for_us):
            return  # and we are still here: PID 1, or called by the user's handler
        if callable(self.previous):
            self.previous(number, frame)
        elif for_us:
            die(number)

    def _under_ddtraces(self, number: int) -> bool:
        present: Any = signal.getsignal(number)
        return present is not self and present != signal.SIG_DFL and ends_in_default(present)

    def _ask(self, number: int, for_us: bool) -> bool:
        """Have the Pulse see to the signal; whether it did in time."""
        self._answering = True
        try:
            if not safely("hear signals")(self.pipe.attach)():
                self.pipe.poke(bytes([number]))
            done = self._answered.wait(ANSWER_SECONDS)
            if done and for_us and self._left_to_the_user:
                # The Pulse could not know that nobody but us was called.
                self._called = True
                self._answered.clear()
                self.pipe.poke(bytes([number]))
                done = self._answered.wait(ANSWER_SECONDS)
            self._answered.clear()
            return done
        finally:
            self._answering = False


def die(number: int) -> None:
    """Raise `number` again with its default action, on the main thread.

    Comes back only where the kernel spares the process (PID 1), or while the main thread blocks the signal: it is
    then heard again as soon as it no longer does.
    """
    before = _libc.signal(number, None)
    signal.pthread_kill(threading.main_thread().ident or 0, number)
    time.sleep(OUTLIVED_SECONDS)
    _libc.signal(number, before)
