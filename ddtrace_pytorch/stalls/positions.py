"""What a rank is in, to the very call: written into the rank's state file by the part in C. Pure.

A state is a second old when it is read; a rank that aborts inside of a collective has entered it since. One position
is what one thread entered, in :data:`POSITION` bytes of numbers of 8 bytes: the ledger's number of the cell from 1 on
(0: the thread is in no collective), the call's number on the group, its bytes, its type of numbers from 1 on (0: none),
and since when, in ns on the monotonic clock. Of the first of them the next number is that of the step under way, from 1
on (0: it isn't known that there are steps). The last is the :func:`check` of the five.

Behind the positions of all threads is, in :data:`ISSUED` bytes for each group, what torch itself issued last on it: the
cell, the call's number, its bytes, and their check. Nobody enters such a call, and when it ends isn't known.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ddtrace_pytorch.stalls.roll import Call, GroupState, RankState

POSITION, ISSUED = 64, 32
THREADS, GROUPS = 64, 64
SIZE = POSITION * THREADS + ISSUED * GROUPS
_NUMBER, _NUMBERS, _ISSUED = (struct.Struct(layout) for layout in ("=q", "=5q", "=4q"))
# Where the step is, and a position's check.
STEP = _NUMBERS.size
_CHECKED = STEP + _NUMBER.size


class Position(NamedTuple):
    """As it was written; `cell` and `dtype` count from 1."""

    cell: int
    key: int
    bytes: int
    dtype: int
    since: int


class Issued(NamedTuple):
    """As it was written; `cell` counts from 1."""

    cell: int
    key: int
    bytes: int


@dataclass(frozen=True)
class Legend:
    """What the numbers of a rank's positions mean: `cells` by number from 0 on, each the name of a group and an
    operation; `dtypes` in order; `clock`: what to add to the monotonic clock for ns since the epoch."""

    cells: Mapping[str, tuple[str, str]]
    dtypes: Sequence[str]
    clock: int


def legend_of(said: Mapping[str, Any]) -> Legend:
    """From JSON."""
    cells = {number: (str(group), str(operation)) for number, (group, operation) in said["cells"].items()}
    return Legend(cells, tuple(said["dtypes"]), int(said["clock"]))


NO_LEGEND = Legend({}, (), 0)


def parse(data: bytes) -> list[Position]:
    """Of the threads that are in a collective. One that was written to meanwhile isn't told."""
    found = []
    for start in _starts(data, 0, POSITION, THREADS):
        position = Position(*_NUMBERS.unpack_from(data, start))
        if position.cell > 0 and check(position) == _NUMBER.unpack_from(data, start + _CHECKED)[0]:
            found.append(position)
    return found


def issued_in(data: bytes) -> list[Issued]:
    """Of the groups on which torch itself issued something."""
    found = []
    for start in _starts(data, POSITION * THREADS, ISSUED, GROUPS):
        *numbers, checked = _ISSUED.unpack_from(data, start)
        issued = Issued(*numbers)
        if issued.cell > 0 and check(issued) == checked:
            found.append(issued)
    return found


def check(numbers: Iterable[int]) -> int:
    """Another number for nearly all others, so that those which don't belong together are told."""
    total = 0
    for number in numbers:
        total = (total * 0x9E3779B97F4A7C15 + number) & 0xFFFFFFFFFFFFFFFF
    return total - (1 << 64) if total >> 63 else total


def _starts(data: bytes, first: int, size: int, many: int) -> Iterator[int]:
    for start in range(first, first + size * many, size):
        if start + size <= len(data):
            yield start


def step_in(data: bytes) -> int | None:
    """The step under way; None if that isn't told."""
    number = _NUMBER.unpack_from(data, STEP)[0] if len(data) >= POSITION else 0
    return number - 1 if number > 0 else None


def overlay(state: RankState, data: bytes, legend: Legend) -> RankState:
    """`state` brought up to what was written since, where that is further on."""
    groups, inside = dict(state.groups), set()
    for position in parse(data):
        name, operation = _cell(position.cell, legend)
        inside.add((name, position.key))
        if name in groups:
            groups[name] = _entered(groups[name], _call(position, operation, legend))
    for issued in issued_in(data):
        name, operation = _cell(issued.cell, legend)
        if name in groups:
            call = Call(operation, issued.key, bytes=max(0, issued.bytes), since=state.as_of)
            groups[name] = _issued(groups[name], call, inside)
    number = step_in(data)
    step = state.step if number is None else number
    if (groups, step) == (state.groups, state.step):
        return state
    return replace(state, groups=groups, step=step, frames_at=state.as_of, frames_step=state.step)


def _cell(number: int, legend: Legend) -> tuple[str, str]:
    return legend.cells.get(str(number - 1), ("", ""))


def _call(position: Position, operation: str, legend: Legend) -> Call:
    known = 0 < position.dtype <= len(legend.dtypes)
    return Call(
        operation=operation,
        key=position.key,
        bytes=max(0, position.bytes),
        dtype=legend.dtypes[position.dtype - 1] if known else None,
        since=position.since + legend.clock,
    )


def _entered(here: GroupState, call: Call) -> GroupState:
    if call.key and here.unseen:
        # How many torch issued itself since the last beat nobody knows, and so not the number of this one.
        is_new = call.key > here.entered - here.unseen
        return replace(here, later=replace(call, key=0, seen=call.key)) if is_new else here
    if call.key and call.key <= here.entered:
        return here
    recent = (*here.recent, call) if call.key else here.recent
    entered = call.key or here.entered
    completed, at = here.completed, here.completed_at
    if completed < call.key - 1:
        completed, at = call.key - 1, call.since
    return replace(here, entered=entered, completed=completed, completed_at=at, current=call, recent=recent)


def _issued(here: GroupState, call: Call, inside: Set[tuple[str, int]]) -> GroupState:
    if here.unseen or call.key <= here.entered:
        return here
    here = replace(here, entered=call.key, recent=(*here.recent, call))
    if here.current is not None and (here.name, here.current.key) in inside:
        return here
    return replace(here, completed=call.key - 1, completed_at=call.since, current=None, issued=call)
