"""Where this rank is, kept where it outlives the process and read by the others when one of them stands still.

Owns, for a session: the state that is written each beat, what earlier attempts left to be told, the watch over
collectives that take too long, and this rank's part in the roll call.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import proxy

from ddtrace_pytorch import agent
from ddtrace_pytorch.aftermath import Successor
from ddtrace_pytorch.border import safely, warn
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives.observer import Collectives
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.identity.topology import Nodes
from ddtrace_pytorch.ledger import Cell
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.stalls import places, telling
from ddtrace_pytorch.stalls.keeper import Keeper
from ddtrace_pytorch.stalls.last_words import Identity
from ddtrace_pytorch.stalls.mates import Mates
from ddtrace_pytorch.stalls.roll import GroupState, RankState
from ddtrace_pytorch.stalls.roll_call import RollCall
from ddtrace_pytorch.stalls.standstill import Standstill
from ddtrace_pytorch.stalls.verdict import Verdict, Where
from ddtrace_pytorch.stalls.watch import SECOND, Outcome, Over, Pending, Stalled, outcome
from ddtrace_pytorch.threads import leave_signals_to_others
from ddtrace_pytorch.weakly import weakly
from ddtrace_pytorch.whereabouts import CLOSER_NS, Whereabouts

# Of a close: for what is being told of ranks that died before.
RECOVERY_SECONDS = 0.5
# The same, where a collective raised: to say who was the reason.
REASON_SECONDS = 1.0
# Collectives may raise in a loop: how often it is written down.
RAISED_SECONDS = 1.0
# What that takes at most where the process is told to end.
CLOSE_LOOK_SECONDS = 0.5
# Of the time that a collective may take: when what torch issued by itself is looked at closer.
CLOSER = 0.5


class Lookout:
    """One session's; no method raises."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        span: RankSpan,
        exporter: Exporter,
        collectives: Collectives | None,
        whereabouts: Whereabouts,
        gpu: Callable[[], str | None],
        world_size: int,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._span = span
        self._exporter = exporter
        self._collectives = collectives
        self._whereabouts = whereabouts
        self._gpu = gpu
        self._roots = places.roots(settings.state_dir)
        state, span_as_it_is = weakly(self._state), weakly(self._open_span)
        self._keeper = Keeper(self._roots, state, span_as_it_is, whereabouts.legend, whereabouts.write_to)
        self._successor = Successor(settings, self._roots)
        self._standstill = Standstill(
            whereabouts.pending, weakly(self._look_closer), proxy(self), clock.now, settings.stall_seconds, world_size
        )
        self._mates: Mates | None = None
        self._roll_call: RollCall | None = None
        self._left = False
        self._raised_at = -RAISED_SECONDS
        self._ends_badly = False
        # When that was raised which is known to be caught.
        self._caught = 0
        if collectives is not None:
            collectives.ledger.on_failure = safely("keep where a collective raised")(weakly(self._failed))

    def begin(self, whose: Identity) -> None:
        """From now on this rank's state is kept, and the states of its host's ranks are read."""
        self._keeper.begin(whose)
        self._successor.begin(whose.job, whose.incarnation)
        self._mates = Mates(self._roots, whose.job, whose.incarnation, whose.host)
        # A rank by itself waits for nobody.
        if self._collectives is not None and whose.world_size > 1:
            self._standstill.begin(self._mates, f"{whose.job}\0{whose.incarnation}")

    def know(self, nodes: Nodes, store: Any, place: str, rank: int) -> None:
        """Which rank is on which node; `store`: the process group's, `place`: no other session in it has the same."""
        if self._mates is None or self._collectives is None or self._left or not self._settings.stall_seconds:
            return
        numbers = {name: number for number, name in enumerate(dict.fromkeys(nodes.names)) if name is not None}
        node_of = [numbers.get(name) if name is not None else None for name in nodes.names]
        hosts = {at: name.rpartition("/")[0] or name for at, name in enumerate(nodes.names) if name is not None}
        self._roll_call = RollCall(store, place, rank, node_of, self._mates.states)
        self._roll_call.open()
        # With torchrun as without: it is where rank 0 is.
        self._standstill.know(self._roll_call.call, hosts, hosts.get(0))

    def beat(self) -> dict[str, Any]:
        """Once a second, on the Pulse; gives what the run log's record of the beat has of it."""
        self._look_at_recorder()
        state = self._keep()
        self._standstill.beat()
        groups = state.groups if state is not None else {}
        return {"groups": {name: _brief(here) for name, here in groups.items()}}

    @safely("look at torch's flight recorder")
    def _look_at_recorder(self) -> None:
        patience = round(CLOSER * self._settings.stall_seconds * 1e9)
        if self._collectives is None or not patience:
            return
        now = time.monotonic_ns()
        self._collectives.unfinished.beat(now)
        if self._collectives.unfinished.suspicious(now, patience):
            self._standstill.look_closer()
        watch = "degraded" if self._collectives.watched_in_part else "full"
        self._span.learn({"pytorch.stall_watch": watch})

    def keep(self) -> None:
        """Have what is new on disk before the next beat: the open span, what this rank calls for the first time, or
        that it has caught what a collective raised."""
        self._keep()

    def _keep(self) -> RankState | None:
        state = self._keeper.beat()
        raised = state.raised if state is not None else None
        if raised is not None and raised.caught and raised.at != self._caught:
            self._caught = raised.at
            safely("keep that an exception was caught")(self._note_state)("caught")
        return state

    def leave_store(self, deadline: Deadline) -> None:
        """No thread of ours may be in the process group's store from now on."""
        if not self._left:
            self._look_at_recorder()
        self._left = True
        if self._roll_call is not None:
            self._roll_call.leave(deadline.left())

    def say_why(self, deadline: Deadline, badly: bool) -> None:
        """Before the end, by an exception if that is `badly`: where a collective raised, who was the reason."""
        self._ends_badly = badly
        self._standstill.leave(deadline.left(REASON_SECONDS))

    @safely("tell what went on after all")
    def last_look(self) -> None:
        """Once there are no more beats."""
        self._standstill.last_look()

    def end(self, span: SpanRecord, error: BaseException | None) -> None:
        """The rank span is finished, by `error` if there is one, and about to be sent."""
        by_exception = span.tags.get("pytorch.end_reason") == "exception"
        if by_exception and self._whereabouts.is_seen_in_part:
            self._look_closer_for(CLOSE_LOOK_SECONDS)
        safely("find where an exception came from")(self._whereabouts.ends_by)(error)
        if by_exception:
            safely("keep where an exception came from")(self._note_state)("exception")
        # Whoever finds it where it could not be sent any more tells it as it is here.
        self._keeper.end(agent.as_sent(span))

    def forget(self) -> None:
        """All is told."""
        self._keeper.forget()

    def close(self, deadline: Deadline) -> None:
        self._successor.leave(deadline.left(RECOVERY_SECONDS))

    def resume(self) -> None:
        """The process outlived its end."""
        self._ends_badly = False
        self._whereabouts.ends_by(None)
        self._whereabouts.closer_ns = CLOSER_NS
        self._keeper.resume()

    def abandon(self) -> None:
        """In a forked child: all of it is the parent's."""
        self._keeper.abandon()
        self._standstill.abandon()
        if self._roll_call is not None:
            self._roll_call.abandon()

    def stall(self, stalled: Stalled) -> None:
        """A collective takes too long on this rank."""
        self._note_state("stall")
        self._event("stall", stalled.pending, waited_s=stalled.waited / SECOND, times=stalled.times)

    def over(self, over: Over) -> None:
        """One that took too long came to its end."""
        self._event("stall over", over.pending, took_s=over.took / SECOND, how=self._outcome(over.pending).value)

    def ended(self, over: Over, said: Where) -> None:
        """The same, where this rank has said that somebody is missed in `said`."""
        how = self._outcome(over.pending)
        error = f" {self._whereabouts.error_of(over.pending)}" if how is Outcome.RAISED else ""
        known = how is not Outcome.UNKNOWN
        warn(telling.ended(over.pending, said, f"{how.value}{error}" if known else None, over.took))

    def _outcome(self, pending: Pending) -> Outcome:
        raised = self._whereabouts.error_of(pending) is not None
        return outcome(pending, raised, self._ends_badly, self._whereabouts.step)

    def _event(self, name: str, pending: Pending, **facts: float | str) -> None:
        said = {"op": pending.operation, "group": pending.label, "group_name": pending.group, "key": pending.key}
        self._exporter.put({"type": "event", "ts": self._clock.now(), "name": name, "tags": said | facts})

    def verdict(self, verdict: Verdict) -> None:
        """Say, send and write down who is the reason."""
        # First: another rank of this host that is about to say it looks there.
        self._whereabouts.told_at = self._clock.now()
        self._keeper.beat()
        warn(telling.message(verdict))
        self._exporter.put(telling.record(verdict))
        start, facts = verdict.at - verdict.waited, telling.facts(verdict)
        self._exporter.put_span(
            self._span.child(telling.STALL, verdict.kind.value, start, verdict.waited, facts, error=verdict.is_error)
        )
        self._exporter.wake()

    def _failed(self, cell: Cell, error: BaseException) -> None:
        self._whereabouts.failed(cell, error)
        now = time.monotonic()
        if now - self._raised_at >= RAISED_SECONDS:
            self._raised_at = now
            self._standstill.failed()

    def raised(self) -> None:
        """Write down where a collective raised, before its caller goes on."""
        self._keeper.beat()
        if self._whereabouts.is_seen_in_part:
            self._look_closer()
            self._keeper.beat()
        self._note_state("raised")

    @safely("keep where this rank was told to end")
    def told_to_end(self, ends: bool) -> None:
        """A signal ends the process, or may (`ends`: whether that is sure): write down where it is."""
        if self._collectives is None or self._left:
            return
        self._whereabouts.closer_ns = 0
        if self._whereabouts.is_seen_in_part:
            self._look_closer_for(CLOSE_LOOK_SECONDS)
        self._note_state("signal")
        if not ends:
            self._whereabouts.closer_ns = CLOSER_NS

    def _note_state(self, why: str) -> None:
        self._exporter.put({"type": "state", "ts": self._clock.now(), "why": why, "state": self._state().plain()})

    def _look_closer(self) -> None:
        leave_signals_to_others()
        safely("look closer at what is under way")(self._whereabouts.look_closer)()

    @safely("look closer at what is under way")
    def _look_closer_for(self, seconds: float) -> None:
        looking = threading.Thread(target=self._look_closer, name="ddtrace_pytorch.recorder", daemon=True)
        looking.start()
        looking.join(seconds)

    def _state(self) -> RankState:
        return self._whereabouts.state(self._gpu(), os.getpid())

    def _open_span(self) -> SpanRecord:
        return agent.as_sent(self._span.snapshot(self._clock.now()))


def _brief(here: GroupState) -> list[Any]:
    now = here.current
    return [here.entered, here.completed, now.operation if now is not None else None, now.since if now else 0]
