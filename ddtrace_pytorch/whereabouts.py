"""Where this rank is right now: on each process group, and in its code. Looked at from threads that don't train."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives.composites import Composite
from ddtrace_pytorch.collectives.flight_recorder import Entry
from ddtrace_pytorch.collectives.in_flight import Slot
from ddtrace_pytorch.collectives.observer import Collectives
from ddtrace_pytorch.collectives.summaries import GONE_KEPT
from ddtrace_pytorch.collectives.surface import BY_NAME, BY_NATIVE_NAME, OPERATIONS
from ddtrace_pytorch.histogram import percentile
from ddtrace_pytorch.ledger import Cell, Group
from ddtrace_pytorch.plain_numbers import RECENT
from ddtrace_pytorch.runlog.fields import is_whole
from ddtrace_pytorch.stack import frames_of
from ddtrace_pytorch.stalls import doing
from ddtrace_pytorch.stalls.positions import STEP, Legend
from ddtrace_pytorch.stalls.roll import Call, GroupState, Raised, RankState
from ddtrace_pytorch.stalls.watch import SECOND, Pending, limit
from ddtrace_pytorch.tensors import nbytes
from ddtrace_pytorch.thrown import Thrown
from ddtrace_pytorch.training.progress import Progress

# A call that has taken less is not looked at closer, as a rule; where the rank is about to end there is no later.
CLOSER_NS = SECOND // 4
# Of the time between two looks, which are so far apart at least: the main thread moves where it computed that much. A
# machine may be shared with many others, and a thread that waits computes next to nothing.
MOVES_SHARE = 0.02
APART_NS = SECOND // 2
# Of fewer calls the 99th percentile is the slowest, and the first of all is often that.
CALLS_FOR_P99 = 100
# Of a traceback, which may be as deep as the interpreter allows: so many of the innermost frames are looked at.
TRACEBACK_FRAMES = 200
# How much of a traceback's last line is kept.
ERROR_LENGTH = 300

R = TypeVar("R")

# What each operation goes by in torch's own code, over all releases.
_FUNCTIONS: dict[str, set[str]] = {}
for _row in OPERATIONS:
    _FUNCTIONS.setdefault(_row.name, set()).add(_row.function)


class InCall(NamedTuple):
    """A collective that one of our threads is in or waits for, `since` then on the monotonic clock."""

    cell: Cell
    key: int
    peer: int | None
    since: int
    thread: int
    waits: bool


class Whereabouts:
    """One session's."""

    def __init__(
        self, rank: int, host: str, clock: Clock, collectives: Collectives | None, seconds: float, progress: Progress
    ) -> None:
        """`seconds`: how long a collective may take."""
        # What a collective raised last, and what becomes of it.
        self._raised: tuple[Raised, Thrown] | None = None
        self.told_at = 0
        # A call that has taken less ns is not looked at closer.
        self.closer_ns = CLOSER_NS
        self._rank = rank
        self._host = host
        self._clock = clock
        self._collectives = collectives
        self._seconds = seconds
        self._progress = progress
        self._main = threading.main_thread().ident or 0
        self._computed = self._looked = 0
        self._moved = False
        self._was: tuple[str, str | None] = ("", None)
        # Of the exception that this rank ends by; where its frames were, no longer the frames.
        self._thrown: list[doing.Frame] = []
        # Where the main thread was when a collective raised: nowhere of its own any more, once that ends it.
        self._failed_in: list[doing.Frame] = []
        # What torch's recorder has of groups in which torch issues collectives itself, when last looked at closely.
        self._rings: dict[Group, tuple[Call, ...]] = {}
        # By group: how many collectives had come to their end, and when that was first seen.
        self._completed: dict[Group, tuple[int, int]] = {}

    def state(self, gpu: str | None, pid: int) -> RankState:
        """All of it; `moves` is since the last time."""
        frames = self._thrown or frames_of(sys._current_frames().get(self._main))
        spelled = doing.spelled(doing.theirs(frames))
        if self._failed_in and doing.own_frame(spelled) is None:
            spelled = doing.spelled(self._failed_in)
        does = doing.doing(frames)
        return RankState(
            rank=self._rank,
            host=self._host,
            gpu=gpu,
            pid=pid,
            as_of=self._clock.now(),
            moves=self._moves(does, doing.own_frame(spelled)),
            doing=does,
            step=self.step,
            frames=spelled,
            groups=self._groups(),
            raised=self._as_it_stands(),
            told_at=self.told_at,
        )

    def ends_by(self, error: BaseException | None) -> None:
        """The rank ends by `error`: from now on it is where that was raised. None: it doesn't, after all."""
        self._thrown = _frames_in(error.__traceback__) if error is not None else []

    def legend(self) -> Legend:
        """What the positions mean that threads write to where :meth:`write_to` says."""
        offset = self._clock.from_monotonic(0)
        if self._collectives is None:
            return Legend({}, (), offset)
        cells = {
            str(cell.number): (here.name, cell.operation)
            for here in tuple(self._collectives.ledger.groups)
            for cell in tuple(here.cells.values())
        }
        return Legend(cells, self._collectives.instrument.dtypes, offset)

    def write_to(self, memory: int) -> None:
        """Have what threads enter, and the step, written to that address; 0: no more."""
        self._progress.write_to(memory and memory + STEP)
        if self._collectives is not None:
            self._collectives.instrument.in_flight.write_to(memory)

    def failed(self, cell: Cell, error: BaseException) -> None:
        """A call of `cell` raised `error`, on this thread and just now."""
        here = cell.group
        if threading.get_ident() == self._main:
            self._failed_in = doing.theirs(frames_of(sys._getframe()))
        text = f"{type(error).__name__}: {_one_line(error)}"
        raised = Raised(here.name, self._failed_call(cell, error), text, self._clock.now())
        self._raised = raised, Thrown(error, self._progress.step)

    def _failed_call(self, cell: Cell, error: BaseException) -> Call:
        here, unseen = cell.group, 0
        slot = self._collectives.instrument.in_flight.slot() if self._collectives is not None else None
        awaited = slot.waits if slot is not None else None
        if awaited is not None and awaited.cell is cell:
            # It was counted when it was made.
            unseen = self._unseen(here) if awaited.key else 0
            call = Call(cell.operation, awaited.key, peer=awaited.peer, since=self._clock.from_monotonic(awaited.since))
            call = _completed_by(call, _recent(here, here.calls))
        else:
            if cell.numbered and self._collectives is not None:
                unseen = self._collectives.readings.unseen_in(here, cell.operation)
            arguments = _arguments(_in_traceback(error), cell.operation)
            since = self._clock.from_monotonic(slot.started if slot is not None else 0)
            call = _call(cell.operation, here.calls + 1 if cell.numbered else 0, arguments, here, since)
        return _among_seen(replace(call, key=call.key + unseen), unseen)

    def _as_it_stands(self) -> Raised | None:
        """What a collective raised last, with what is known of it by now."""
        if self._raised is None:
            return None
        raised, thrown = self._raised
        return replace(raised, caught=True) if thrown.is_caught(self._progress.step) else raised

    @property
    def is_seen_in_part(self) -> bool:
        """Whether torch issues collectives itself, of which only its flight recorder knows more than the number."""
        return self._collectives is not None and any(map(self._unseen, tuple(self._collectives.ledger.groups)))

    def look_closer(self) -> None:
        """Read what takes tens of milliseconds and tells what torch has issued itself."""
        collectives = self._collectives
        if collectives is None:
            return
        collectives.look()
        collectives.unfinished.beat(time.monotonic_ns())
        before = {here: self._launched(here) for here in tuple(collectives.ledger.groups)}
        entries = collectives.unfinished.read()
        collectives.look()
        self._rings = {
            here: _ring_of(entries.get(here.name, ()), launched)
            for here, launched in before.items()
            # What goes on meanwhile is no matter of standing still.
            if launched and launched == self._launched(here) and self._unseen(here)
        }

    @property
    def step(self) -> int | None:
        """The number of the one under way."""
        return number if is_whole(number := self._progress.step.number) else None

    def error_of(self, pending: Pending) -> str | None:
        """What raised `pending`, which is over; None if it came to a better end, as far as that is known."""
        raised, _ = self._raised or (None, None)
        if raised is None or raised.at < self._clock.from_monotonic(pending.since):
            return None
        call = raised.call
        same = (raised.group, call.operation, call.key) == (pending.group, pending.operation, pending.key)
        return raised.error if same else None

    def pending(self, now: int) -> list[Pending]:
        """What has not ended yet; `now` in ns on the monotonic clock."""
        if self._collectives is None:
            return []
        found = []
        for one in self._in_calls():
            cell, here = one.cell, one.cell.group
            p99 = round(percentile(cell.buckets, 0.99, 0)) if cell.count >= CALLS_FOR_P99 else 0
            patience = limit(self._seconds, p99, here.timeout)
            found.append(Pending(here.name, here.label, cell.operation, one.key, one.since, patience, False, self.step))
        known = {one.group for one in found}
        for here in tuple(self._collectives.ledger.groups):
            call = self._recorded(here) if here.name not in known else None
            if call is not None:
                since = self._clock.monotonic(call.since)
                patience = limit(self._seconds, 0, here.timeout)
                found.append(Pending(here.name, here.label, call.operation, call.key, since, patience, True, self.step))
        return found

    def _groups(self) -> dict[str, GroupState]:
        if self._collectives is None:
            return {}
        now = time.monotonic_ns()
        current: dict[Group, Call] = {}
        for one in self._in_calls():
            here = one.cell.group
            arguments: Mapping[str, Any] = {}
            if now - one.since >= self.closer_ns and not one.waits:
                arguments = _arguments(sys._current_frames().get(one.thread), one.cell.operation)
            since = self._clock.from_monotonic(one.since)
            call = _call(one.cell.operation, one.key, arguments, here, since, one.peer)
            current.setdefault(here, _among_seen(call, self._unseen(here)))
        groups = _worth_telling(self._collectives.ledger.groups)
        states = {here.name: self._on_group(here, current.get(here) or self._recorded(here)) for here in groups}
        self._completed = {here: known for here in groups if (known := self._completed.get(here)) is not None}
        return states

    def _on_group(self, here: Group, current: Call | None) -> GroupState:
        calls, unseen = here.calls, self._unseen(here)
        key = current.key if current is not None else 0
        recent = self._rings.get(here, ()) if unseen else _recent(here, calls)
        if current is not None and (key == calls + 1 or (unseen and key)):
            current = _completed_by(current, recent)
            ring = {one.key: one for one in recent} | {key: current}
            recent = tuple(ring[one] for one in sorted(ring))
        completed = key - 1 if key else calls + unseen
        known = self._completed.get(here)
        if known is None or known[0] != completed:
            known = self._completed[here] = completed, self._clock.now()
        return GroupState(
            name=here.name,
            label=here.label,
            ranks=here.ranks,
            backend=here.backend,
            entered=max(calls + unseen, key),
            completed=completed,
            completed_at=known[1],
            current=current,
            recent=recent,
            unseen=unseen or None,
        )

    def _in_calls(self) -> Iterator[InCall]:
        assert self._collectives is not None
        for slot in self._collectives.instrument.in_flight.slots():
            one = _in_call(slot)
            if one is not None:
                unseen = self._unseen(one.cell.group) if one.key else 0
                yield one._replace(key=one.key + unseen)

    def _unseen(self, here: Group) -> int:
        """How many collectives of the group torch counts that are not among its calls."""
        history = self._collectives.readings.of(here) if self._collectives is not None else None
        return history.latest.unseen if history is not None and history.latest is not None else 0

    def _recorded(self, here: Group) -> Call | None:
        """What torch issued by itself and is under way, as far as that is known."""
        assert self._collectives is not None
        found = self._collectives.unfinished.of(here.name)
        if found is None:
            return None
        entry, later = found
        launched = self._launched(here)
        return _recorded_call(entry, max(0, launched - later) if launched is not None else 0, entry.created)

    def _launched(self, here: Group) -> int | None:
        """How many collectives torch counts on the group."""
        history = self._collectives.readings.of(here) if self._collectives is not None else None
        return history.latest.launched if history is not None and history.latest is not None else None

    def _moves(self, does: str, at: str | None) -> bool:
        try:
            computed = time.clock_gettime_ns(time.pthread_getcpuclockid(self._main))
        except OSError:  # the thread is gone
            return False
        now = time.monotonic_ns()
        if now - self._looked >= APART_NS:
            share = (computed - self._computed) / (now - self._looked)
            self._moved = share >= MOVES_SHARE or (does, at) != self._was
            self._computed, self._looked, self._was = computed, now, (does, at)
        return self._moved


