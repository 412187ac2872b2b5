"""Who is in a collective right now, thread by thread."""

from __future__ import annotations

import threading
from _thread import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from ddtrace_pytorch.collectives.seats import Seats
from ddtrace_pytorch.plain_numbers import SlotNumbers

if TYPE_CHECKING:
    from ddtrace_pytorch.collectives.composites import Composite
    from ddtrace_pytorch.ledger import Cell, Group


# Of how many threads it is written where they are, and how much each has for that; of how many groups what was issued.
PLACES, PLACE_BYTES = 64, 64
GROUPS, GROUP_BYTES = 64, 32


class Awaited(NamedTuple):
    """An asynchronous call of `cell` that somebody waits for `since` then, in ns on the monotonic clock. `key`: its
    number on the group; `peer`: of a transfer, the other rank. What isn't there is 0 and None."""

    cell: Cell
    key: int
    peer: int | None
    since: int = 0


class Slot(SlotNumbers):
    """One thread's: what it is in (None: nothing), and since when on the monotonic clock, in ns.

    `waits`: the asynchronous call that it waits for in `Work.wait`. `address`: of memory that outlives the process,
    where the part in C writes what the thread enters (0: there is none).

    What a thread calls while its slot is taken is part of that call: torch.function modes and tensor subclasses enter
    a function twice, and `*_object` functions call others.
    """

    __slots__ = ("__weakref__", "call", "thread", "waits")

    def __init__(self) -> None:
        self.call: Cell | Composite | None = None
        self.started = 0
        self.thread = get_ident()
        self.address = 0
        self.waits: Awaited | None = None


class InFlight:
    """All slots. The wrappers read ``local.slot`` themselves and ask for a :meth:`new_slot` where there is none."""

    def __init__(self) -> None:
        self.local: Any = threading.local()
        self._slots = Seats(PLACES, PLACE_BYTES)
        self._groups = Seats(GROUPS, GROUP_BYTES, PLACES * PLACE_BYTES)

    def new_slot(self) -> Slot:
        """This thread's slot, made at its first collective; it goes with the thread."""
        # In one step: a signal's handler may have made one in the meantime, which the part in C then has a pointer to.
        made = Slot()
        slot: Slot = self.local.__dict__.setdefault("slot", made)
        if slot is made:
            self._slots.give(slot)
        return slot

    def follow(self, here: Group) -> None:
        """Have the part in C write what torch itself issues on the group."""
        self._groups.give(here)

    def write_to(self, memory: int) -> None:
        """Have the part in C write what each thread enters to the address `memory`, where :data:`PLACES` times
        :data:`PLACE_BYTES` are ours, and behind these, for the groups, :data:`GROUPS` times :data:`GROUP_BYTES`; 0: no
        more."""
        self._slots.write_to(memory)
        self._groups.write_to(memory)

    def slot(self) -> Slot:
        """This thread's slot."""
        found: Slot | None = getattr(self.local, "slot", None)
        return self.new_slot() if found is None else found

    def slots(self) -> list[Slot]:
        """Those of all threads that there are."""
        return self._slots.owners()

    def taken(self) -> list[Slot]:
        """The slots of threads that are in a collective."""
        return [slot for slot in self.slots() if slot.call is not None]
