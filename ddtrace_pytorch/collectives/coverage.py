"""What torch launched on a group against what our wrappers issued, and what is known of the rest. Pure.

Torch's number of a group counts launches; ours counts calls that came back. Three things lie between them: operations
that torch counts and we number otherwise (:data:`_EXTRA`), calls that are under way, and what no wrapper of ours saw.
Only a *settled* reading, taken while nothing was under way, tells the last one to the unit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddtrace_pytorch.collectives.flight_recorder import Dump, Entry
from ddtrace_pytorch.collectives.surface import BY_NATIVE_NAME, OPERATIONS, SCATTERS
from ddtrace_pytorch.ledger import Group, How
from ddtrace_pytorch.spans import Fact

# Settled readings kept of a group since it was last told of: one a beat.
READINGS_HELD = 128


def _one(here: Group) -> int:
    return 1


def _two(here: Group) -> int:
    return 2


def _monitored(here: Group) -> int:
    # A message each way between the first rank and each other one.
    return 2 * (here.size - 1) if here.rank == 0 else 2


def _all_but_one(here: Group) -> int:
    return here.size - 1


# By backend and operation: what one call adds to torch's number beyond what it adds to ours. Gloo's as seen on torch
# 2.13 and 2.14 with two and three ranks. NCCL is believed to count P2P apart.
_EXTRA: Mapping[str, Mapping[str, Callable[[Group], int]]] = {
    "gloo": {
        "send": _one,
        "recv": _one,
        "isend": _one,
        "irecv": _one,
        "send_object_list": _two,
        "recv_object_list": _two,
        "monitored_barrier": _monitored,
        "reduce_scatter": _all_but_one,  # one all_reduce for each rank's part
    },
    "nccl": {},
}

# By backend: operations that the recorder knows under another name than that of their row.
_RECORDED_AS: Mapping[str, Mapping[str, str]] = {
    "gloo": {
        "all_gather_into_tensor": "all_gather",
        "all_to_all_single": "all_to_all",
        "reduce_scatter": "all_reduce",
        "reduce_scatter_tensor": "all_reduce",
    },
}

# What functions on objects are made of: operation, how often, and its bytes (None: all, or what the others leave).
_SIZE_BYTES = 8
_MADE_OF: Mapping[str, Callable[[int], Sequence[tuple[str, int, int | None]]]] = {
    "all_gather_object": lambda size: (("all_gather", 2, None),),
    "gather_object": lambda size: (("all_gather", 1, _SIZE_BYTES * size), ("gather", 1, None)),
    "broadcast_object_list": lambda size: (("broadcast", 2, None),),
    "scatter_object_list": lambda size: (("broadcast", 1, _SIZE_BYTES), ("scatter", 2, None)),
}

_NUMBERED_APART = {operation.name for operation in OPERATIONS if not operation.numbered}


class Tally(NamedTuple):
    """`calls` operations that moved `bytes`; of `unsized` of them the bytes aren't known."""

    calls: int = 0
    bytes: int = 0
    unsized: int = 0

    def __add__(self, other: Tally) -> Tally:  # type: ignore[override]
        return Tally(self.calls + other.calls, self.bytes + other.bytes, self.unsized + other.unsized)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.calls - other.calls, self.bytes - other.bytes, self.unsized - other.unsized)


class Reading(NamedTuple):
    """A group at one moment: torch's `number`, how many collectives that makes since we came (`launched`), how many
    came through our wrappers (`seen`), those by the recorder's names (`issued`), and how many more may be `under_way`.
    `number` and `launched` are None where the backend doesn't count, or counts we don't know what.
    """

    number: int | None
    launched: int | None
    seen: int
    issued: Mapping[str, Tally]
    under_way: int

    @property
    def unseen(self) -> int:
        return 0 if self.launched is None else max(0, self.launched - self.seen - self.under_way)

    def coverage(self) -> Coverage:
        if self.launched is None:
            return Coverage(None, self.seen)
        # What is under way is neither seen nor unseen yet.
        return Coverage(min(self.launched, self.seen + self.unseen), self.seen)


