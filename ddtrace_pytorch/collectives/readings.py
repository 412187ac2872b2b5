"""What torch counts on each process group, read again and again beside what came through our wrappers."""

from __future__ import annotations

import threading
import time

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.collectives import coverage
from ddtrace_pytorch.collectives.composites import Composite
from ddtrace_pytorch.collectives.coverage import Coverage, History, Reading
from ddtrace_pytorch.collectives.group_lives import MAKING
from ddtrace_pytorch.collectives.groups import TorchGroups, launched
from ddtrace_pytorch.collectives.in_flight import InFlight
from ddtrace_pytorch.ledger import Group, Ledger

# In between, a thread that was about to count a call does so.
MOMENT_SECONDS = 0.001
# How long a look waits for another one to end.
LOOK_SECONDS = 0.5


class Readings:
    """A :class:`~ddtrace_pytorch.collectives.coverage.History` of each group that was ever looked at."""

    def __init__(self, ledger: Ledger, groups: TorchGroups, in_flight: InFlight) -> None:
        self._ledger = ledger
        self._groups = groups
        self._in_flight = in_flight
        self._histories: dict[Group, History] = {}
        self._looking = threading.Lock()

    def of(self, here: Group) -> History | None:
        return self._histories.get(here)

    def coverage(self, here: Group) -> Coverage:
        """By the last look at `here`."""
        history = self._histories.get(here)
        read = history.latest if history is not None else None
        return read.coverage() if read is not None else Coverage(None, here.calls)

    def unseen_in(self, here: Group, operation: str) -> int:
        """How many collectives of `here` torch has issued itself, now that the calling thread is in one of `operation`.

        By itself, without waiting for another look.
        """
        history = self._histories.get(here)
        alive = here.process_group() if here.process_group is not None else None
        if history is None or alive is None:
            return 0
        under_way = coverage.under_way(operation, here, history.backend)
        now = coverage.reading(here, history.backend, launched(alive), history.before, under_way)
        # What torch refuses it doesn't count.
        return max(now.unseen, history.latest.unseen if history.latest is not None else 0)

    @property
    def any_launched(self) -> bool:
        """Whether torch has counted a collective, by the last look at each group."""
        latest = [history.latest for history in tuple(self._histories.values())]
        return any(one is not None and one.launched for one in latest)

    def forget(self, here: Group) -> None:
        self._histories.pop(here, None)

    @safely("look at the process groups")
    def look(self, patience: float = LOOK_SECONDS) -> None:
        """Read torch's own counts, while the groups are still there; `patience` in seconds, for another look to end."""
        # Not for ever: a signal handler may come here while its own thread is here already.
        if not self._looking.acquire(timeout=patience):
            return
        try:
            self._meet_groups()
            first = self._read()
            time.sleep(MOMENT_SECONDS)
            for here, second in self._read().items():
                self._histories[here].add(first.get(here, second), second)
        finally:
            self._looking.release()

    def _meet_groups(self) -> None:
        # A method of its own, so that no local variable keeps a group alive that is being destroyed.
        for process_group in self._groups.all():
            self._ledger.group(process_group)

    def _read(self) -> dict[Group, Reading]:
        found = {}
        for here in tuple(self._ledger.groups):
            alive = here.process_group() if here.process_group is not None else None
            if alive is None:
                continue
            history = self._histories.get(here)
            if history is None:
                # Not what the user called it: where no backend was named torch says "undefined".
                history = self._histories[here] = History(str(alive.name()).lower(), here.launched_before)
            # The number first, and what is under way before what was counted: so no call is taken for an unseen one.
            number = launched(alive)
            del alive
            under_way = self._under_way(here, history.backend)
            found[here] = coverage.reading(here, history.backend, number, history.before, under_way)
        return found

    def _under_way(self, here: Group, backend: str) -> int:
        many = 0
        for slot in self._in_flight.taken():
            call = slot.call
            if isinstance(call, Composite):
                # Of a coalescing block the group isn't known yet, nor whether it is counted as one; a transfer of
                # objects is two; making a group launches nothing of its own.
                if call.cell is None or (call.cell.group is here and call.cell.operation not in MAKING):
                    many += max(2, call.many)
            elif call is not None and call.group is here:
                many += coverage.under_way(call.operation, here, backend)
        return many
