"""Calls the users' collective hooks, on a thread that is there only while one is registered and a session is open."""

from __future__ import annotations

import math
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic, monotonic_ns
from typing import Any, Protocol

from ddtrace_pytorch import hooks
from ddtrace_pytorch.border import safely, warn, warn_once
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives.listening import BATCH, Call, Listener
from ddtrace_pytorch.collectives.surface import Kind
from ddtrace_pytorch.collectives.telling import ON_THE_HOST
from ddtrace_pytorch.hooks import CollectiveStatus
from ddtrace_pytorch.threads import leave_signals_to_others
from ddtrace_pytorch.weakly import weakly

# Events that wait for their hooks, and works that are not complete; beyond that the oldest are lost, and counted.
HELD = 4_096
PENDING_HELD = 1_024

# How soon a work is asked whether it is complete: an eighth of the time it has taken so far, within these bounds.
SOONEST_SECONDS = 0.001
LATEST_SECONDS = 0.05

FAILURES = 10
BACK_OFF_SECONDS = 1.0
CLOSE_SECONDS = 1.0


HOOKS = {"start": hooks.starts, "end": hooks.ends}


class Instrument(Protocol):
    def listen(self, listener: Listener) -> None: ...

    def unlisten(self, listener: Listener) -> None: ...


class Callbacks:
    """Has a :class:`Teller` listen while there is a hook for it, from :meth:`open` to :meth:`close`.

    `placeholder` is the type of the works that a coalescing block hands out and that nobody may touch.
    """

    def __init__(self, instrument: Instrument, clock: Clock, placeholder: type | tuple[()]) -> None:
        self._instrument = instrument
        self._clock = clock
        self._placeholder = placeholder
        self._teller: Teller | None = None
        self._lock = threading.RLock()
        self._closed = False

    def open(self) -> None:
        hooks.follow(self._look)

    def close(self, patience: float = math.inf) -> None:
        """Deliver what waits, for :data:`CLOSE_SECONDS` or `patience` at most, and end the thread."""
        hooks.unfollow(self._look)
        teller = self._stop(for_good=True)
        if teller is not None:
            teller.join(min(CLOSE_SECONDS, patience))

    def abandon(self) -> None:
        """In a forked child, where the thread is not."""
        hooks.unfollow(self._look)

    def _look(self) -> None:
        if not (hooks.starts or hooks.ends):
            self._stop()
            return
        with self._lock:
            if self._teller is None and not self._closed:
                teller = Teller(self._clock, self._placeholder, self._gave_up)
                teller.start()
                self._teller = teller
                self._instrument.listen(teller)

    def _stop(self, for_good: bool = False) -> Teller | None:
        with self._lock:
            self._closed = self._closed or for_good
            teller, self._teller = self._teller, None
            if teller is not None:
                self._instrument.unlisten(teller)
                teller.stop()
        return teller

    def _gave_up(self) -> None:
        self._stop(for_good=True)


@dataclass(eq=False)
class _Pending:
    """A collective that is not complete. The work is held until it is: nothing else would tell."""

    work: Any
    status: CollectiveStatus
    started: int