def reading(here: Group, backend: str, number: int | None, before: int | None, under_way: int) -> Reading:
    """`here` now; `number` was read of torch before this, and `before` when we came."""
    extra = _EXTRA.get(backend)
    launched = None if number is None or before is None else number - before
    seen = here.calls
    issued: dict[str, Tally] = defaultdict(Tally)
    for cell in tuple(here.cells.values()):
        calls, moved, unsized = cell.count, cell.bytes, cell.unsized
        # Through torch's hooks both reduce_scatters look alike; the one of a list is the rare one.
        listed = cell.operation == "reduce_scatter" and cell.how is not How.NATIVE
        parts = here.size if listed and backend == "gloo" else 1
        for name, tally in _recorded(cell.operation, backend, here.size, parts, Tally(calls, moved, unsized)):
            issued[name] += tally
        if launched is None or not calls:
            continue
        if extra is None:
            launched = None if cell.operation in _NUMBERED_APART else launched
        elif cell.operation in extra and (listed or cell.operation != "reduce_scatter"):
            launched -= calls * extra[cell.operation](here)
    if backend == "gloo" and here.scattered:
        # Of coalesced reduce_scatters it counts, and records, each tensor.
        launched = None if launched is None else launched - here.scattered
        issued[_RECORDED_AS[backend][SCATTERS]] += Tally(here.scattered)
    return Reading(number, launched, seen, dict(issued), under_way)


def under_way(operation: str, here: Group, backend: str) -> int:
    """How much a call of `operation` that is under way may have added to torch's number already."""
    extra = _EXTRA.get(backend, {}).get(operation)
    return 1 + (extra(here) if extra is not None else 0)


def _recorded(operation: str, backend: str, size: int, parts: int, tally: Tally) -> Iterable[tuple[str, Tally]]:
    """What the recorder has of `tally` calls of `operation`, each done in so many `parts`."""
    if operation in _NUMBERED_APART:
        return
    made_of = _MADE_OF.get(operation)
    if made_of is None:
        name = operation.removesuffix("_coalesced")
        name = _RECORDED_AS.get(backend, {}).get(name, name)
        yield name, tally._replace(calls=tally.calls * parts)
        return
    left = tally.bytes
    for name, times, moved in made_of(size):
        part = left if moved is None else moved * tally.calls
        left -= part
        yield name, Tally(tally.calls * times, part, tally.unsized)


@dataclass(frozen=True)
class Coverage:
    """How many collectives torch counted on a group (None: it can't be said), and how many of them were seen."""

    launched: int | None
    seen: int

    def facts(self) -> dict[str, Fact]:
        if self.launched is None:
            return {"collective.group_seen": self.seen, "collective.coverage": "unknown"}
        share = min(1.0, self.seen / self.launched) if self.launched else 1.0
        return {
            "collective.group_launched": self.launched,
            "collective.group_seen": self.seen,
            "collective.group_coverage": share,
        }


class Window(NamedTuple):
    """`calls` operations to tell of that weren't seen, and the settled readings from which it is known of some of them
    what they were: any two of these make an interval, the last one is its end."""

    calls: int
    readings: tuple[Reading, ...]


class History:
    """The readings of one group since what was last told of it. `backend` is the one that counts, `before` its number
    when we came."""

    def __init__(self, backend: str, before: int | None) -> None:
        self.backend = backend
        self.before = before
        self.latest: Reading | None = None
        self._start = None if before is None else Reading(before, 0, 0, {}, 0)
        self._settled: deque[Reading] = deque(maxlen=READINGS_HELD)
        self._told = 0
        self._held_back = False

    def add(self, first: Reading, second: Reading) -> None:
        """Two readings a moment apart. One that finds a thread between its call and its count tells of one operation
        too many, but the other one then doesn't."""
        self.latest = first if first.unseen <= second.unseen else second
        if first == second and not first.under_way and first.launched is not None:
            last = self._settled[-1] if self._settled else self._start
            if last is None:
                self._start = first
            elif last.number != first.number:
                self._settled.append(first)

    def take(self, last: bool = False) -> Window:
        """What there is to tell now; it counts as told.

        Where nothing has settled, it waits for the next time: what is told before can't be sized later. But only once.
        """
        readings: tuple[Reading, ...] = ()
        if self._settled:
            readings = tuple(self._settled) if self._start is None else (self._start, *self._settled)
            self._settled.clear()
            self._start = readings[-1]
        upto = readings[-1] if readings else self.latest
        calls = 0 if upto is None else max(0, upto.unseen - self._told)
        self._held_back = bool(calls and not readings and not self._held_back and not last)
        if self._held_back:
            return Window(0, ())
        self._told += calls
        if calls and not readings:
            self._start = None  # what is told now must not be in the next interval
        return Window(calls, readings)


