"""Puts the wrappers in the place of torch's functions, for the life of one session, and takes them out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.collectives import composites, in_place, wrappers
from ddtrace_pytorch.collectives.groups import TorchGroups
from ddtrace_pytorch.collectives.in_flight import InFlight
from ddtrace_pytorch.collectives.listening import Listener, Listening
from ddtrace_pytorch.collectives.surface import OPERATIONS, Kind, Operation, release_of
from ddtrace_pytorch.collectives.work import Waits
from ddtrace_pytorch.ledger import Ledger


class Instrument:
    """The instrumented functions; `in_flight` tells who is in a collective right now."""

    def __init__(self, torch: Any, ledger: Ledger, groups: TorchGroups, forced: str = "auto") -> None:
        self.in_flight = InFlight()
        self._distributed = torch.distributed
        self._release = release_of(torch.__version__)
        self._ledger = ledger
        self._groups = groups
        self._forced = forced
        self._waits = Waits(torch.distributed.distributed_c10d.Work, self.in_flight)
        self._listening = Listening(ledger)
        self._undo: list[Callable[[], None]] = []
        self._undo_listening: list[Callable[[], None]] = []
        self.in_use = "wrapt" if forced == "wrapt" else "in_place"

    def install(self) -> None:
        """Instrument every function of the table that this torch has, and get to know the groups there are."""
        for process_group in self._groups.all():
            safely("get to know a process group")(self._ledger.group)(process_group)
        for operation in self._operations():
            safely(f"instrument {operation.function}")(self._instrument)(operation)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of each call from now on; see :mod:`~ddtrace_pytorch.collectives.listening`."""
        self._listening.listeners += (listener,)
        if not self._undo_listening:
            for operation in self._operations():
                if operation.kind is Kind.COALESCING:
                    continue  # a block, not a call; those inside of it are heard
                undo, _ = in_place.place(
                    self._distributed, operation.function, self._listening.around(operation), self._forced
                )
                self._undo_listening += undo

    def unlisten(self, listener: Listener) -> None:
        """Tell `listener` no more; with the last one the layer goes."""
        self._listening.listeners = tuple(one for one in self._listening.listeners if one is not listener)
        if not self._listening.listeners:
            while self._undo_listening:
                self._undo_listening.pop()()

    def remove(self) -> None:
        for undo in (self._undo_listening, self._undo):
            while undo:
                undo.pop()()
        self._waits.remove()

    def _operations(self) -> list[Operation]:
        return [operation for operation in OPERATIONS if operation.in_release(self._release)]

    def _instrument(self, operation: Operation) -> None:
        undo, how = in_place.place(self._distributed, operation.function, self._around(operation), self._forced)
        self._undo += undo
        if how == "wrapt":
            self.in_use = "wrapt"

    def _around(self, operation: Operation) -> in_place.Around:
        if operation.kind is Kind.OBJECTS:
            return composites.objects(operation, self._ledger, self.in_flight)
        if operation.kind is Kind.COALESCING:
            return composites.coalescing(operation, self._ledger, self.in_flight, self._waits.track)
        return wrappers.leaf(operation, self._ledger, self.in_flight, self._waits.track)
