"""What the callers of asynchronous collectives really wait: `Work.wait`, for works that a wrapper of ours saw made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from ddtrace_pytorch.border import leave_no_trace, pass_on, safely
from ddtrace_pytorch.collectives import c_wrappers
from ddtrace_pytorch.collectives.in_flight import Awaited, InFlight
from ddtrace_pytorch.in_place import stand_aside
from ddtrace_pytorch.ledger import Cell
from ddtrace_pytorch.weakly import weakly


class Waits:
    """Knows which cell a Work belongs to, without keeping the Work alive.

    `Work.wait` is instrumented when the first Work is to be followed: blocking collectives call it too, and a job that
    has no others should not pay for that.
    """

    def __init__(self, work_class: Any, in_flight: InFlight, in_c: bool) -> None:
        """`in_c`: by the part in C, where there is one, at a fraction of the cost."""
        self._class = work_class
        self._in_flight = in_flight
        self._pending: dict[weakref.ref[Any], tuple[Cell, int, int | None]] = {}
        self._undo: Callable[[], None] | None = None
        self._removed = False
        self._installing = threading.Lock()
        # What is to be done before the first is followed.
        self._first = [weakly(self._begin)]
        self._in_c = in_c

    def track(self) -> Callable[..., object]:
        """What the wrappers are to call with each Work; it isn't kept here."""
        if self._in_c and c_wrappers.tracker is not None:
            tracker: Callable[..., object] = c_wrappers.tracker(self._pending, self._first)
            return tracker
        return safely("follow an asynchronous collective")(self._track)

    def _track(self, work: Any, cell: Cell, peer: int | None = None) -> None:
        """`work` is that of a call that is about to be counted in `cell`; `peer`: of a transfer, the other rank."""
        for begin in tuple(self._first):
            begin()
        key = cell.group.calls + 1 if cell.numbered else 0
        self._pending[weakref.ref(work, self._forget)] = (cell, key, peer)

    def _begin(self) -> None:
        with self._installing:
            if self._undo is None and not self._removed:
                self._undo = self._install()
            self._first.clear()

    def _forget(self, gone: weakref.ref[Any]) -> None:
        self._pending.pop(gone, None)

    def remove(self) -> None:
        self._removed = True
        self._pending.clear()
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _install(self) -> Callable[[], None]:
        kind, in_flight, pending = self._class, self._in_flight, self._pending
        entry = kind.__dict__["wait"]
        original = kind.wait
        reference = weakref.ref

        def wait(self: Any, *arguments: Any, **named: Any) -> Any:
            # Blocking collectives come here too, from inside.
            slot = in_flight.slot()
            of = None
            if slot.call is None:
                try:
                    of = pending.pop(reference(self), None)
                except Exception as error:
                    pass_on(error)
                    # It is of a class of the user's own, without a hash: none of those that are followed.
            if of is None:
                try:
                    return original(self, *arguments, **named)
                except BaseException as error:
                    leave_no_trace(error)
                    raise
            cell, key, peer = of
            started = monotonic_ns()
            slot.waits = Awaited(cell, key, peer, started)
            try:
                return original(self, *arguments, **named)
            except BaseException as error:
                cell.ledger.on_failure(cell, error)
                leave_no_trace(error)
                raise
            finally:
                slot.waits = None
                took = monotonic_ns() - started
                cell.waits += 1
                cell.waited += took

        wait.__doc__ = original.__doc__
        # Of the type that C++ gave it: what takes methods of that type for opaque (Dynamo does) still will.
        ours = type(entry)(wait) if type(entry).__name__ == "instancemethod" else wait
        kind.wait = ours

        def undo() -> None:
            if kind.__dict__.get("wait") is ours:
                kind.wait = entry
            else:
                stand_aside(wait, original)

        return undo