class Teller:
    """A :class:`~ddtrace_pytorch.collectives.listening.Listener` that hands what it hears to a thread of its own.

    Only works of backends that run on the host are held and asked: on a GPU, holding one keeps memory from being used
    again, and asking it would break the capture of a CUDA graph.
    """

    def __init__(self, clock: Clock, placeholder: type | tuple[()], gave_up: Callable[[], object]) -> None:
        self._clock = clock
        self._placeholder = placeholder
        self._gave_up = gave_up
        # What it holds is reentrant: a signal handler that runs a collective may come at any time.
        self._news = threading.Condition()
        self._events: deque[tuple[str, CollectiveStatus]] = deque()
        self._pending: deque[_Pending] = deque()
        self._lost = dict.fromkeys(HOOKS, 0)
        self._poll_at = 0.0
        self._stopped = False
        self._rest = threading.Event()
        self._thread = threading.Thread(target=weakly(self._run), name="ddtrace_pytorch.callbacks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread once it has delivered what waits."""
        with self._news:
            self._stopped = True
            self._news.notify()
        self._rest.set()

    def join(self, timeout: float) -> None:
        """Wait for the thread; what it could not deliver by then is lost."""
        if get_ident() != self._thread.ident:
            self._thread.join(timeout)
        with self._news:
            left = len(self._events) + len(self._pending) + sum(self._lost.values())
            self._events.clear()
            self._pending.clear()
        if left:
            warn(f"{left:,} events of collectives came too late for their hooks")

    def begin(self, call: Call) -> None:
        if hooks.starts and self._is_of_interest(call):
            self._put("start", self._status(call, call.started))

    def end(self, call: Call, result: Any) -> None:
        if not hooks.ends or not self._is_of_interest(call):
            return
        now = monotonic_ns()
        on_the_host = call.group.backend in ON_THE_HOST or getattr(call.device, "type", None) == "cpu"
        # gloo's sends and receives say that they are complete only once somebody has waited for them.
        if call.deferred and on_the_host and call.operation.kind is not Kind.P2P and self._can_be_asked(result):
            self._hold(_Pending(result, self._status(call, now), call.started))
            return
        source = "completion" if on_the_host and not call.deferred else "issue"
        status = self._status(call, now)
        self._put("end", _ended(status, now - call.started, source, status.timestamp))

    def _is_of_interest(self, call: Call) -> bool:
        return call.operation is not BATCH and get_ident() != self._thread.ident

    def _can_be_asked(self, work: Any) -> bool:
        return hasattr(work, "is_completed") and not isinstance(work, self._placeholder)

    def _status(self, call: Call, noticed: int) -> CollectiveStatus:
        return CollectiveStatus(
            pg_name=call.group.name,
            backend=call.group.backend,
            sequence_number=call.number,
            operation=call.operation.name,
            timestamp=self._clock.from_monotonic(noticed),
        )

    def _put(self, kind: str, status: CollectiveStatus) -> None:
        with self._news:
            if len(self._events) >= HELD:
                # The oldest go, so that the last event there is tells of every one lost before.
                lost, _ = self._events.popleft()
                self._lost[lost] += 1
            self._events.append((kind, status))
            self._news.notify()

    def _hold(self, pending: _Pending) -> None:
        with self._news:
            if len(self._pending) >= PENDING_HELD:
                self._pending.popleft()
                self._lost["end"] += 1
            self._pending.append(pending)
            self._poll_at = min(self._poll_at, monotonic() + SOONEST_SECONDS)
            self._news.notify()

    def _run(self) -> None:
        leave_signals_to_others()
        try:
            self._take_turns()
        finally:
            if not self._stopped:
                self._gave_up()
                warn_once(
                    "the thread that calls the hooks of collectives has stopped, after ten failures in a row; "
                    "this session calls none any more"
                )

    def _take_turns(self) -> None:
        turn = safely("call the hooks of collectives")(self._turn)
        failures = 0
        while failures < FAILURES:
            going_on = turn()
            if going_on is False:
                return
            failures = 0 if going_on else failures + 1
            if failures:
                self._rest.wait(BACK_OFF_SECONDS)

    def _turn(self) -> bool:
        """Deliver the next event, or wait for one; false once all is delivered and there will be no more."""
        with self._news:
            if not (self._events or self._stopped):
                self._news.wait(max(0.0, self._poll_at - monotonic()) if self._pending else None)
        self._poll()
        with self._news:
            if not self._events:
                return not self._stopped
            kind, status = self._events.popleft()
            drops, self._lost[kind] = self._lost[kind], 0
        for handle in tuple(HOOKS[kind]):
            handle.call(replace(status, drop_count=drops))
        return True

    def _poll(self) -> None:
        is_last = self._stopped and not self._events
        if not self._pending or (monotonic() < self._poll_at and not is_last):
            return
        with self._news:
            asked = tuple(self._pending)
        complete = {one for one in asked if _is_complete(one.work) is not False}
        now = monotonic_ns()
        timestamp = self._clock.from_monotonic(now)
        with self._news:
            # Not all of `complete`: what was lost meanwhile is counted already.
            held, self._pending = self._pending, deque[_Pending]()
            for one in held:
                if one in complete:
                    self._put("end", _ended(one.status, now - one.started, "completion", timestamp))
                else:
                    self._pending.append(one)
            youngest = (now - self._pending[-1].started) / 1e9 if self._pending else 0.0
            self._poll_at = monotonic() + min(max(youngest / 8, SOONEST_SECONDS), LATEST_SECONDS)


def _ended(status: CollectiveStatus, took: int, source: str, timestamp: int) -> CollectiveStatus:
    return replace(status, duration=took / 1e6, time_source=source, timestamp=timestamp)


@safely("ask a collective whether it is complete")
def _is_complete(work: Any) -> bool:
    return bool(work.is_completed())
