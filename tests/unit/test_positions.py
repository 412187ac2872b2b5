"""What a thread had entered since its rank's last beat, read from the bytes that the part in C wrote."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch import plain_numbers
from ddtrace_pytorch.collectives import in_flight
from ddtrace_pytorch.ledger import Cell, Group, How, Ledger
from ddtrace_pytorch.stalls import positions
from ddtrace_pytorch.stalls.aligned import aligned
from ddtrace_pytorch.stalls.positions import (
    GROUPS,
    ISSUED,
    NO_LEGEND,
    POSITION,
    SIZE,
    THREADS,
    Issued,
    Legend,
    Position,
    legend_of,
    overlay,
)
from ddtrace_pytorch.stalls.roll import Call, GroupState, Raised, RankState
from ddtrace_pytorch.training.progress import Progress, Step

if TYPE_CHECKING:
    from ddtrace_pytorch.ledger import Groups

LEGEND = Legend({"0": ("0", "all_reduce"), "3": ("7", "send")}, ("float32", "int64"), 1_000)
WORLD = GroupState("0", "world", (0, 1), "gloo", entered=4, completed=4, recent=(Call("all_reduce", 4),))
PAIR = GroupState("7", "pp", (0, 1), "gloo")
STATE = RankState(0, as_of=900, groups={"0": WORLD, "7": PAIR})


def written(*threads_in: Position, issued: tuple[Issued, ...] = ()) -> bytes:
    """As the part in C writes them."""
    threads = [struct.pack("=7q", *one, 0, positions.check(one)).ljust(POSITION, b"\0") for one in threads_in]
    groups = [struct.pack("=4q", *one, positions.check(one)) for one in issued]
    return (b"".join(threads).ljust(POSITION * THREADS, b"\0") + b"".join(groups)).ljust(SIZE, b"\0")


def test_the_writers_and_the_readers_measures_are_the_same() -> None:
    assert (in_flight.PLACES, in_flight.PLACE_BYTES) == (THREADS, POSITION)
    assert (in_flight.GROUPS, in_flight.GROUP_BYTES) == (GROUPS, ISSUED)


def test_what_was_entered_since_the_last_beat_is_there() -> None:
    state = overlay(STATE, written(Position(1, 5, 16, 2, 50)), LEGEND)
    call = Call("all_reduce", 5, bytes=16, dtype="int64", since=1_050)
    here = state.groups["0"]
    assert (here.entered, here.completed, here.current) == (5, 4, call)
    assert here.recent == (*WORLD.recent, call)
    assert state.groups["7"] == PAIR


def test_a_transfer_has_no_number() -> None:
    here = overlay(STATE, written(Position(4, 0, 16, 0, 50)), LEGEND).groups["7"]
    assert (here.entered, here.current, here.recent) == (0, Call("send", bytes=16, since=1_050), ())


def test_what_the_beat_knew_already_stays() -> None:
    assert overlay(STATE, written(Position(1, 4, 16, 2, 50)), LEGEND) == STATE


def test_among_calls_that_nobody_saw_its_number_is_a_peers() -> None:
    """Rank 0 died in its third call that was seen; there were two others by its last beat, and three by now."""
    partly = replace(WORLD, unseen=2, recent=())
    died = overlay(replace(STATE, groups={"0": partly}), written(Position(1, 3, 16, 2, 50)), LEGEND)
    assert (died.groups["0"].entered, died.groups["0"].current) == (4, None)
    assert died.groups["0"].later == Call("all_reduce", 0, bytes=16, dtype="int64", since=1_050, seen=3)
    knows = Raised("0", Call("all_reduce", 6, seen=3), "RuntimeError: Connection closed by peer")
    here = aligned({0: died, 1: RankState(1, raised=knows)})[0].groups["0"]
    assert (here.entered, here.completed, here.later) == (6, 5, None)
    assert here.current == Call("all_reduce", 6, bytes=16, dtype="int64", since=1_050, seen=3)
    elsewhere = RankState(1, raised=replace(knows, call=Call("all_reduce", 4, seen=2)))
    assert aligned({0: died, 1: elsewhere})[0] == died
    assert (
        overlay(replace(STATE, groups={"0": partly}), written(Position(1, 2, 16, 2, 50)), LEGEND).groups["0"] == partly
    )


def test_what_the_legend_does_not_know_is_left_alone() -> None:
    assert overlay(STATE, written(Position(9, 5, 16, 2, 50), Position(1, 5, 16, 99, 50)), NO_LEGEND) == STATE
    assert overlay(STATE, written(Position(1, 5, 16, 99, 50)), LEGEND).groups["0"].current == Call(
        "all_reduce", 5, bytes=16, since=1_050
    )


NUMBERS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(*[NUMBERS] * 5), max_size=THREADS), st.lists(st.tuples(*[NUMBERS] * 3), max_size=GROUPS))
def test_what_is_whole_is_read(threads: list[tuple[int, ...]], groups: list[tuple[int, ...]]) -> None:
    positions_, issued = [Position(*one) for one in threads], [Issued(*one) for one in groups]
    data = written(*positions_, issued=tuple(issued))
    assert positions.parse(data) == [one for one in positions_ if one.cell > 0]
    assert positions.issued_in(data) == [one for one in issued if one.cell > 0]
    assert positions.issued_in(data[:-1]) == positions.issued_in(data[:-ISSUED])
    assert positions.parse(data[: POSITION * THREADS - 1]) == positions.parse(data[: POSITION * (THREADS - 1)])
    overlay(STATE, data, LEGEND)


@given(st.tuples(*[st.integers(1, 99)] * 5), st.tuples(*[st.integers(1, 99)] * 5), st.integers(0, 6), st.integers(0, 6))
def test_what_is_being_written_is_one_or_the_other_or_nothing(
    before: tuple[int, ...], after: tuple[int, ...], first: int, last: int
) -> None:
    """The reader is in the midst of the writer, or the other way round."""
    old, new = (written(Position(*one)) for one in (before, after))
    torn = old[: 8 * first] + new[8 * first : 8 * last] + old[max(8 * first, 8 * last) :]
    assert set(positions.parse(torn)) <= {Position(*before), Position(*after)}


@pytest.mark.skipif(not plain_numbers.exist, reason="the part in C is not built")
def test_the_part_in_c_writes_what_is_read() -> None:
    memory, threads = bytearray(SIZE), in_flight.InFlight()
    threads.write_to(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    here = Group("7", "pp", "gloo", (0, 1), 0)
    cell = Cell(Ledger(cast("Groups", None)), "all_reduce", here, How.NATIVE, True)
    threads.follow(here)
    assert [here.number(cell, 48), here.number(cell, 1 << 70)] == [1, 2]
    assert positions.issued_in(memory) == [Issued(cell.number + 1, 2, 2**63 - 1)]
    assert here.recent[2:6].tolist() == [cell.number + 1, 48, cell.number + 1, 2**63 - 1]
    threads.write_to(0)
    assert here.number(cell, 16) == 3
    assert positions.issued_in(memory)[0].key == 2
    with pytest.raises(TypeError, match="a cell"):
        here.number(cast("Cell", here), 16)


def test_what_torch_issued_since_the_last_beat_is_there() -> None:
    here = overlay(STATE, written(issued=(Issued(1, 7, 16),)), LEGEND).groups["0"]
    call = Call("all_reduce", 7, bytes=16, since=900)
    assert (here.entered, here.completed, here.current, here.issued) == (7, 6, None, call)
    assert here.recent == (*WORLD.recent, call)
    assert overlay(STATE, written(issued=(Issued(1, 4, 16),)), LEGEND) == STATE


def test_a_thread_may_be_in_a_call_while_torch_issues_another_one() -> None:
    inside = Position(1, 5, 16, 0, 50)
    here = overlay(STATE, written(inside, issued=(Issued(1, 6, 32),)), LEGEND).groups["0"]
    assert (here.entered, here.completed, here.current and here.current.key) == (6, 4, 5)
    assert [call.key for call in here.recent] == [4, 5, 6]


def test_what_a_thread_was_in_at_the_beat_is_over_once_torch_has_issued_another_one() -> None:
    at_beat = overlay(STATE, written(Position(1, 5, 16, 0, 50)), LEGEND)
    assert at_beat.groups["0"].current is not None
    here = overlay(at_beat, written(issued=(Issued(1, 6, 32),)), LEGEND).groups["0"]
    assert (here.entered, here.completed, here.current) == (6, 5, None)


def test_the_step_under_way_lies_beside_the_first_position() -> None:
    progress, memory = Progress(), bytearray(SIZE)
    assert positions.step_in(bytes(memory)) is None
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    progress.write_to(address + positions.STEP)
    assert positions.step_in(bytes(memory)) is None
    for number in (0, 39, 40):
        progress.begin(Step(number))
        assert positions.step_in(bytes(memory)) == number
    assert positions.parse(bytes(memory)) == []
    assert overlay(replace(STATE, step=33), bytes(memory), LEGEND).step == 40
    assert overlay(replace(STATE, step=33), bytes(SIZE), LEGEND).step == 33
    progress.write_to(0)
    progress.begin(Step(41))
    assert positions.step_in(bytes(memory)) == 40


def test_a_legend_comes_back_from_json() -> None:
    assert (
        legend_of(
            {"cells": {"0": ["0", "all_reduce"], "3": ["7", "send"]}, "dtypes": ["float32", "int64"], "clock": 1_000}
        )
        == LEGEND
    )
