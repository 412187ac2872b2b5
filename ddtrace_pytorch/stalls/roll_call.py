"""How every rank of a job is asked for its state, through the job's own store, when one of them stalls.

One or two ranks of each node listen (:mod:`ear`). The rank that finds a stall rings all nodes (:mod:`asking`), a
listener of each answers with the states of all ranks of its node, and the caller takes the answers away again. Nobody
uses the user's connection to the store but to say goodbye to the listeners, which waits for no reply.

Keys, all under ``ddtrace_pytorch/roll/<place>/``: ``ears`` and ``called``, removed by the last listener;
``ear/<node>/<0 or 1>``, removed by the listener that it rings for; ``answer/<roll>/<node>``, removed by the caller or,
where they came late, by the next one. Of a listener that was killed its ring stays, once.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtrace_pytorch.border import log, safely
from ddtrace_pytorch.stalls import sockets
from ddtrace_pytorch.stalls.answer import pack, unpack
from ddtrace_pytorch.stalls.asking import AGAIN_SECONDS, Asking, answer_key
from ddtrace_pytorch.stalls.connection import Board, Connection, bottom, pushes
from ddtrace_pytorch.stalls.ear import EARS, GOODBYE, Ear
from ddtrace_pytorch.stalls.roll import RankState
from ddtrace_pytorch.threads import leave_signals_to_others
from ddtrace_pytorch.weakly import weakly

EARS_PER_NODE = 2
# From the first word to the store to the roll, with all that is heard until then.
PATIENCE_SECONDS = 3.0
LEAVE_SECONDS = 0.8
# What all listeners of a job that have to look do together.
LOOKS_PER_SECOND = 80.0
_SHORTEST_PAUSE_SECONDS = 0.1
# What the second listener of a node leaves to the first: most rolls are over by then.
_SECOND_SECONDS = 0.3
# Callers of different nodes are this far apart, so that the second one finds the roll called.
_TURN_SECONDS = 0.01
_LAST_TURN_SECONDS = 1.0
# Of the descriptors that a process may have, the share that is left to the user.
_SPARE = 0.25
_OWN_DESCRIPTORS = 8


@dataclass(frozen=True)
class Roll:
    """The states that were heard, by rank. `silent_nodes` were rung and did not answer in time. Where the store itself
    does not answer, or nobody listens for lack of descriptors, `states` are this node's and none is called silent."""

    states: Mapping[int, RankState]
    silent_nodes: frozenset[int] = frozenset()
    store_answers: bool = True


