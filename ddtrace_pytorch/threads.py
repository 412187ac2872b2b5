"""What only the main thread may do, and what no thread of ours may: take a signal that is meant for the others."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections import deque
from collections.abc import Callable

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.deadline import Deadline

# A fault of a thread's own must still be its own.
_FAULTS = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS,
}  # fmt: skip

_waiting: deque[Callable[[], object]] = deque()


def _run_waiting(_: int | None) -> int:
    while _waiting:
        _waiting.popleft()()
    return 0


_run_waiting_in_c = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_waiting)


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


def join(thread: threading.Thread, seconds: float) -> None:
    """Wait for its end, at most so many `seconds`, whatever handlers of signals raise meanwhile: the first of that goes
    on then."""
    deadline = Deadline(seconds)
    raised: BaseException | None = None
    try:
        while thread.is_alive():
            try:
                thread.join(deadline.left())
            except BaseException as error:
                raised = raised or error
            if not deadline.left():
                break
        if raised is not None:
            raise raised
    finally:
        raised = None


def leave_signals_to_others() -> None:
    """Called first by each thread of ours: where the user blocks a signal, no thread of ours may take it instead."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
