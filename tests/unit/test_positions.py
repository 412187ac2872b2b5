"""What a thread had entered since its rank's last beat, read from the bytes that the part in C wrote."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.collectives import in_flight
from ddtrace_pytorch.stalls import positions
from ddtrace_pytorch.stalls.aligned import aligned
from ddtrace_pytorch.stalls.positions import NO_LEGEND, POSITION, SIZE, THREADS, Legend, Position, legend_of, overlay
from ddtrace_pytorch.stalls.roll import Call, GroupState, Raised, RankState
from ddtrace_pytorch.training.progress import Progress, Step

LEGEND = Legend({"0": ("0", "all_reduce"), "3": ("7", "send")}, ("float32", "int64"), 1_000)
WORLD = GroupState("0", "world", (0, 1), "gloo", entered=4, completed=4, recent=(Call("all_reduce", 4),))
PAIR = GroupState("7", "pp", (0, 1), "gloo")
STATE = RankState(0, groups={"0": WORLD, "7": PAIR})


def test_the_writers_and_the_readers_measures_are_the_same() -> None:
    assert (in_flight.PLACES, in_flight.PLACE_BYTES) == (THREADS, POSITION)


def test_what_was_entered_since_the_last_beat_is_there() -> None:
    state = overlay(STATE, [Position(1, 5, 16, 2, 50)], LEGEND)
    call = Call("all_reduce", 5, bytes=16, dtype="int64", since=1_050)
    here = state.groups["0"]
    assert (here.entered, here.completed, here.current) == (5, 4, call)
    assert here.recent == (*WORLD.recent, call)
    assert state.groups["7"] == PAIR


def test_a_transfer_has_no_number() -> None:
    here = overlay(STATE, [Position(4, 0, 16, 0, 50)], LEGEND).groups["7"]
    assert (here.entered, here.current, here.recent) == (0, Call("send", bytes=16, since=1_050), ())


def test_what_the_beat_knew_already_stays() -> None:
    assert overlay(STATE, [Position(1, 4, 16, 2, 50)], LEGEND) == STATE


def test_among_calls_that_nobody_saw_its_number_is_a_peers() -> None:
    """Rank 0 died in its third call that was seen; there were two others by its last beat, and three by now."""
    partly = replace(WORLD, unseen=2, recent=())
    died = overlay(replace(STATE, groups={"0": partly}), [Position(1, 3, 16, 2, 50)], LEGEND)
    assert (died.groups["0"].entered, died.groups["0"].current) == (4, None)
    assert died.groups["0"].later == Call("all_reduce", 0, bytes=16, dtype="int64", since=1_050, seen=3)
    knows = Raised("0", Call("all_reduce", 6, seen=3), "RuntimeError: Connection closed by peer")
    here = aligned({0: died, 1: RankState(1, raised=knows)})[0].groups["0"]
    assert (here.entered, here.completed, here.later) == (6, 5, None)
    assert here.current == Call("all_reduce", 6, bytes=16, dtype="int64", since=1_050, seen=3)
    elsewhere = RankState(1, raised=replace(knows, call=Call("all_reduce", 4, seen=2)))
    assert aligned({0: died, 1: elsewhere})[0] == died
    assert overlay(replace(STATE, groups={"0": partly}), [Position(1, 2, 16, 2, 50)], LEGEND).groups["0"] == partly


def test_what_the_legend_does_not_know_is_left_alone() -> None:
    assert overlay(STATE, [Position(9, 5, 16, 2, 50), Position(1, 5, 16, 99, 50)], NO_LEGEND) == STATE
    assert overlay(STATE, [Position(1, 5, 16, 99, 50)], LEGEND).groups["0"].current == Call(
        "all_reduce", 5, bytes=16, since=1_050
    )


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 5), max_size=THREADS))
def test_threads_that_are_in_something_are_read(written: list[tuple[int, ...]]) -> None:
    data = b"".join(struct.pack("=5q", *one).ljust(POSITION, b"\0") for one in written).ljust(SIZE, b"\0")
    assert positions.parse(data) == [Position(*one) for one in written if one[0] > 0]
    assert positions.parse(data[:-1]) == positions.parse(data[: SIZE - POSITION])
    overlay(STATE, positions.parse(data), LEGEND)


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
    assert overlay(replace(STATE, step=33), [], LEGEND, positions.step_in(bytes(memory))).step == 40
    assert overlay(replace(STATE, step=33), [], LEGEND).step == 33
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