def _worth_telling(groups: Iterable[Group]) -> list[Group]:
    """Without those that are gone, but for the last: there is no room for all that a training makes and ends in a
    minute, and somebody may still be in what was completed here."""
    every = list(groups)
    left_out = {*[here for here in every if here.is_gone][:-GONE_KEPT]}
    return [here for here in every if here not in left_out]


def _in_call(slot: Slot) -> InCall | None:
    call, awaited = slot.call, slot.waits
    cell = call.cell if isinstance(call, Composite) else call
    if cell is not None:
        key = cell.group.calls + 1 if cell.numbered else 0
        return InCall(cell, key, None, slot.started, slot.thread, False)
    if awaited is not None:
        return InCall(awaited.cell, awaited.key, awaited.peer, awaited.since, slot.thread, True)
    return None


def _recent(here: Group, calls: int) -> tuple[Call, ...]:
    """The last ones that were counted; a thread that trains may be overwriting the oldest."""
    found = []
    cells = {cell.number + 1: cell for cell in tuple(here.cells.values())}
    for key in range(max(1, calls - RECENT + 1), calls + 1):
        place = 2 * (key % RECENT)
        cell, size = cells.get(here.recent[place]), here.recent[place + 1]
        if cell is not None and here.calls < key + RECENT:
            found.append(Call(cell.operation, key, size))
    return tuple(found)


