"""Who is in a collective right now, thread by thread."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtrace_pytorch.collectives.composites import Composite
    from ddtrace_pytorch.ledger import Cell


_serials = itertools.count(1)


class Slot:
    """One thread's: what it is in (None: nothing), since when on the monotonic clock, in ns, and with which first
    argument (`subject`; mostly a tensor or a list of them, and never kept beyond the call). `address`: of memory that
    outlives the process, where the part in C writes the same (0: there is none). `waits`: the asynchronous call that it
    waits for in `Work.wait`, its number on the group, and since when.

    What a thread calls while its slot is taken is part of that call: torch.function modes and tensor subclasses enter
    a function twice, and `*_object` functions call others.
    """

    __slots__ = ("__weakref__", "address", "call", "started", "subject", "waits")

    def __init__(self) -> None:
        self.call: Cell | Composite | None = None
        self.started = 0
        self.subject: Any = None
        self.address = 0
        self.waits: tuple[Cell, int, int] | None = None


class InFlight:
    """All slots. The wrappers read ``local.slot`` themselves and ask for a :meth:`new_slot` where there is none."""

    def __init__(self) -> None:
        self.local: Any = threading.local()
        self.serial = next(_serials)
        self._slots: list[weakref.ref[Slot]] = []

    def new_slot(self) -> Slot:
        """This thread's slot, made at its first collective; it goes with the thread."""
        slot = self.local.slot = Slot()
        self._slots.append(weakref.ref(slot, self._slots.remove))
        return slot

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
