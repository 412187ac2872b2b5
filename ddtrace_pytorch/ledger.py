"""Exact totals of what a rank does, in constant memory. No torch in here.

A :class:`Cell` is one line of the ledger: one operation on one group, waited for or not. The training threads add to
it in straight-line code without a single call in between, which the interpreter never interrupts (a thread switch
happens at calls and backward jumps only), so totals are exact without a lock. The wrappers that do most of the adding
are generated (:mod:`ddtrace_pytorch.collectives.wrappers`) and have these lines inlined.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

from ddtrace_pytorch.histogram import BUCKETS, percentile
from ddtrace_pytorch.plain_numbers import RECENT, CellNumbers, GroupNumbers, LineNumbers, series
from ddtrace_pytorch.sampling import following, level_for
from ddtrace_pytorch.taking import all_of

NEVER = sys.maxsize

SAMPLES_A_BEAT = 20
# Notable calls (slow ones, or all in the modes that ask for it) held between two beats; beyond that they are counted.
NOTABLE_HELD = 4_096


class How(Enum):
    """How the calls of a cell were made, and so what their time means."""

    WAITED = "waited"  # the caller came back when it was complete (or, on a GPU, in the stream's order)
    ISSUED = "issued"  # the caller came back at once and may wait later
    NATIVE = "native"  # made by torch's C++ side, seen through the group's own hooks: no time


class Group(GroupNumbers):
    """One process group as far as the ledger cares; it never holds the process group itself.

    `name` is torch's, the same on every member; `label` what a person calls it (``dp``, ``world``); `ranks` the global
    ranks in the group's order; `calls` the number of collectives that came back on it, which all its ranks agree on;
    `recent` the last ones, two numbers each: that of the cell plus 1 (0: there was none), and the bytes, call n at 2n
    modulo twice :data:`RECENT`; `address`: of memory that outlives the process, where the part in C writes the last one
    that :meth:`number` counted (0: there is none); `sampled` the number of the next one to be recorded by itself, of
    which there were `samples` since the last beat; `scattered` by how many the tensors of coalesced reduce_scatters
    outnumber the calls.
    """

    __slots__ = (
        "__weakref__",
        "backend",
        "calls_at_beat",
        "cells",
        "crosses_nodes",
        "label",
        "launched_before",
        "level",
        "name",
        "process_group",
        "rank",
        "ranks",
        "recent",
        "samples",
        "scattered",
        "size",
        "timeout",
    )  # fmt: skip

    def __init__(self, name: str, label: str, backend: str, ranks: tuple[int, ...], rank: int) -> None:
        self.name = name
        self.label = label
        self.backend = backend
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.crosses_nodes: bool | None = None
        # After how many ns torch ends a collective itself.
        self.timeout: int | None = None
        # Without those that raised. What torch refuses (wrong arguments) is heard by no other rank, and may be tried
        # again. One that fails on its way (a peer that is gone or late) was issued, so torch counts it, on this rank
        # and perhaps not on others; but nothing can be told of the group after that, because everything on it fails.
        self.calls = 0
        self.address = 0
        self.recent = series(self, 2 * RECENT)
        self.scattered = 0
        self.sampled = 1
        self.level = 0
        self.samples = 0
        self.calls_at_beat = 0
        self.cells: dict[tuple[str, How], Cell] = {}
        self.process_group: weakref.ref[Any] | None = None
        # What torch had counted on it before we came.
        self.launched_before: int | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the process group was destroyed, and nobody holds it any more."""
        return self.process_group is not None and self.process_group() is None

    def leave_no_circle(self) -> None:
        """For a group that is gone, so that it goes at once: some trainings turn the garbage collector off."""
        for cell in self.cells.values():
            cell.buckets = list(cell.buckets)
        self.recent = list(self.recent)
        self.cells.clear()


@dataclass(frozen=True)
class Note:
    """One call worth telling of by itself. `started` on the monotonic clock, both times in ns; `code` and `instruction`
    say where the user's code made it, `step` in which step of the training (None: there is none)."""

    cell: Cell
    started: int
    took: int
    size: int
    key: int
    code: CodeType | None
    instruction: int
    step: int | None = None


class Sample(NamedTuple):
    """A call that all ranks record: its `number` on the group, `started` on the monotonic clock, both times in ns,
    `size` in bytes, and in which `step` of the training."""

    cell: Cell
    number: int
    started: int
    took: int
    size: int
    step: int | None