class Unseen(NamedTuple):
    """`calls` operations of the recorder's `name` that no wrapper issued; the size of `sized` of them is known, and is
    `bytes`. Without a name: what they were isn't known."""

    name: str | None
    calls: int
    sized: int
    bytes: int


def attribute(here: Group, window: Window, dump: Dump) -> list[Unseen]:
    """What the operations of `window` were, as far as the recorder still knows; never more than it does."""
    known = _known(here, window.readings, dump) if window.calls and len(window.readings) > 1 else []
    rest = window.calls - sum(one.calls for one in known)
    if rest < 0:
        return [Unseen(None, window.calls, 0, 0)]
    return [*known, Unseen(None, rest, 0, 0)] if rest else known


def _known(here: Group, readings: tuple[Reading, ...], dump: Dump) -> list[Unseen]:
    entries, complete_from = _of_group(here.name, dump.entries)
    end = readings[-1]
    begin = next((one for one in readings[:-1] if (one.number or 0) >= complete_from), None)
    if begin is None:
        return []
    found: dict[str, Tally] = defaultdict(Tally)
    for entry in entries:
        if (begin.number or 0) < entry.number <= (end.number or 0) and not entry.p2p:
            name = operation_of(entry)
            size = size_of(entry, name, here.size)
            found[name] += Tally(1, size or 0, size is None)
    for name, late in end.issued.items():
        found[name] -= late - begin.issued.get(name, Tally())
    if any(tally.calls < 0 for tally in found.values()):
        return []  # something went by another name than we think
    if sum(tally.calls for tally in found.values()) > end.unseen - begin.unseen:
        return []
    return [
        Unseen(name, calls, 0, 0) if unsized or moved < 0 else Unseen(name, calls, calls, moved)
        for name, (calls, moved, unsized) in sorted(found.items())
        if calls
    ]


def _of_group(name: str, entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """The entries of the group called `name`, newest first, and from which of torch's numbers on they are complete."""
    mine: list[Entry] = []
    evicted: dict[str, bool] = {}
    for entry in entries:
        evicted.setdefault(entry.backend, entry.record > 0)
    for entry in reversed(entries):
        if entry.group != name:
            continue
        if mine and entry.number > mine[-1].number:
            return mine, 0  # of a group of an earlier life, with the same name
        mine.append(entry)
    if not mine:
        return mine, 0 if not any(evicted.values()) else 1 << 62
    return mine, mine[-1].number if evicted[mine[-1].backend] else 0


def operation_of(entry: Entry) -> str:
    """The name of the row that `entry` is of; its own where there is none."""
    name = entry.name.partition(" ")[0]
    row = BY_NATIVE_NAME.get(name)
    return name if row is None else row.name


def size_of(entry: Entry, operation: str, size: int) -> int | None:
    """The message size of `entry` as the table defines it, in a group of `size` ranks; None where it can't be told."""
    if operation.startswith("all_gather"):
        return None if entry.input_bytes is None else entry.input_bytes * size
    if operation == "barrier":
        return 0
    # For the others it takes the slice that stays on the rank, or who the root is.
    return entry.input_bytes if operation.startswith(("all_reduce", "broadcast", "reduce")) else None


class Completions(NamedTuple):
    """How long `calls` operations took from being issued to being found complete; times in ns."""

    calls: int
    total: int
    longest: int

    def facts(self) -> dict[str, Fact]:
        return {
            "collective.completion_source": "flight_recorder",
            "collective.completion_ms.count": self.calls,
            "collective.completion_ms.mean": self.total / self.calls / 1e6,
            "collective.completion_ms.max": self.longest / 1e6,
        }


def completions(group: str, entries: Iterable[Entry], since: int, until: int) -> dict[str, Completions]:
    """By operation, those of `group` that were found complete after `since` and not after `until` (ns since the epoch).

    Torch's watchdog finds them by looking, so a time is an upper bound. Gloo never writes one down.
    """
    found: dict[str, Completions] = {}
    for entry in entries:
        if entry.group == group and entry.created and since < entry.completed <= until:
            took = entry.completed - entry.created
            name = operation_of(entry)
            calls, total, longest = found.get(name, Completions(0, 0, 0))
            found[name] = Completions(calls + 1, total + took, max(longest, took))
    return found
