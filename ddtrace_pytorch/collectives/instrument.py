"""Puts the wrappers in the place of torch's functions, for the life of one session, and takes them out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtrace_pytorch import compiler, in_place, plain_numbers
from ddtrace_pytorch.border import safely, warn_for_host
from ddtrace_pytorch.collectives import (
    c_wrappers,
    composites,
    native_hooks,
    point_to_point,
    wrappers,
)
from ddtrace_pytorch.collectives.composites import Composite
from ddtrace_pytorch.collectives.group_lives import Ended, GroupLives
from ddtrace_pytorch.collectives.groups import TorchGroups
from ddtrace_pytorch.collectives.in_flight import InFlight
from ddtrace_pytorch.collectives.listening import BATCH, Listener, Listening
from ddtrace_pytorch.collectives.native_hooks import NativeHooks
from ddtrace_pytorch.collectives.surface import OPERATIONS, Kind, Operation, release_of
from ddtrace_pytorch.collectives.work import Waits
from ddtrace_pytorch.ledger import How, Ledger


class Instrument:
    """The instrumented functions; `in_flight` tells who is in a collective right now."""

    def __init__(
        self,
        torch: Any,
        ledger: Ledger,
        groups: TorchGroups,
        lives: GroupLives,
        forced: str = "auto",
        wraps: bool = False,
    ) -> None:
        """`wraps`: there are other functions of torch that had to be wrapped."""
        self.in_flight = InFlight()
        self._torch = torch
        # Of numbers, as positions number them.
        self.dtypes = tuple(str(one).removeprefix("torch.") for one in c_wrappers.dtypes(torch))
        self._distributed = torch.distributed
        self._bindings = torch._C._distributed_c10d
        self._release = release_of(torch.__version__)
        self._ledger = ledger
        self._groups = groups
        self._lives = lives
        self._forced = forced
        self._may_use_c = plain_numbers.exist and forced != "python"
        self._waits = Waits(torch.distributed.distributed_c10d.Work, self.in_flight, self._may_use_c)
        self._track = self._waits.track()
        self._listening = Listening(ledger)
        self._hooks: NativeHooks | None = None
        self._undo: list[Callable[[], None]] = []
        self._undo_listening: list[Callable[[], None]] = []
        self._wraps = wraps

    @property
    def in_use(self) -> str:
        """The value of ``pytorch.instrument``: ``in_place``, ``python`` (that without the part in C) or ``wrapt``, with
        ``+hooks`` where there are; or ``hooks``."""
        if self._forced == "hooks" and self._hooks is not None:
            return "hooks"
        alone = "wrapt" if self._wraps else "in_place" if self._may_use_c else "python"
        return alone + ("+hooks" if self._hooks is not None else "")

    def install(self) -> None:
        """Instrument every function of the table that this torch has, and every process group, also those to come."""
        if plain_numbers.part is plain_numbers.Part.OTHER:
            warn_for_host(
                "collectives are counted in Python, at twice the cost, because the part in C was built for another "
                f"version; {plain_numbers.BUILD_ANEW}"
            )
        safely("prepare to count in C")(c_wrappers.prepare)(self._torch)
        safely("keep out of the compiler's sight")(compiler.leave_package_uncompiled)()
        if self._forced in ("auto", "hooks"):
            self._use_hooks()
        self._undo.append(self._lives.follow(self._born, self._leave, self._enter_making))
        for process_group in self._groups.all():
            self._meet(process_group)
        for operation in self._operations():
            # Hooks don't tell of those that torch leaves out of its sequence numbers.
            if self._forced != "hooks" or operation.kind is Kind.UNNUMBERED:
                safely(f"instrument {operation.function}")(self._instrument)(operation)
        if self._wraps:
            self._undo += point_to_point.allow_proxies(self._distributed)

    def _use_hooks(self) -> None:
        if native_hooks.exist(self._bindings):
            self._hooks = NativeHooks(self._bindings, self._ledger, self.in_flight)
        elif self._forced == "hooks":
            self._forced = "auto"
            warn_for_host("DD_PYTORCH_INSTRUMENT=hooks needs torch 2.14 or later; using 'auto'")

    @safely("look who makes a process group")
    def _enter_making(self, name: str, among: Any, over: list[Ended]) -> None:
        """The ranks of the group `among` (None: of the world) wait for each other where a group is made: this one is in
        that from now on, until what `over` gets is called. It is no collective, and counted as none."""
        slot = self.in_flight.slot()
        if slot.call is not None or not self._distributed.is_initialized():
            return
        cell = self._ledger.cell(name, How.WAITED, False, among or None)
        if cell is None:
            return
        whole = Composite(cell)

        @safely("look who has made a process group")
        def leave(error: BaseException | None) -> None:
            if slot.call is not whole:
                return
            try:
                if error is not None:
                    self._ledger.on_failure(cell, error)
            finally:  # a signal's handler may raise in there
                slot.call = None

        # First: one may raise between any two lines of this.
        over.append(leave)
        slot.started = whole.started
        slot.call = whole

    @safely("get to know a process group")
    def _meet(self, process_group: Any) -> None:
        if self._hooks is not None:
            self._hooks.add(process_group)
        else:
            self._ledger.group(process_group)

    @safely("get to know a new process group")
    def _born(self, process_group: Any) -> None:
        self._groups.born(process_group)
        self._meet(process_group)
        here = self._ledger.group(process_group)
        if here is not None:
            # The Pulse may have met it before torch knew its ranks.
            here.ranks = self._groups.ranks(process_group)

    @safely("take the hook off a process group")
    def _leave(self, process_group: Any | None) -> None:
        if process_group is None:
            native_hooks.take_off_all()
        else:
            native_hooks.take_off(process_group)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of each call from now on; see :mod:`~ddtrace_pytorch.collectives.listening`."""
        self._listening.listeners += (listener,)
        if not self._undo_listening:
            for operation in (*self._operations(), BATCH):
                if operation.kind is not Kind.COALESCING:  # a block, not a call; those inside of it are heard
                    safely(f"listen to {operation.function}")(self._listen_to)(operation)

    def unlisten(self, listener: Listener) -> None:
        """Tell `listener` no more; with the last one the layer goes."""
        self._listening.listeners = tuple(one for one in self._listening.listeners if one is not listener)
        if not self._listening.listeners:
            while self._undo_listening:
                self._undo_listening.pop()()

    def remove(self) -> None:
        if self._hooks is not None:
            safely("have the hooks of process groups stand aside")(self._hooks.remove)()
        for undo in (self._undo_listening, self._undo):
            while undo:
                undo.pop()()
        self._waits.remove()

    def _operations(self) -> list[Operation]:
        return [one.for_release(self._release) for one in OPERATIONS if one.in_release(self._release)]

    def _instrument(self, operation: Operation) -> None:
        around = self._around(operation)
        in_c = around.in_c if isinstance(around, wrappers.Leaf) and self._may_use_c else None
        undo, how = in_place.place(self._distributed, operation.function, around, self._forced, in_c)
        self._undo += undo
        self._wraps |= how == "wrapt"

    def _listen_to(self, operation: Operation) -> None:
        around = self._listening.around(operation)
        undo, _ = in_place.place(self._distributed, operation.function, around, self._forced)
        self._undo_listening += undo

    def _around(self, operation: Operation) -> in_place.Around:
        if operation.kind is Kind.OBJECTS:
            return composites.objects(operation, self._ledger, self.in_flight)
        if operation.kind is Kind.COALESCING:
            return composites.coalescing(operation, self._ledger, self.in_flight, self._track)
        public = getattr(self._distributed.distributed_c10d, operation.function, None)
        return wrappers.Leaf(operation, public, self._ledger, self.in_flight, self._track)
