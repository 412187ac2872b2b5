"""Where this rank is right now: on each process group, and in its code. Read once a beat, from another thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives.composites import Composite
from ddtrace_pytorch.collectives.in_flight import Slot
from ddtrace_pytorch.ledger import Group, Ledger
from ddtrace_pytorch.stalls.roll import Call, GroupState

FRAMES = 20


def on_groups(ledger: Ledger, slots: Iterable[Slot], clock: Clock) -> dict[str, GroupState]:
    """Its place on each group, by torch's name: `slots` are those of the threads that are in a collective."""
    current: dict[Group, Call] = {}
    for slot in slots:
        call, started = slot.call, slot.started
        cell = call.cell if isinstance(call, Composite) else call
        if cell is not None:
            here = cell.group
            key = here.calls + 1 if cell.numbered else 0
            current.setdefault(here, Call(cell.operation, key, since=clock.from_monotonic(started)))
    return {here.name: _on_group(here, current.get(here)) for here in tuple(ledger.groups)}


def _on_group(here: Group, current: Call | None) -> GroupState:
    calls = here.calls
    return GroupState(
        name=here.name,
        label=here.label,
        ranks=here.ranks,
        backend=here.backend,
        entered=max(calls, current.key if current is not None else 0),
        completed=calls,
        current=current,
        recent=(),
    )


def frames_of_main_thread() -> tuple[str, ...]:
    """The innermost :data:`FRAMES`, each ``file:line function``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[str] = []
    while frame is not None and len(found) < FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)
