"""What happens when a rank stands still: it is noticed, the roll is called, and one rank says who is waited for."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from ddtrace_pytorch.border import safely, warn_once
from ddtrace_pytorch.stalls.mates import Mates
from ddtrace_pytorch.stalls.roll import RankState
from ddtrace_pytorch.stalls.roll_call import Roll
from ddtrace_pytorch.stalls.telling import in_words
from ddtrace_pytorch.stalls.told import Told
from ddtrace_pytorch.stalls.unsaid import is_seen_in_part, may_change
from ddtrace_pytorch.stalls.verdict import Verdict, Where, judge
from ddtrace_pytorch.stalls.watch import SECOND, Over, Pending, Stalled, Watch
from ddtrace_pytorch.threads import leave_signals_to_others

# Between a collective that raised and the question why: the others need a beat to have written where they are.
AFTER_ERROR_SECONDS = 1.2
# By then it is known whether it was caught, as a rule, and this long is left to the others to read that.
WRITTEN_BEFORE_SECONDS = 0.2
# Where all ranks raise, it is said once in this time; where they wait, once in this share of what they may.
ECHO_SECONDS = 5.0
TELL_AGAIN = 0.9
# What a collective that raised waits at most until it is written where it was.
WRITTEN_SECONDS = 0.25
# Without a verdict it is tried again: states are up to two beats old.
TRIES = 3
BETWEEN_TRIES_SECONDS = 1.0
# Where somebody's last words may change it, it is looked again, and so often; once only by a rank that is about to end.
LOOKS = 3
BETWEEN_LOOKS_SECONDS = 0.4
# How often it is looked who else is on this host.
MEET_SECONDS = 10.0


class Outlet(Protocol):
    """Where it is told. No method waits."""

    def stall(self, stalled: Stalled) -> None: ...

    def over(self, over: Over) -> None: ...

    def ended(self, over: Over, said: Where) -> None: ...

    def verdict(self, verdict: Verdict) -> None: ...

    def raised(self) -> None: ...

    def keep(self) -> None: ...


class Standstill:
    """One rank's part in it, from :meth:`begin` to :meth:`leave`."""

    def __init__(
        self,
        pending: Callable[[int], Sequence[Pending]],
        look_closer: Callable[[], object],
        outlet: Outlet,
        now: Callable[[], int],
        seconds: float,
        world_size: int,
    ) -> None:
        """`pending`: what this rank is in, at a moment of the monotonic clock; `look_closer`: read what takes time and
        then adds to that; `now`: ns since the epoch; `seconds`: how long a collective may take."""
        self._pending = pending
        self._look_closer = look_closer
        self._outlet = outlet
        self._now = now
        self._seconds = seconds
        self._world_size = world_size
        self._watch = Watch()
        self._mates: Mates | None = None
        self._place = ""
        self._call: Callable[[], Roll | None] | None = None
        self._hosts: Mapping[int, str] = {}
        self._store_host: str | None = None
        self._met_at = 0.0
        self._told = Told()
        self._wanted = threading.Event()
        self._closer = False
        self._stalls: Sequence[Pending] = ()
        self._unheard: Sequence[int] = ()
        self._failed_at: float | None = None
        self._raised = False
        self._written = threading.Event()
        self._leaving = threading.Event()
        self._turn_held: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def begin(self, mates: Mates, place: str) -> None:
        """The ranks of this host leave their states where `mates` reads them; `place` is what only they have in
        common."""
        self._mates = mates
        self._place = place
        # With a method of the outlet's, which may be given as a proxy: it is there for as long as this runs.
        keep = self._outlet.keep
        self._thread = threading.Thread(target=self._run, args=(keep,), name="ddtrace_pytorch.standstill", daemon=True)
        self._thread.start()

    def know(self, call: Callable[[], Roll | None], hosts: Mapping[int, str], store_host: str | None) -> None:
        """How to ask all hosts, and which rank is on which, as far as known."""
        self._call, self._hosts, self._store_host = call, hosts, store_host

    def beat(self) -> None:
        """Once a second, on the Pulse."""
        if self._mates is None or not self._seconds:
            return
        if time.monotonic() - self._met_at >= MEET_SECONDS:
            self._met_at = time.monotonic()
            self._mates.meet()
        stalled = self._look_at_pending()
        if stalled:
            stalls = [one.pending for one in stalled]
            self._told.noticed(stalls)
            self._stalls = stalls
            self._wanted.set()

    def last_look(self) -> None:
        """Before the end, once there are no more beats: what went on since the last one is told."""
        if self._mates is not None and self._seconds:
            self._look_at_pending()

    def _look_at_pending(self) -> Sequence[Stalled]:
        now = time.monotonic_ns()
        stalled, over = self._watch.look(self._pending(now), now)
        for one in stalled:
            self._outlet.stall(one)
        for ended in over:
            self._outlet.over(ended)
            said = self._told.over(ended)
            if said is not None:
                self._outlet.ended(ended, said)
        return stalled

    def look_closer(self) -> None:
        """Have what takes time looked at."""
        self._closer = True
        self._wanted.set()

    def failed(self) -> None:
        """A collective raised on this rank, on this thread.

        What is to be written is written on our own thread: a signal's handler may come over this one, and wait for the
        Pulse, which would wait for whatever lock this one had.
        """
        if self._thread is None or not self._thread.is_alive() or self._leaving.is_set():
            return
        if self._seconds and self._failed_at is None:
            self._failed_at = time.monotonic()
        self._written.clear()
        self._raised = True
        self._wanted.set()
        self._written.wait(WRITTEN_SECONDS)

    def leave(self, timeout: float) -> None:
        """Be done; where a collective raised, say first who was the reason. At most `timeout` seconds."""
        self._leaving.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def abandon(self) -> None:
        """In a forked child: the turn is the parent's, and ends with the parent's socket alone."""
        if self._turn_held is not None:
            self._turn_held.close()

    def _run(self, keep: Callable[[], None]) -> None:
        leave_signals_to_others()
        while not self._leaving.is_set() or self._failed_at is not None:
            self._wanted.wait()
            self._wanted.clear()
            if self._raised:
                self._raised = False
                safely("keep where a collective raised")(self._outlet.raised)()
                self._written.set()
            if self._closer:
                self._closer = False
                safely("look closer at what is under way")(self._look_closer)()
            if self._failed_at is not None:
                ask_at = self._failed_at + AFTER_ERROR_SECONDS
                if not self._leaving.wait(max(0.0, ask_at - WRITTEN_BEFORE_SECONDS - time.monotonic())):
                    safely("keep what became of a collective that raised")(keep)()
                self._leaving.wait(max(0.0, ask_at - time.monotonic()))
                self._ask_why(())
                self._failed_at = None
            elif self._stalls and not self._leaving.is_set():
                stalls, self._stalls = self._stalls, ()
                self._ask_why(stalls)

    @safely("find out who is waited for")
    def _ask_why(self, stalls: Sequence[Pending]) -> None:
        if not self._told.judge(stalls) and stalls:
            return  # they went on before there was time
        where = None
        try:
            where = self._ask(stalls)
        finally:
            for over, said in self._told.judged(where):
                self._outlet.ended(over, said)

    def _ask(self, stalls: Sequence[Pending]) -> Where | None:
        """Say who is waited for; gives the call that this was said of."""
        with self._turn() as mine:
            if not mine or self._said_lately(TELL_AGAIN * self._seconds if stalls else ECHO_SECONDS):
                return None
            # On a group with a short time-out of its own it is a stall before that.
            threshold = min([round(self._seconds * SECOND), *(one.limit for one in stalls)])
            for _ in range(TRIES):
                verdict = self._judge(threshold)
                if verdict is not None:
                    self._outlet.verdict(verdict)
                    return verdict.where
                if self._leaving.wait(BETWEEN_TRIES_SECONDS):
                    return None
            if stalls and self._unheard:
                warn_once(
                    "a collective has waited too long, and nobody can be said to be the reason, for nothing is "
                    f"heard of {in_words(self._unheard)}: is ddtrace-pytorch switched on in all ranks?"
                )
            return None

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Whether it is this process' turn to ask; while it is, it is no other's on this host.

        An abstract Unix socket: it goes with the process, and leaves nothing behind.
        """
        name = "\0ddtrace-pytorch-" + hashlib.sha256(self._place.encode()).hexdigest()[:32]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
            self._turn_held = held
            try:
                held.bind(name)
            except OSError:
                yield False
            else:
                yield True

    def _said_lately(self, seconds: float) -> bool:
        """Whether a rank of this host has said it in the last so many seconds."""
        assert self._mates is not None
        since = self._now() - round(seconds * SECOND)
        return any(state.told_at >= since for state in self._mates.states().values() if state.told_at)

    def _judge(self, threshold: int) -> Verdict | None:
        since = self._now()
        verdict, states = self._look(threshold)
        for _ in range(LOOKS):
            if verdict is None or not may_change(verdict, states, since):
                break
            leaves = self._leaving.is_set()
            time.sleep(BETWEEN_LOOKS_SECONDS)
            newer, states = self._look(threshold)
            verdict = newer or verdict
            if leaves:
                # Where all end, it is told afterwards by whoever reads what they were in.
                open_yet = verdict is not None and is_seen_in_part(verdict) and may_change(verdict, states, since)
                return None if open_yet else verdict
        return verdict

    def _look(self, threshold: int) -> tuple[Verdict | None, Mapping[int, RankState]]:
        """What is to be said as things stand, and how they do."""
        assert self._mates is not None
        call, expected = self._call, range(self._world_size)
        self._unheard = ()
        roll = call() if call is not None else Roll(self._mates.states())
        if roll is None:
            return None, {}
        if call is None:
            # It isn't known which ranks are on other hosts until all have said so.
            self._unheard = [rank for rank in expected if rank not in roll.states]
            if self._unheard:
                return None, {}
        verdict = judge(
            roll.states,
            expected,
            self._now(),
            threshold=threshold,
            hosts=self._hosts,
            store_host=self._store_host,
        )
        return verdict, roll.states
