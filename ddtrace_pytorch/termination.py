"""Hearing SIGTERM, and dying of it as if we had not been there.

Python runs signal handlers on the main thread between two bytecodes; a main thread blocked in a C++ collective
never gets there. So the Pulse listens on the interpreter's wakeup descriptor, which the C handler writes to at
once. What then happens depends on who else wants the signal:

* nobody (the handler before ours is the default, or ddtrace's, which ends in the default): the session says
  farewell, and the process dies of the same signal, by the default action;
* the user, before or after us: a snapshot is sent, and everything else is left to the user's handler.

Without us the default action would have ended the process at once. So what handlers of other signals raise while ours
waits (Ctrl-C, or torch's of SIGCHLD where a DataLoader's worker died of the same signal) changes nothing about the end.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ddtrace_pytorch import c_signals
from ddtrace_pytorch.border import safely
from ddtrace_pytorch.signal_pipe import SignalPipe

# How long a main thread that reached the Python handler waits for the Pulse's answer.
ANSWER_SECONDS = 2.5


def _chain(handler: Any) -> Iterator[Any]:
    """`handler` and what it hands on to, as far as that can be told: past ours and ddtrace's."""
    yield handler
    while True:
        if isinstance(handler, Place):
            handler = handler.previous
        elif getattr(handler, "__module__", None) in ("ddtrace.internal.utils.signals", "ddtrace.internal.atexit"):
            # ddtrace keeps the handler it found in a closure cell; where there is none, it ends in the default.
            cells = zip(handler.__code__.co_freevars, handler.__closure__ or (), strict=True)
            handler = next((cell.cell_contents for name, cell in cells if name == "old_signal"), signal.SIG_DFL)
        else:
            return
        yield handler


def ends_in_default(handler: Any) -> bool:
    """Whether `handler` does nothing of the user's: the default action, ours over it, or ddtrace's over it."""
    *_, last = _chain(handler)
    return last is None or last == signal.SIG_DFL


def _hand_on(previous: Any, number: int, frame: FrameType | None, for_us: bool) -> None:
    if callable(previous):
        previous(number, frame)
    elif for_us:
        c_signals.die(number)


class Place:
    """Where our handler stands in the chain of handlers: over `previous`.

    It stands there once more where ddtrace's has come over it: that shuts down what sends our spans, and may not run
    before we do.
    """

    def __init__(self, handler: Handler, previous: Any) -> None:
        self.handler = handler
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A handler of the user's that calls the one before it, if that is callable, goes on after us; with the
        # default action before it, it would not have called anything.
        self.handler.hear(number, frame, self.previous, directly=sys._getframe().f_back is frame)