def _ring_of(entries: Sequence[Entry], launched: int) -> tuple[Call, ...]:
    """The last of a group's entries as calls, where torch has counted `launched` collectives on it."""
    last = [entry for entry in entries if not entry.p2p][-RECENT:]
    first = launched - len(last) + 1
    return tuple(_recorded_call(entry, first + at) for at, entry in enumerate(last) if first + at > 0)


def _recorded_call(entry: Entry, key: int, since: int = 0) -> Call:
    row = BY_NATIVE_NAME.get(entry.name)
    return Call(
        operation=row.name if row is not None else entry.name,
        key=key,
        bytes=entry.input_bytes or 0,
        shape=entry.shape,
        dtype=entry.dtype,
        since=since,
        recorded=True,
    )


def _completed_by(call: Call, ring: Iterable[Call]) -> Call:
    """With what the recorder has of the same call, where nobody else knows."""
    same = next((one for one in ring if one.key == call.key), None)
    if call.dtype is not None or same is None:
        return call
    return replace(call, bytes=same.bytes, shape=same.shape, dtype=same.dtype)


def _among_seen(call: Call, unseen: int) -> Call:
    """With its number among the seen ones, where there are others."""
    return replace(call, seen=call.key - unseen) if unseen and call.key else call


def _call(
    operation: str,
    key: int,
    arguments: Mapping[str, Any],
    here: Group,
    since: int = 0,
    peer: int | None = None,
) -> Call:
    """`arguments`: of torch's function, by name; none where they aren't known. All of them are the user's."""
    row = BY_NAME.get(operation)
    if row is not None and row.root is not None and arguments:
        within = arguments.get(f"group_{row.root}")
        peer = arguments.get(row.root)
        if peer is None and isinstance(within, Integral) and 0 <= int(within) < here.size:
            peer = here.ranks[int(within)]
        if peer is None and not row.between_two:
            peer = here.ranks[0]
    return Call(
        operation=operation,
        key=key,
        **_measures(arguments),
        # NumPy's integers are as good as Python's, but not in JSON.
        peer=number if isinstance(peer, Integral) and is_whole(number := int(peer)) else None,
        since=since,
    )


