"""What each thread of a rank is in, to the very call: written into the rank's state file by the part in C. Pure.

A state is a second old when it is read; a rank that aborts inside of a collective has entered it since. One position
is five numbers of 8 bytes in :data:`POSITION` bytes: the ledger's number of the cell from 1 on (0: the thread is in no
collective), the call's number on the group, its bytes, its type of numbers from 1 on (0: none), and since when, in ns
on the monotonic clock. Behind the first of them, where there is room, is the number of the step under way, from 1 on
(0: it isn't known that there are steps).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ddtrace_pytorch.stalls.roll import Call, GroupState, RankState

POSITION = 64
THREADS = 64
SIZE = POSITION * THREADS
_NUMBERS = struct.Struct("=5q")
# Where the step is.
STEP = _NUMBERS.size
_STEP = struct.Struct("=q")


class Position(NamedTuple):
    """As it was written; `cell` and `dtype` count from 1."""

    cell: int
    key: int
    bytes: int
    dtype: int
    since: int


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
    """Of the threads that are in a collective."""
    found = []
    for start in range(0, len(data) - POSITION + 1, POSITION):
        position = Position(*_NUMBERS.unpack_from(data, start))
        if position.cell > 0:
            found.append(position)
    return found


def step_in(data: bytes) -> int | None:
    """The step under way; None if that isn't told."""
    number = _STEP.unpack_from(data, STEP)[0] if len(data) >= POSITION else 0
    return number - 1 if number > 0 else None


def overlay(state: RankState, positions: Sequence[Position], legend: Legend, step: int | None = None) -> RankState:
    """`state` brought up to `positions` and `step`, where those are further on."""
    groups = dict(state.groups)
    for position in positions:
        name, operation = legend.cells.get(str(position.cell - 1), ("", ""))
        here = groups.get(name)
        if here is not None:
            groups[name] = _on_group(here, _call(position, operation, legend))
    return replace(state, groups=groups, step=state.step if step is None else step)


def _call(position: Position, operation: str, legend: Legend) -> Call:
    known = 0 < position.dtype <= len(legend.dtypes)
    return Call(
        operation=operation,
        key=position.key,
        bytes=max(0, position.bytes),
        dtype=legend.dtypes[position.dtype - 1] if known else None,
        since=position.since + legend.clock,
    )


def _on_group(here: GroupState, call: Call) -> GroupState:
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