class Cell(CellNumbers):
    """Totals of one operation on one group, of calls made in one way. `numbered`: they are among the group's `calls`;
    no other cell of the ledger has its `number`.

    `time` and `slowest` in ns of the caller's time; `buckets[b]` counts calls of less than 2**b ns, and at least half
    of that; `waits` and `waited` are what callers of deferred calls then waited for them.
    """

    __slots__ = (
        "buckets",
        "errors",
        "group",
        "how",
        "ledger",
        "numbered",
        "operation",
        "slow",
        "slowest",
        "slowest_at",
        "slowest_code",
    )  # fmt: skip

    def __init__(self, ledger: Ledger, operation: str, group: Group, how: How, numbered: bool) -> None:
        self.ledger = ledger
        self.operation = operation
        self.group = group
        self.how = how
        self.numbered = numbered
        self.number = next(ledger.numbers)
        self.bytes = self.time = self.errors = self.unsized = 0
        self.buckets = series(self, BUCKETS)
        self.slowest = -1
        self.slowest_code: CodeType | None = None
        self.slowest_at = 0
        self.waits = self.waited = 0
        # A call longer than `slow` is told of by itself; one longer than `notable` is worth a look: the lesser of
        # `slow` and `slowest`.
        self.find_slow()

    @property
    def count(self) -> int:
        """How many calls there were; each is in one of the buckets."""
        return sum(self.buckets)

    def find_slow(self) -> None:
        """Say anew what is slow, by what has been counted."""
        self.slow = self.ledger.slow_for(self)
        self.notable = min(self.slow, self.slowest)

    def take_slowest(self) -> tuple[int, CodeType | None, int]:
        """The longest call since the last time (0: there was none), and the code and instruction that made it."""
        slowest, code, instruction = self.slowest, self.slowest_code, self.slowest_at
        self.slowest = self.notable = -1
        return max(slowest, 0), code, instruction

    def fail(self, error: BaseException) -> None:
        """Count a call that raised `error`."""
        self.errors += 1
        self.ledger.on_failure(self, error)

    def add(self, started: int, took: int, size: int, key: int = 0) -> None:
        """Count one call, from a place that isn't generated; `key` is its number on the group, if it has one."""
        bucket = took.bit_length()
        here = self.group
        self.buckets[bucket] += 1
        self.time += took
        self.bytes += size
        if took > self.notable or (self.numbered and key >= here.sampled):
            self.note(started, took, size, key)

    def note(self, started: int, took: int, size: int, key: int) -> None:
        """Look closer at a call that was longer than `notable`, or whose number was to be sampled."""
        here = self.group
        if self.numbered and key >= here.sampled:
            if key == here.sampled:
                here.samples += 1
                self.ledger.samples.append(Sample(self, key, started, took, size, self.ledger.step()))
            here.sampled = following(key, here.level) if here.samples < SAMPLES_A_BEAT else NEVER
        if took <= self.notable:
            return
        frame = users_frame(sys._getframe(2))
        code, instruction = (frame.f_code, frame.f_lasti) if frame is not None else (None, 0)
        slow = self.slow
        if took > self.slowest:
            self.slowest = took
            self.slowest_code = code
            self.slowest_at = instruction
            self.notable = slow if slow < took else took
        if took > slow:
            self.ledger.remember(Note(self, started, took, size, key, code, instruction, self.ledger.step()))