class Handler:
    """Our SIGTERM handler and the pipe beside it: installed while we are on, at work while somebody listens.

    It is installed only where nobody else wants the signal; the pipe hears it in any case.
    """

    def __init__(self) -> None:
        self.pipe = SignalPipe()
        self._forget()

    def _forget(self) -> None:
        self._listening = False
        # The signals that wait until a closing session is closed; None while none is closing.
        self._held: list[int] | None = None
        # On the main thread our Python handler asks, and the Pulse, which may have heard before it, answers.
        self._asking = False
        self._answered = threading.Event()
        # What handlers of other signals raised first while the process was to end.
        self._raised: BaseException | None = None
        # Whose the signal is that is on its way down the chain, where we may stand more than once.
        self._handed_on_for_us: bool | None = None
        self._left_to_the_user = False
        self._was_ours_alone = True

    def install(self) -> None:
        """Install over the present handler if that does nothing of the user's. Main thread only."""
        present: Any = signal.getsignal(signal.SIGTERM)
        if not self._is(present) and ends_in_default(present) and not c_signals.handled_in_c(signal.SIGTERM):
            signal.signal(signal.SIGTERM, Place(self, present))
        self.pipe.attach()

    def remove(self) -> None:
        """Give the handler before ours back if ours is the one installed, and close the pipe. Main thread only."""
        self._listening = False
        installed: Any = signal.getsignal(signal.SIGTERM)
        if self._is(installed):
            signal.signal(signal.SIGTERM, installed.previous)
        self.pipe.close()

    def _is(self, installed: Any) -> bool:
        return isinstance(installed, Place) and installed.handler is self

    def listen(self) -> None:
        """A Pulse reads the pipe from now on; what was written before is not meant for it."""
        while self.pipe.wait(0.0):
            pass
        self._answered.clear()
        self.look()
        self._listening = True

    def look(self) -> None:
        """Remember whose signal it is, for when it comes; called at every beat."""
        self._was_ours_alone = ends_in_default(signal.getsignal(signal.SIGTERM))

    def nobody_else_wants_it(self) -> bool:
        """Whether the signal just heard is ours to die of.

        A handler of the user's may have put the default or ours back as the first thing it did. The default cannot
        have been there (nothing would have been heard), and ours must have been there before.
        """
        present: Any = signal.getsignal(signal.SIGTERM)
        ours = present != signal.SIG_DFL and ends_in_default(present) and self._was_ours_alone
        self._left_to_the_user = not ours
        return ours

    def hold(self, heard: int | None = None) -> None:
        """The session is closing: a signal, perhaps one that was just `heard`, waits until :meth:`rest`, if that is
        still to come."""
        if heard is None:
            self._held = self._held or []
        elif self._held is not None:
            self._held.append(heard)
        else:
            c_signals.die(heard)

    def rest(self) -> None:
        """Nobody reads the pipe any more; the signal is passed on, one that came meanwhile too."""
        self._listening = False
        held, self._held = self._held, None
        if held:
            c_signals.die(held[0])

    def stand_aside(self) -> contextlib.AbstractContextManager[None]:
        """While a rendezvous may block in C++ and nobody listens yet: the signal kills at once, as it would without
        ddtrace, whose Python handler could not run."""
        whose = signal.getsignal(signal.SIGTERM)
        if self._listening or not ends_in_default(whose) or c_signals.handled_in_c(signal.SIGTERM):
            return contextlib.nullcontext()
        return c_signals.default_action(signal.SIGTERM)

    def renew(self) -> None:
        """In a forked child: a pipe that is not shared with the parent."""
        self._forget()
        self.pipe.close()
        self.pipe = SignalPipe()
        self.pipe.attach()

    def answered(self) -> None:
        """The Pulse has done what there was to do."""
        self._answered.set()

    def hear(self, number: int, frame: FrameType | None, previous: Any, directly: bool) -> None:
        """Python's handler, called `directly` or by another one; `previous` is the one below."""
        if self._handed_on_for_us is not None:
            _hand_on(previous, number, frame, self._handed_on_for_us)
            return
        for_us = directly or self._under_ddtraces(number)
        if self._asking:
            return  # one of many: the first is being seen to
        held = self._held
        if held is not None:
            if for_us:
                held.append(number)
            return
        if for_us:
            self._end(number, frame, previous)
        else:
            self._see_to(number, frame, previous, for_us)

    def _end(self, number: int, frame: FrameType | None, previous: Any) -> None:
        """Die of the signal, which is ours, whatever is raised meanwhile."""
        until = time.monotonic() + ANSWER_SECONDS
        try:
            self._see_to(number, frame, previous, for_us=True)
        except BaseException as error:
            self._keep(error)
            if self._listening:
                self._wait(until, for_us=True)
            c_signals.die(number)
        raised, self._raised = self._raised, None
        try:
            if raised is not None:
                raise raised  # and we are still here: PID 1, which goes on as if there had been no SIGTERM
        finally:
            raised = None

    def _keep(self, error: BaseException) -> None:
        self._raised = self._raised or error

    def _see_to(self, number: int, frame: FrameType | None, previous: Any, for_us: bool) -> None:
        if self._listening and self._ask(number, for_us):
            return  # and we are still here: PID 1, or called by the user's handler
        self._handed_on_for_us = for_us
        try:
            _hand_on(previous, number, frame, for_us)
        finally:
            self._handed_on_for_us = None

    def _under_ddtraces(self, number: int) -> bool:
        present: Any = signal.getsignal(number)
        return not self._is(present) and present != signal.SIG_DFL and ends_in_default(present)

    def _ask(self, number: int, for_us: bool) -> bool:
        """Have the Pulse see to the signal; whether it did in time."""
        self._asking = True
        try:
            if not safely("hear signals")(self.pipe.attach)():
                self.pipe.poke(bytes([number]))
            done = self._wait(time.monotonic() + ANSWER_SECONDS, for_us)
            if done and for_us and self._left_to_the_user:
                # The Pulse could not know that nobody but us was called.
                self._was_ours_alone = True
                self._answered.clear()
                self.pipe.poke(bytes([number]))
                done = self._wait(time.monotonic() + ANSWER_SECONDS, for_us)
            self._answered.clear()
            return done
        finally:
            self._asking = False

    def _wait(self, until: float, for_us: bool) -> bool:
        """Wait for the Pulse's answer, whatever is raised meanwhile if the signal is ours; whether it came in time."""
        while True:
            try:
                return self._answered.wait(max(0.0, until - time.monotonic()))
            except BaseException as error:
                if not for_us or time.monotonic() > until:
                    raise
                self._keep(error)
