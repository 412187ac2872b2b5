"""The Pulse: a daemon thread, about one beat a second, that keeps a session's time.

It touches no file, no store and no user code, so a beat is never late. It also sleeps on the pipe that tells of
signals, so that a SIGTERM is heard at once even while the main thread is blocked in C++.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.signal_pipe import SignalPipe
from ddtrace_pytorch.threads import join, leave_signals_to_others

# How far apart the runs of a task are that is wanted again and again, and how many times what one takes, at least.
APART_SECONDS = 0.25
APART_TIMES = 20


@dataclass
class Task:
    """Something to do every `interval` seconds, the first time at `due` on the monotonic clock; last done at `ran`,
    which `took` so many seconds."""

    run: Callable[[], None]
    interval: float
    due: float
    ran: float = -math.inf
    took: float = 0.0


def task(what: str, run: Callable[[], None], interval: float, first: float | None = None) -> Task:
    """A task that starts `first` (default: `interval`) seconds from now; `what` says in the log what failed."""
    return Task(safely(what)(run), interval, time.monotonic() + (interval if first is None else first))


class Pulse:
    """Runs tasks on their schedule and passes on what the signal pipe says, until stopped."""

    def __init__(self, tasks: list[Task], pipe: SignalPipe, on_signals: Callable[[bytes], None]) -> None:
        self._tasks = tasks
        self._pipe = pipe
        self._on_signals = safely("handle a signal")(on_signals)
        self._stopped = False
        self._asked: threading.Event | None = None
        self._thread = threading.Thread(target=self._run, name="ddtrace_pytorch.pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def want(self, one: Task) -> None:
        """Have a task run soon, from any thread; it may be called often."""
        due = max(time.monotonic(), one.ran + max(APART_SECONDS, APART_TIMES * one.took))
        if due < one.due:
            one.due = due
            self._pipe.poke()

    def catch_up(self, timeout: float) -> None:
        """Wait until the signals that came before this call were passed on, at most `timeout` seconds. One call at a
        time, and not on the Pulse itself."""
        if self._thread.is_alive():
            asked = self._asked = threading.Event()
            self._pipe.poke()
            asked.wait(timeout)

    def stop(self, timeout: float) -> None:
        """End the thread and wait for it; called on the Pulse itself, it only ends it."""
        self._stopped = True
        self._pipe.poke()
        if threading.current_thread() is not self._thread:
            join(self._thread, timeout)

    def _run(self) -> None:
        leave_signals_to_others()
        while not self._stopped:
            # Before the reading: who asks after that asks of what may come after it.
            asked = self._asked
            next_due = min(one.due for one in self._tasks)
            heard = self._pipe.wait(0.0 if asked is not None else max(0.0, next_due - time.monotonic()))
            if heard:
                self._on_signals(heard)
            if asked is not None:
                self._asked = None
                asked.set()
            if self._stopped:
                return
            now = time.monotonic()
            for one in self._tasks:
                if now >= one.due:
                    # Before the run: it may be wanted again meanwhile. A beat missed while the process was stopped is
                    # not made up for.
                    one.due, one.ran = max(one.due + one.interval, now), time.monotonic()
                    one.run()
                    one.took = time.monotonic() - one.ran