def times_of(cells: dict[Cell, None]) -> int:
    """The ns in the calls that `cells` have counted, and in waiting for them."""
    return sum([cell.time + cell.waited for cell in list(cells)])


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame outside of torch's and our own code, going outwards."""
    while frame is not None and _is_inside(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
    return frame


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in (
        "torch",
        "ddtrace_pytorch",
        "contextlib",
        "typing_extensions",
        "warnings",
        "wrapt",
    )


class Line(LineNumbers):
    """Where one wrapper looks its cells up: `default` is that of the default process group where none is given,
    `others` go by ``id(process group)``; `asked`, of which process group the part in C remembers what it found there,
    0 for none."""

    __slots__ = ("default", "others")

    def __init__(self) -> None:
        self.default: Cell | None = None
        self.others: dict[int, Cell] = {}
        self.asked = 0

    def put(self, identity: int, cell: Cell) -> None:
        self.others[identity] = cell
        self.asked = 0

    def drop(self, identity: int) -> None:
        self.others.pop(identity, None)
        self.asked = 0

    def clear(self) -> None:
        self.default = None
        self.others.clear()
        self.asked = 0


class Groups(Protocol):
    """What the ledger asks about process groups."""

    def actual(self, process_group: Any) -> Any:
        """`process_group`, or the default one for None."""

    def describe(self, process_group: Any) -> Group | None:
        """Who that is; None if this rank is not in it."""


class Ledger:
    """All cells of one session, and what was noted since the last beat.

    There is no lock, which a signal handler or a forked child could find taken: where two threads meet a group at once,
    ``setdefault`` decides. Nothing here keeps a process group alive. One that dies leaves every :class:`Line` at once,
    so that its id is never taken for that of its successor.
    """

    def __init__(
        self,
        groups: Groups,
        slow: int = NEVER,
        each: Callable[[Group], bool] = lambda here: False,
        times: Callable[[dict[Cell, None]], int] | None = None,
    ) -> None:
        """`slow` in ns: a call that takes longer, and eight times its operation's p99, is noted by itself; on groups
        that `each` is true of, every call is. `times`: faster than :func:`times_of`."""
        self.groups: list[Group] = []
        self.numbers = itertools.count()
        # The step under way; a session says it.
        self.step: Callable[[], int | None] = lambda: None
        # Told of each call that raises, on its thread, before its caller hears of it; must not raise.
        self.on_failure: Callable[[Cell, BaseException], object] = lambda cell, error: None
        # Told of each cell that is new; must not raise.
        self.on_new: Callable[[Cell], object] = lambda cell: None
        self.samples: deque[Sample] = deque(maxlen=1_024)
        self.notes: deque[Note] = deque()
        self.notes_lost = 0
        self._calls_of_gone = 0
        self._time_of_gone = 0
        self._timed: dict[Cell, None] = {}
        self._times = times or times_of
        self._slow = slow
        self._each = each
        self._ask = groups
        self._lines: dict[tuple[str, How], Line] = {}
        self._known: dict[int, Group] = {}
        self._closed = False

    def line(self, operation: str, how: How) -> Line:
        """Where the wrapper of `operation` looks up the cell of a process group; :meth:`cell` adds what is missing."""
        return self._lines.setdefault((operation, how), Line())

    def cell(self, operation: str, how: How, numbered: bool, process_group: Any) -> Cell | None:
        """The cell for a call on `process_group` (None: the default one), from now on in the line as well.

        None if this rank is not in the group, or the ledger is closed.
        """
        here = self.group(process_group)
        if here is None:
            return None
        found = here.cells.get((operation, how))
        if found is None:
            found = here.cells.setdefault((operation, how), Cell(self, operation, here, how, numbered))
            if how is not How.NATIVE:
                self._timed[found] = None
            self.on_new(found)
        line = self.line(operation, how)
        if process_group is None:
            line.default = found
        else:
            line.put(id(process_group), found)
        return found

    def group(self, process_group: Any) -> Group | None:
        """The group of `process_group` (None: the default one); None if this rank is not in it."""
        if self._closed:
            return None
        actual = self._ask.actual(process_group)
        known = self._known.get(id(actual))
        if known is None:
            met = self._ask.describe(actual)
            if met is None:
                return None
            met.process_group = weakref.ref(actual, _Farewell(self, id(actual), met))
            known = self._known.setdefault(id(actual), met)
            if known is met:
                self.groups.append(met)
        return known

    def slow_for(self, cell: Cell) -> int:
        """From how many ns on a call of `cell` is noted by itself."""
        if self._each(cell.group):
            return -1
        return max(self._slow, round(8 * percentile(cell.buckets, 0.99, NEVER))) if cell.count else self._slow

    def remember(self, note: Note) -> None:
        if len(self.notes) < NOTABLE_HELD:
            self.notes.append(note)
        else:
            self.notes_lost += 1

    def take_notes(self) -> tuple[list[Note], int]:
        """The calls noted since the last time, and how many more there were than could be held."""
        notes = all_of(self.notes)
        lost, self.notes_lost = self.notes_lost, 0
        return notes, lost

    def take_samples(self) -> list[Sample]:
        """The sampled calls since the last time."""
        return all_of(self.samples)

    def beat(self) -> None:
        """Once a second: how much to sample, and what is slow, by what has been counted."""
        groups = list(self.groups)
        busy = sum(here.calls > here.calls_at_beat for here in groups)
        for here in groups:
            calls, before = here.calls, here.calls_at_beat
            here.calls_at_beat = calls
            here.samples = 0
            if calls > before:
                here.level = level_for(calls - before, max(1, SAMPLES_A_BEAT // busy))
                here.sampled = following(here.calls, here.level)
            for cell in tuple(here.cells.values()):
                cell.find_slow()

    def close(self) -> None:
        """From here on nothing is counted."""
        self._closed = True
        for line in tuple(self._lines.values()):
            line.clear()
        self._known.clear()

    def forget(self, here: Group) -> None:
        """Drop a group that is gone, once its totals are told."""
        self.groups.remove(here)
        self._calls_of_gone += here.calls
        for cell in tuple(here.cells.values()):
            if self._timed.pop(cell, cell) is None:
                self._time_of_gone += cell.time + cell.waited
        here.leave_no_circle()

    def blocked(self) -> int:
        """The ns that callers have spent in collectives, and in waiting for them, on all threads together."""
        return self._time_of_gone + self._times(self._timed)

    def calls(self) -> int:
        """How many collectives there were, over all groups."""
        return self._calls_of_gone + sum(here.calls for here in tuple(self.groups))


class _Farewell:
    """Takes a process group that dies out of the ledger, whose owner may be gone before it."""

    def __init__(self, ledger: Ledger, identity: int, group: Group) -> None:
        self._ledger = weakref.ref(ledger)
        self._identity = identity
        self._group = group

    def __call__(self, _: object) -> None:
        # Runs wherever the last reference is dropped; each step is one that the interpreter does in one go.
        ledger = self._ledger()
        if ledger is not None:
            ledger._known.pop(self._identity, None)
            for line in tuple(ledger._lines.values()):
                line.drop(self._identity)
                if line.default is not None and line.default.group is self._group:
                    line.default = None
