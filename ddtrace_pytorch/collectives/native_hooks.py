"""The collectives that no Python wrapper issued: those of DistributedDataParallel, functional and compiled ones.

From 2.14 on a process group calls hooks before it issues anything, on the thread that issues. A hook costs every call
some half a microsecond, so there is one only, and it returns at once where a wrapper is already counting the call. It
runs inside the user's call: what it raises, they would get.
"""

from __future__ import annotations

import atexit
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from ddtrace_pytorch.border import pass_on, safely
from ddtrace_pytorch.collectives.in_flight import InFlight, Slot
from ddtrace_pytorch.collectives.sizes import for_others, total
from ddtrace_pytorch.collectives.surface import BY_NATIVE_NAME, SCATTERS
from ddtrace_pytorch.ledger import Cell, Group, How, Ledger


class Issued(Protocol):
    """What torch tells a hook; its `name` says no more than what family of operations it is of."""

    input_tensors: list[Any]
    output_tensors: list[Any]
    root: int


# The operation in the table's spelling, and the bytes of its message; None where they can't be told.
Told = tuple[str, int | None]


def _all_reduce(issued: Issued, here: Group) -> Told:
    tensors = issued.input_tensors
    return ("all_reduce", tensors[0].nbytes) if len(tensors) == 1 else ("all_reduce_coalesced", total(tensors))


def _all_gather(issued: Issued, here: Group) -> Told:
    own, everybodys = issued.input_tensors, issued.output_tensors
    if len(everybodys) == len(own):
        name = "all_gather_into_tensor" if len(own) == 1 else "all_gather_into_tensor_coalesced"
    else:
        name = "all_gather" if len(own) == 1 else "all_gather_coalesced"
    return name, total(everybodys)


def _reduce_scatter(issued: Issued, here: Group) -> Told:
    everybodys = issued.input_tensors
    if len(everybodys) == len(issued.output_tensors):
        name = "reduce_scatter_tensor" if len(everybodys) == 1 else "reduce_scatter_tensor_coalesced"
    else:
        name = "reduce_scatter"
    return name, total(everybodys)


def _all_to_all(issued: Issued, here: Group) -> Told:
    sent = issued.input_tensors
    if len(sent) > 1:
        return "all_to_all", for_others(sent, here)
    # The splits aren't told. Where as much is received as is sent they are taken to be even.
    size = sent[0].nbytes
    return "all_to_all_single", size - size // here.size if size == issued.output_tensors[0].nbytes else None


def _gather(issued: Issued, here: Group) -> Told:
    if here.rank != issued.root:
        return "gather", 0
    parts = issued.output_tensors
    if len(parts) == here.size:
        return "gather", for_others(parts, here)
    return "gather", total(parts) - total(issued.input_tensors)


def _scatter(issued: Issued, here: Group) -> Told:
    return "scatter", for_others(issued.input_tensors, here) if here.rank == issued.root else 0


def _recv(issued: Issued, here: Group) -> Told:
    return "recv", total(issued.output_tensors)


_TOLD_APART: dict[str, Callable[[Issued, Group], Told]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "recv": _recv,
}

_COALESCED_SCATTERS = f"{SCATTERS}_coalesced"

# Not messages: making one group out of another, and memory for one-sided access.
_NOT_NUMBERED = ("split", "new_window")


class Family(NamedTuple):
    """How calls of one of torch's names for hooks are read; `numbered`: as :class:`~ddtrace_pytorch.ledger.Cell`."""

    name: str
    numbered: bool
    read: Callable[[Issued, Group], Told]


def family(native: str) -> Family:
    """The family of torch's `native` name; one that is not in the table goes by that name."""
    row = BY_NATIVE_NAME.get(native.lower())
    name = row.name if row is not None else native.lower()
    numbered = row.numbered if row is not None else name not in _NOT_NUMBERED
    return Family(name, numbered, _TOLD_APART.get(name) or (lambda issued, here: (name, total(issued.input_tensors))))


def exist(bindings: Any) -> bool:
    """Whether this torch's process groups have hooks; `bindings` is ``torch._C._distributed_c10d``."""
    return hasattr(bindings.ProcessGroup, "register_pre_hook")


