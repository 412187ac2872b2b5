"""Collectives that torch's C++ side issues by itself: DDP's reducer, functional and compiled collectives, direct calls
of a process group's methods. From torch 2.14 on a group tells of each in a hook.

The functions are instrumented in place all the same: a hook costs more than a wrapper, fires when a call is issued and
not when it is over, and does not know the user's line. So here only what no wrapper on this thread issued is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.collectives.in_flight import InFlight
from ddtrace_pytorch.collectives.sizes import for_others, total
from ddtrace_pytorch.ledger import Cell, Group, How, Ledger

# Any number that nobody else registers their hooks under.
HOOK_ID = 0xDD7
COUNTED, P2P = True, False


def _inputs(event: Any, here: Group) -> int:
    return total(event.input_tensors)


def _outputs(event: Any, here: Group) -> int:
    return total(event.output_tensors)


def _inputs_for_others(event: Any, here: Group) -> int:
    tensors = event.input_tensors
    # One tensor stands for a slice for each rank; how it is split is not told, so: evenly.
    return for_others(tensors, here) if len(tensors) > 1 else total(tensors) * (here.size - 1) // here.size


def _gathered(event: Any, here: Group) -> int:
    return for_others(event.output_tensors, here) if event.root == here.rank else 0


def _scattered(event: Any, here: Group) -> int:
    return for_others(event.input_tensors, here) if event.root == here.rank else 0


def _nothing(event: Any, here: Group) -> int:
    return 0


# torch's word -> the operation of the table, the bytes of its message, and whether it is among the group's numbers.
EVENTS: dict[str, tuple[str, Callable[[Any, Group], int], bool]] = {
    "ALLREDUCE": ("all_reduce", _inputs, COUNTED),
    "BROADCAST": ("broadcast", _inputs, COUNTED),
    "REDUCE": ("reduce", _inputs, COUNTED),
    "ALLGATHER": ("all_gather", _outputs, COUNTED),
    "REDUCE_SCATTER": ("reduce_scatter", _inputs, COUNTED),
    "ALLTOALL": ("all_to_all", _inputs_for_others, COUNTED),
    "GATHER": ("gather", _gathered, COUNTED),
    "SCATTER": ("scatter", _scattered, COUNTED),
    "BARRIER": ("barrier", _nothing, COUNTED),
    "SEND": ("send", _inputs, P2P),
    "RECV": ("recv", _outputs, P2P),
}


class NativeHooks:
    """The hooks of all process groups that are :meth:`watch`-ed, until :meth:`remove`."""

    def __init__(self, ledger: Ledger, in_flight: InFlight) -> None:
        self._ledger = ledger
        self._in_flight = in_flight
        self._watched: list[weakref.ref[Any]] = []

    @staticmethod
    def exist(process_group_class: Any) -> bool:
        """Whether this torch has them."""
        return hasattr(process_group_class, "register_pre_hook")

    def watch(self, process_group: Any) -> None:
        """Count what is issued on `process_group` from now on; a second time it changes nothing."""
        if any(one() is process_group for one in self._watched):
            return
        reference = weakref.ref(process_group)
        process_group.register_pre_hook(HOOK_ID, self._hook(reference))
        self._watched = [one for one in self._watched if one() is not None] + [reference]

    def remove(self) -> None:
        watched, self._watched = self._watched, []
        for reference in watched:
            process_group = reference()
            if process_group is not None:
                safely("take a hook out of a process group")(process_group.unregister_pre_hook)(HOOK_ID)

    def _hook(self, reference: weakref.ref[Any]) -> Callable[[Any], None]:
        local = self._in_flight.local
        cells: dict[Any, tuple[Cell, Callable[[Any, Group], int]] | None] = {}

        def count(event: Any) -> None:
            kind = event.name
            try:
                found = cells[kind]
            except KeyError:
                found = cells[kind] = self._cell(kind, reference())
            if found is None:
                return
            cell, size_of = found
            here = cell.group
            size = size_of(event, here)
            cell.buckets[0] += 1
            cell.bytes += size
            if cell.numbered:
                here.calls += 1

        count_safely = safely("count what a process group issued")(count)

        def hook(event: Any) -> None:
            # Of the calls that a wrapper made, which are most, only this much.
            try:
                if local.slot.call is not None:
                    return
            except AttributeError:
                pass  # a thread that never called a wrapper
            count_safely(event)

        return hook

    def _cell(self, kind: Any, process_group: Any) -> tuple[Cell, Callable[[Any, Group], int]] | None:
        name, size_of, numbered = EVENTS.get(kind.name, (kind.name.lower(), _nothing, P2P))
        cell = self._ledger.cell(name, How.NATIVE, numbered, process_group)
        return None if cell is None else (cell, size_of)
