"""Who is in a collective right now, thread by thread."""

from __future__ import annotations

import threading
import weakref
from _thread import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from ddtrace_pytorch.plain_numbers import SlotNumbers

if TYPE_CHECKING:
    from ddtrace_pytorch.collectives.composites import Composite
    from ddtrace_pytorch.ledger import Cell


# Of how many threads it is written where they are, and how much each has for that.
PLACES, PLACE_BYTES = 64, 64
NOWHERE = -1


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
        self._slots: dict[weakref.ref[Slot], int] = {}
        self._memory = 0
        self._places = list(reversed(range(PLACES)))

    def new_slot(self) -> Slot:
        """This thread's slot, made at its first collective; it goes with the thread."""
        # In one step: a signal's handler may have made one in the meantime, which the part in C then has a pointer to.
        made = Slot()
        slot: Slot = self.local.__dict__.setdefault("slot", made)
        if slot is not made:
            return slot
        try:
            place = self._places.pop()
        except IndexError:
            place = NOWHERE
        self._slots[weakref.ref(slot, self._forget)] = place
        # Without a call, where the memory could be given back between looking and writing.
        slot.address = self._memory + place * PLACE_BYTES if self._memory and place != NOWHERE else 0
        return slot

    def _forget(self, gone: weakref.ref[Slot]) -> None:
        place = self._slots.pop(gone)
        if place != NOWHERE:
            self._places.append(place)

    def write_to(self, memory: int) -> None:
        """Have the part in C write what each thread enters to the address `memory`, where :data:`PLACES` times
        :data:`PLACE_BYTES` are ours; 0: no more."""
        self._memory = memory
        for reference, place in tuple(self._slots.items()):
            slot = reference()
            if slot is not None:
                slot.address = memory + place * PLACE_BYTES if memory and place != NOWHERE else 0

    def slot(self) -> Slot:
        """This thread's slot."""
        found: Slot | None = getattr(self.local, "slot", None)
        return self.new_slot() if found is None else found

    def slots(self) -> list[Slot]:
        """Those of all threads that there are."""
        return [slot for reference in tuple(self._slots) if (slot := reference()) is not None]

    def taken(self) -> list[Slot]:
        """The slots of threads that are in a collective."""
        return [slot for slot in self.slots() if slot.call is not None]