class _Standing:
    """What a hook of ours on a process group looks at, for as long as the group lives: whom to tell, if anybody."""

    __slots__ = ("count", "local", "new_slot")

    def __init__(self) -> None:
        self.stand_aside()

    def stand_aside(self) -> None:
        """Tell nobody. The hook finds every call to be in good hands, as those of a wrapper are."""
        self.local = _BUSY
        self.new_slot: Callable[[], Slot] = lambda: _BUSY.slot
        self.count: Callable[[Any], None] = lambda issued: None

    def hook(self) -> Callable[[Any], None]:
        def hook(issued: Any) -> None:
            try:
                slot = self.local.slot
            except AttributeError:
                slot = self.new_slot()
            if slot.call is None:
                try:
                    self.count(issued)
                except Exception as error:
                    complain(error)

        return hook


# In place of a session's threads and their slots: all of them taken.
_BUSY: Any = SimpleNamespace(slot=SimpleNamespace(call=True))

# Torch keys hooks by a number that everybody picks, and the later one wins.
_ID = random.SystemRandom().getrandbits(62)

# Torch walks through a group's hooks without a lock, even the interpreter's: taking one out, or exchanging it, while
# another thread is on its way through them is a use after free. So a hook of ours is put on a group once and stays
# until the group's end, or the process'; sessions come and go behind it.
_standing: weakref.WeakKeyDictionary[Any, _Standing] = weakref.WeakKeyDictionary()


def take_off(process_group: Any) -> None:
    """Take our hook off a process group that is at its end: nobody may be issuing anything on it.

    One that is kept alive beyond the interpreter's end (by a Work, a reducer) and then drops a Python function makes
    the process abort.
    """
    if _standing.pop(process_group, None) is not None:
        process_group.unregister_pre_hook(_ID)


@safely("take the hooks off the process groups")
def take_off_all() -> None:
    """The same for all of them."""
    for process_group in list(_standing):
        take_off(process_group)


class NativeHooks:
    """What the hooks tell one session, of each process group it is told to add."""

    def __init__(self, bindings: Any, ledger: Ledger, in_flight: InFlight) -> None:
        self._ledger = ledger
        self._in_flight = in_flight
        names = {int(member): name for name, member in bindings.HookOpName.__members__.items()}
        # A list, because looking up one of these names in a dictionary takes three times as long.
        self._families = [family(names.get(number, "unknown")) for number in range(max(names) + 1)]
        atexit.unregister(take_off_all)
        atexit.register(take_off_all)

    def add(self, process_group: Any) -> None:
        """Count what is issued on `process_group` from now on.

        The first time, not while a collective is being issued on it: torch may come across half a hook.
        """
        here = self._ledger.group(process_group)
        if here is None:
            return
        self._in_flight.follow(here)
        standing = _standing.get(process_group)
        if standing is None:
            standing = _standing[process_group] = _Standing()
            process_group.register_pre_hook(_ID, standing.hook())
        standing.count = self._counting(here)
        standing.new_slot = self._in_flight.new_slot
        standing.local = self._in_flight.local  # from here on it counts

    def remove(self) -> None:
        """Count no more. The hooks stay, and stand aside."""
        for standing in tuple(_standing.values()):
            if standing.local is self._in_flight.local:  # else another session's by now
                standing.stand_aside()

    def _counting(self, here: Group) -> Callable[[Any], None]:
        families, cells = self._families, dict[str, Cell]()

        def find(operation: str, numbered: bool) -> Cell | None:
            process_group = here.process_group() if here.process_group is not None else None
            if process_group is None:
                return None
            cell = self._ledger.cell(operation, How.NATIVE, numbered, process_group)
            if cell is not None:
                cells[operation] = cell
            return cell

        def count(issued: Any) -> None:
            name, numbered, read = families[issued.name]
            try:
                operation, size = read(issued, here)
            except Exception as error:  # a tensor without a size, such as a sparse one
                pass_on(error)
                operation, size = name, None
            cell = cells.get(operation) or find(operation, numbered)
            if cell is None:
                return
            if size is None:
                size = 0
                cell.unsized += 1
            # Straight-line, as in the wrappers: see ddtrace_pytorch.ledger. There is no time to put into a bucket.
            cell.buckets[0] += 1
            cell.bytes += size
            if operation == _COALESCED_SCATTERS:
                here.scattered += len(issued.input_tensors) - 1
            if numbered:
                here.number(cell, size)

        return count


@safely("count a collective that torch issued by itself")
def complain(error: Exception) -> None:
    """Say so, once. What counts isn't made safe as a whole, because that takes as long as the counting."""
    raise error