def _measures(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes, shape and dtype of the first tensor among `arguments`, those that can be told: sparse tensors have no
    bytes, and a tensor of a class of the user's may run the user's code, and raise."""
    torch = sys.modules.get("torch")
    with torch._C.DisableTorchFunctionSubclass() if torch is not None else nullcontext():
        for value in arguments.values():
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            dtype = _told(first, lambda tensor: str(tensor.dtype))
            shape = _told(first, lambda tensor: tuple(map(int, tensor.shape)))
            if dtype is not None and shape is not None:
                size = _told(first, nbytes) or 0
                return {"bytes": size, "shape": shape, "dtype": dtype.removeprefix("torch.")}
    return {}


def _told(tensor: Any, read: Callable[[Any], R]) -> R | None:
    try:
        return read(tensor)
    except Exception:  # the user's own tensor
        return None


def _arguments(frame: FrameType | None, operation: str) -> Mapping[str, Any]:
    """The arguments of torch's function for `operation`, where `frame` or one around it runs it."""
    functions = _FUNCTIONS.get(operation, ())
    while frame is not None:
        code = frame.f_code
        if code.co_name in functions and code.co_filename.endswith("distributed_c10d.py"):
            names = code.co_varnames[: code.co_argcount]
            there = frame.f_locals
            return {name: there[name] for name in names if name in there}
        frame = frame.f_back
    return {}


def _in_traceback(error: BaseException) -> FrameType | None:
    """The innermost frame of the traceback."""
    at, frame = error.__traceback__, None
    while at is not None:
        frame, at = at.tb_frame, at.tb_next
    return frame


def _frames_in(traceback: TracebackType | None) -> list[doing.Frame]:
    """As :func:`~ddtrace_pytorch.stack.frames_of`, of a traceback."""
    found: deque[doing.Frame] = deque(maxlen=TRACEBACK_FRAMES)
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found.appendleft((code.co_filename, code.co_name, traceback.tb_lineno or 0))
        traceback = traceback.tb_next
    return list(found)


def _one_line(error: BaseException) -> str:
    try:
        return next(iter(str(error).splitlines()), "")[:ERROR_LENGTH]
    except Exception:  # the user's own text
        return ""