class RollCall:
    """One rank's part in it, from opening to leaving. No method raises what the store raises."""

    def __init__(
        self,
        store: Any,
        place: str,
        rank: int,
        node_of: Sequence[int | None],
        states: Callable[[], dict[int, RankState]],
    ) -> None:
        """`store`: the process group's, held until :meth:`leave`. `place`: the same on all ranks and for no other
        session that this store's server serves. `node_of`: the node of each rank, None where it isn't known.
        `states`: of this node's ranks, read in a moment; called on threads of ours."""
        self._store: Any = store
        self._place = place
        self._rank = rank
        self._states = states
        self._node = node_of[rank]
        self._pushes = pushes(store)
        members: dict[int, int] = {}
        for node in node_of:
            if node is not None:
                members[node] = members.get(node, 0) + 1
        ears = EARS_PER_NODE
        if self._pushes:
            ears = affordable_ears(len(members), len(node_of), descriptors())
        self._rings = {
            node: [f"ear/{node}/{number}" for number in range(min(ears, ranks))] for node, ranks in members.items()
        }
        self._others = {node: rings for node, rings in self._rings.items() if node != self._node and rings}
        listeners = sum(map(len, self._rings.values()))
        self._pause = None if self._pushes else max(_SHORTEST_PAUSE_SECONDS, listeners / LOOKS_PER_SECOND)
        turns = min(_LAST_TURN_SECONDS, _TURN_SECONDS * len(members))
        self._turn = turns * list(members).index(self._node) / len(members) if self._node is not None else turns
        self._ear = self._own_ear(node_of)
        self._asking: Asking | None = None
        self._leaving = threading.Event()
        self._goodbye = threading.Thread(target=weakly(self._say_goodbye), name="ddtrace_pytorch.goodbye", daemon=True)

    def _own_ear(self, node_of: Sequence[int | None]) -> Ear | None:
        """This rank's, where it is one of the first of its node and the job is on several."""
        if self._node is None or not self._others:
            return None
        number = list(node_of[: self._rank]).count(self._node)
        rings = self._rings[self._node]
        if number >= len(rings):
            return None
        connection = Connection(self._store, self._place)
        return Ear(connection, rings[number], self._pause, number * _SECOND_SECONDS, self._answer)

    def open(self) -> None:
        """Begin to listen, where this rank is to and has the descriptors; returns at once."""
        if self._ear is None:
            return
        if len(os.listdir("/proc/self/fd")) + _OWN_DESCRIPTORS > (1 - _SPARE) * descriptors():
            log.debug("too few file descriptors are left to hear the roll called")
            self._ear = None
            return
        self._ear.thread.start()
        if self._pushes:
            # Now: in the functions that run at exit no thread can be started from Python 3.12 on.
            self._goodbye.start()

    def call(self) -> Roll | None:
        """Ask every node; None where another rank does, or did in the last :data:`AGAIN_SECONDS`.

        For a thread that may wait: one turn of up to 1 s and :data:`PATIENCE_SECONDS`, and where listeners look by
        themselves, one of their pauses. To be called by the first rank of its node that stalls and still beats.
        """
        if not self._others:
            return Roll(self._states())
        if self._leaving.wait(self._turn) or self._heard_lately():
            return None
        patience = PATIENCE_SECONDS + (self._pause or 0.0)
        if self._asking is not None:
            # It may be taking the last answers away; one that the store keeps is not joined by a second.
            self._asking.thread.join(patience)
            if self._asking.thread.is_alive():
                self._asking.connection.sever()
                return Roll(self._states(), store_answers=False)
        # A bit less for the nodes than for the store: what they said still has to be fetched.
        asking = Asking(Connection(self._store, self._place), self._rank, self._others, 0.8 * patience)
        self._asking = asking
        asking.thread.start()
        asking.done.wait(patience)
        if asking.called_by_another or self._leaving.is_set():
            return None
        if asking.answers is None:
            asking.connection.sever()
            return Roll(self._states(), store_answers=False)
        return self._roll(asking.answers)

    def _roll(self, answers: Mapping[int, bytes]) -> Roll:
        states: dict[int, RankState] = {}
        heard = set()
        for node, packed in answers.items():
            try:
                states |= unpack(packed)
                heard.add(node)
            except ValueError as error:
                log.debug("node %d gave no answer that can be read", node, exc_info=error)
        return Roll(states | self._states(), frozenset(self._others.keys() - heard))

    def _heard_lately(self) -> bool:
        heard = self._ear.heard_at if self._ear is not None else None
        return heard is not None and time.monotonic() - heard < AGAIN_SECONDS

    def _answer(self, board: Board, number: int) -> None:
        assert self._node is not None
        board.put({answer_key(number, self._node): pack(self._states())})

    def leave(self, timeout: float = LEAVE_SECONDS) -> None:
        """Be out of the store, before the group is destroyed and at exit; at most `timeout` seconds. Again: nothing.

        Where nobody answers, the threads' sockets are ended under them. One that even that doesn't bring back (it was
        never seen) is left where it is.
        """
        if self._leaving.is_set():
            return
        self._leaving.set()
        deadline = time.monotonic() + timeout
        asking = self._asking
        if asking is not None:
            asking.done.set()
        if self._ear is not None:
            self._ear.leave()
        if self._goodbye.is_alive():
            self._goodbye.join(timeout / 2)
        for one in (self._ear, asking):
            if one is None or not one.thread.is_alive():
                continue
            one.thread.join(max(0.0, deadline - timeout / 2 - time.monotonic()))
            while one.thread.is_alive() and time.monotonic() < deadline:
                # More than once: it may be between two tries to connect.
                one.connection.sever()
                one.thread.join(0.05)
        self._store = None

    @safely("let the roll call's listeners go")
    def _say_goodbye(self) -> None:
        leave_signals_to_others()
        self._leaving.wait()
        store, ear = self._store, self._ear
        if store is None or ear is None:
            return
        board = Board(store, self._place)
        if sockets.listens_on(bottom(store).port):
            self._dismiss_all(board)
        elif ear.thread.is_alive():
            board.put({ear.ring: GOODBYE})

    def _dismiss_all(self, board: Board) -> None:
        """The store goes with this process, and nobody can be called after that."""
        if board.add(EARS, 0) <= 0:
            return
        deadline = time.monotonic() + LEAVE_SECONDS / 2
        board.put({ring: GOODBYE for rings in self._rings.values() for ring in rings})
        while board.add(EARS, 0) > 0 and time.monotonic() < deadline:
            time.sleep(0.005)

    def abandon(self) -> None:
        """In a forked child: the connections and the threads are the parent's."""
        self._leaving.set()
        for one in (self._ear, self._asking):
            if one is not None:
                one.connection.forget()
        self._ear = self._asking = self._store = None


def affordable_ears(nodes: int, world_size: int, limit: float) -> int:
    """How many of each node may listen, so that a store host that may have `limit` descriptors keeps a quarter of
    them: each rank has one connection to it already."""
    for ears in range(EARS_PER_NODE, 0, -1):
        if world_size + ears * nodes + _OWN_DESCRIPTORS <= (1 - _SPARE) * limit:
            return ears
    return 0


def descriptors() -> float:
    """How many this process may have; the store's host is taken to have the same limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft)
