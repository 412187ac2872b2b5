"""native/kernel_sampler.c counts what a libcupti hands it, exactly, and drops what is no record."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from harness import kernel_sampler as ks
from harness.kernel_sampler import MockCupti, Record
from harness.native import OURS, SOURCES, compiled
from harness.waiting import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtrace_pytorch.kernels import sampler_library as lib
from ddtrace_pytorch.kernels.native import SET_ARGUMENTS
from ddtrace_pytorch.kernels.sampler_library import COPY, FILL, KERNEL, Counted, SamplerLibrary
from ddtrace_pytorch.kernels.step_signals import StepSignals

DIRECTIONS = ("", " HtoD", " DtoH", " HtoA", " AtoH", " AtoA", " AtoD", " DtoA", " DtoD", " HtoH", " PtoP")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("built")
    return ks.build_sampler(where), ks.build_mock(where)


@pytest.fixture
def closed(libraries: tuple[Path, Path], tmp_path: Path) -> SamplerLibrary:
    return SamplerLibrary(ks.own_copy(libraries[0], tmp_path))


@pytest.fixture
def cupti(libraries: tuple[Path, Path], tmp_path: Path) -> Iterator[MockCupti]:
    cupti = MockCupti(ks.own_copy(libraries[1], tmp_path))
    yield cupti
    assert cupti.c.mock_faults() == 0


@pytest.fixture
def sampler(closed: SamplerLibrary, cupti: MockCupti) -> SamplerLibrary:
    assert closed.open(cupti.library) == lib.OK, closed.error
    return closed


def a_record(**facts: object) -> Record:
    now = time.time_ns()
    return replace(Record(now - 5000, now - 1000), **facts)  # type: ignore[arg-type]


def name_of(record: Record) -> str:
    if record.kind == FILL:
        return "memset"
    if record.kind == COPY:
        return "memcpy" + DIRECTIONS[int(record.name)]
    assert isinstance(record.name, bytes)
    return record.name.decode()


def added_up(records: Iterable[Record]) -> dict[lib.Key, Counted]:
    times: dict[lib.Key, list[int]] = {}
    for one in records:
        key = (name_of(one), one.kind, one.device, one.stream)
        times.setdefault(key, []).append(one.end - one.start)
    return {key: summed(took) for key, took in times.items()}


def summed(times: list[int]) -> Counted:
    return Counted(len(times), sum(times), max(times, default=0), dict(Counter(took.bit_length() for took in times)))


def test_the_layout_is_the_one_that_callers_expect(closed: SamplerLibrary) -> None:
    assert closed.quick.ks_interface() == lib.INTERFACE
    limits = closed.limits
    assert closed.quick.ks_limits(None, 0) == len(limits)
    assert limits[:3] == (lib._ROW.size, lib._RAW.size, 8 * len(lib.Counters._fields))
    assert (limits.buckets, limits.reasons) == (lib.BUCKETS, len(lib.REASONS))
    assert limits.parent_size == lib._PARENT.size + limits.tags * (limits.tag_name + limits.tag_value)


# Until a second ago and up to now: what is long ends late.
KINDS = st.one_of(
    st.tuples(
        st.just(KERNEL), st.sampled_from([b"gemm", b"ncclDevKernel_AllReduce", "Größe".encode(), b"x" * 300, b""])
    ),
    st.tuples(st.just(COPY), st.integers(0, 10)),
    st.tuples(st.just(FILL), st.just(0)),
)
RECORDS = st.builds(
    lambda kind, took, ago, device, stream: Record(
        -ago - took, -ago, kind=kind[0], name=kind[1], device=device, stream=stream
    ),
    KINDS,
    st.one_of(st.integers(0, 2000), st.integers(0, 400_000_000)),
    st.integers(0, 400_000_000),
    st.integers(0, 3),
    st.sampled_from([0, 7, 20, 2**32 - 2]),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(RECORDS, max_size=60))
def test_sums_are_exact(sampler: SamplerLibrary, cupti: MockCupti, records: list[Record]) -> None:
    assert sampler.on(lib.COPIES | lib.FILLS) == lib.OK
    now = time.time_ns()
    told = [replace(one, start=now + one.start, end=now + one.end) for one in records]
    cupti.replay(told)
    assert sampler.off() == lib.OK
    taken = sampler.take()
    assert taken.sums == added_up(told)
    assert taken.totals.dropped() == {}
    assert taken.totals.records == len(told)
    assert taken.other.many == taken.totals.held == 0


def test_threads_that_complete_buffers_at_once_lose_nothing(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    random_ = random.Random(7)
    sampler.on()
    lots = [
        [
            a_record(name=f"kernel_{random_.randrange(100)}".encode(), stream=random_.randrange(4), device=lot % 2)
            for _ in range(500)
        ]
        for lot in range(4)
    ]
    threads = [threading.Thread(target=cupti.replay, args=(lot, 100)) for lot in lots]
    for thread in threads:
        thread.start()
    parts = [sampler.take() for _ in range(5)]
    for thread in threads:
        thread.join()
    sampler.off()
    parts.append(sampler.take())
    expected = added_up(one for lot in lots for one in lot)
    for key, once in expected.items():
        of_key = [part.sums[key] for part in parts if key in part.sums]
        assert sum(part.many for part in of_key) == 100 * once.many
        assert sum(part.total for part in of_key) == 100 * once.total
        assert max(part.longest for part in of_key) == once.longest
        buckets = sum((Counter(part.buckets) for part in of_key), Counter())
        assert buckets == {bucket: 100 * many for bucket, many in once.buckets.items()}
    assert sum(part.totals.records for part in parts) == 200_000
    assert {key for part in parts for key in part.sums} == set(expected)


def test_one_name_at_two_places_is_one_row_and_two_names_at_one_place_are_two(
    sampler: SamplerLibrary, cupti: MockCupti
) -> None:
    here, there = (ctypes.create_string_buffer(b"gemm", 16) for _ in range(2))
    sampler.on()
    for text in (b"gemm", b"gemm2", b"gem"):
        here.value = text
        cupti.replay([a_record(name=ctypes.addressof(at)) for at in (here, there, here)])
        sampler.flush()
    sampler.off()
    counts = {key[0]: one.many for key, one in sampler.take().sums.items()}
    assert counts == {"gemm": 3 + 1 + 1, "gemm2": 2, "gem": 2}


def test_rows_beyond_the_table_are_counted_together(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    many = sampler.limits.rows - 1 + 100
    records = [a_record(stream=stream) for stream in range(many)]
    sampler.on()
    cupti.replay(records, 2)
    sampler.off()
    taken = sampler.take()
    kept = {("kernel", KERNEL, 0, stream) for stream in range(many - 100)}
    assert set(taken.sums) == kept
    assert taken.other == summed([one.end - one.start for one in records[-100:]] * 2)
    assert (taken.totals.rows_full, taken.totals.records) == (200, 2 * many)


@pytest.mark.parametrize("length", [8, 1000])
def test_names_beyond_the_table_are_counted_together(sampler: SamplerLibrary, cupti: MockCupti, length: int) -> None:
    many = sampler.limits.names + 50
    room = min(sampler.limits.names, sampler.limits.name_bytes // (length + 1))
    sampler.keep(sampler.limits.raws)
    sampler.on()
    cupti.replay([a_record(name=b"%0*d" % (length, number)) for number in range(many)])
    sampler.off()
    taken = sampler.take()
    names = [f"{number:0{length}d}" for number in range(room)]
    assert [key.name for key in taken.sums] == names
    assert taken.other.many == taken.totals.names_full == many - room
    assert [raw.name for raw in taken.raws] == [*names, *[None] * (many - room)]
    sampler.on()
    cupti.replay([a_record(name=b"another")])
    sampler.off()
    assert [key.name for key in sampler.take().sums] == ["another"], "what was taken makes room"


def test_of_a_very_long_name_the_beginning_counts(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    most = sampler.limits.name_at_most
    sampler.on()
    cupti.replay([a_record(name=b"x" * (most + more)) for more in (-1, 1, 0, 9, 1)])
    sampler.off()
    taken = sampler.take()
    assert {len(key[0]): one.many for key, one in taken.sums.items()} == {most - 1: 1, most: 4}
    assert taken.totals.names_cut == 1


def test_what_is_no_record_is_dropped_by_its_reason(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    sampler.on(lib.COPIES)
    now = time.time_ns()
    minute = 60_000_000_000
    bad = {
        "unknown_kind": [a_record(kind=3), a_record(kind=77)],
        "cut_short": [
            *(a_record(length=length) for length in (2, 8, 31, 111, 159)),
            a_record(kind=COPY, name=1, length=75),
        ],
        "untimed": [a_record(start=0), a_record(end=0), a_record(start=0, end=0)],
        "backwards": [Record(now, now - 1)],
        "out_of_window": [
            Record(now - minute, now),
            Record(now, now + minute),
            Record(1, 2),
            Record(2**64 - 2, 2**64 - 1),
        ],
        "nameless": [a_record(name=0)],
        "unreadable": [a_record(kind=0), a_record(kind=0)],
    }
    good = [a_record(), a_record(length=160), a_record(kind=COPY, name=2, length=76)]
    for records in bad.values():
        for record in records:
            cupti.replay([a_record(), record])
    cupti.replay(good)
    cupti.replay([a_record(kind=COPY, name=200)])
    cupti.c.mock_lose(5)
    sampler.off()
    taken = sampler.take()
    assert taken.totals.dropped() == {reason: len(records) for reason, records in bad.items()}
    beside = sum(map(len, bad.values()))
    assert {key[0]: one.many for key, one in taken.sums.items()} == {
        "kernel": beside + 2,
        "memcpy DtoH": 1,
        "memcpy": 1,
    }
    assert taken.totals.cupti_dropped == 5
    assert sampler.take().totals.dropped() == {}


@pytest.mark.parametrize(("how", "before"), [(1, 1), (2, 0)])
def test_records_out_of_their_buffer_end_its_reading(
    sampler: SamplerLibrary, cupti: MockCupti, how: int, before: int
) -> None:
    cupti.c.mock_misbehave(how)
    sampler.on()
    cupti.replay([a_record()] * 3)
    sampler.off()
    totals = sampler.take().totals
    assert (totals.records, totals.dropped()) == (before, {"outside": 1})


def test_buffers_that_are_not_with_cupti_are_left_alone(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    sampler.on()
    _, ours = cupti.hoard()
    sampler.flush()
    inside = ctypes.create_string_buffer(4096)
    for address in (ours, ours + 8, ours - 1, ctypes.addressof(inside), None):
        cupti.c.mock_complete(address, 4096)
    totals = sampler.take().totals
    assert (totals.strays, totals.records, totals.dropped()) == (5, 0, {})


def test_first_records_are_kept_as_they_are_and_no_more_than_asked_for(
    sampler: SamplerLibrary, cupti: MockCupti
) -> None:
    records = [
        a_record(
            name=b"ab"[number % 2 : number % 2 + 1] if number % 3 else 4,
            kind=KERNEL if number % 3 else COPY,
            correlation=number,
            stream=2**32 - 1 - number,
            device=number,
            graph=2**31 + number,
            graph_node=2**63 + number,
        )
        for number in range(9)
    ]
    sampler.on(lib.COPIES)
    for keep, expected in ((0, 0), (7, 7), (100, 9)):
        assert sampler.keep(keep) == lib.OK
        cupti.replay(records)
        sampler.flush()
        taken = sampler.take()
        told = [
            Record(
                raw.start,
                raw.end,
                str(raw.name).encode(),
                raw.kind,
                raw.device,
                raw.stream,
                raw.correlation,
                raw.graph_node,
                raw.graph,
            )
            for raw in taken.raws
        ]
        assert told == [replace(one, name=name_of(one).encode()) for one in records[:expected]]
        assert taken.totals.raws_left_out == (9 - expected if keep else 0)
        assert taken.totals.records == 9
    most = sampler.limits.raws
    sampler.keep(most)
    cupti.replay(records, most // 9 + 2)
    sampler.off()
    taken = sampler.take()
    assert (len(taken.raws), taken.totals.raws_left_out) == (most, 9 * (most // 9 + 2) - most)
    assert sampler.keep(most + 1) == lib.ARGUMENT


def test_on_and_off_and_on_again(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    assert sampler.off() == lib.OK
    assert cupti.calls() == []
    for flags, kinds in ((0, [10]), (lib.COPIES, [10, 1]), (lib.COPIES | lib.FILLS, [10, 1, 2])):
        assert sampler.on(flags) == sampler.on(flags) == lib.OK
        assert cupti.calls() == ["register", *(f"enable({kind})" for kind in kinds)]
        cupti.replay([a_record(), a_record(kind=COPY, name=1), a_record(kind=FILL)])
        assert sampler.take().totals.records == 0, "nothing was flushed yet"
        assert sampler.off() == sampler.off() == lib.OK
        assert cupti.calls() == [*(f"disable({kind})" for kind in kinds), "flush(1)"]
        cupti.replay([a_record()])
        assert {key[1] for key in sampler.take().sums} == set(kinds)
        assert sampler.take().sums == {}
    sampler.on(lib.FILLS)
    sampler.on(lib.COPIES)
    assert cupti.calls() == ["register", "enable(10)", "enable(2)", "enable(1)", "disable(2)"]
    assert sampler.on(4) == lib.ARGUMENT


def test_what_was_launched_before_a_pause_still_counts(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    sampler.on()
    cupti.replay([a_record(name=b"before")])
    assert sampler.pause() == lib.OK
    cupti.replay([a_record(name=b"meanwhile")])
    sampler.on()
    cupti.replay([a_record(name=b"after")])
    sampler.pause()
    sampler.off()
    assert cupti.calls() == "register enable(10) disable(10) enable(10) disable(10) flush(1)".split()
    assert {key[0] for key in sampler.take().sums} == {"before", "after"}


def test_buffers_that_come_after_off_are_given_back_unread(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    sampler.on()
    cupti.c.mock_hold(True)
    cupti.replay([a_record()] * 3)
    sampler.off()
    totals = sampler.take().totals
    assert (totals.held, totals.records) == (1, 0)
    cupti.c.mock_hold(False)
    cupti.c.mock_deliver()
    totals = sampler.take().totals
    assert (totals.held, totals.records, totals.late_buffers, totals.late_bytes) == (0, 0, 1, 3 * 208)
    sampler.on()
    assert cupti.hoard()[0] == sampler.limits.buffers


def test_a_pool_that_is_empty_gives_nothing_until_buffers_come_back(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    sampler.on()
    assert cupti.hoard()[0] == sampler.limits.buffers
    cupti.replay([a_record()] * 10)
    totals = sampler.take().totals
    assert (totals.held, totals.refusals) == (sampler.limits.buffers, 1 + 10)
    sampler.flush()
    cupti.replay([a_record()] * 4)
    sampler.off()
    totals = sampler.take().totals
    assert (totals.held, totals.refusals, totals.records, totals.cupti_dropped) == (0, 0, 4, 10)
    assert cupti.hoard()[0] == 0, "nothing is given while it is off"


def test_times_are_judged_by_the_clock_of_cupti(closed: SamplerLibrary, tmp_path: Path) -> None:
    cupti = MockCupti(ks.build_mock(tmp_path, "-DAHEAD=-3600"))
    assert closed.open(cupti.library) == lib.OK
    closed.on()
    hour = 3_600_000_000_000
    now = time.time_ns()
    cupti.replay([Record(now - hour - 100, now - hour), Record(now - 100, now)])
    closed.off()
    totals = closed.take().totals
    assert (totals.records, totals.dropped()) == (1, {"out_of_window": 1})


def test_says_what_is_missing(closed: SamplerLibrary, cupti: MockCupti, libraries: tuple[Path, Path]) -> None:
    for act in (closed.on, closed.off, closed.pause, closed.flush, closed.arm):
        assert act() == lib.NOT_OPEN
        assert closed.error == "CUPTI's library isn't open"
    with pytest.raises(RuntimeError, match="CUPTI's library isn't open"):
        closed.take()
    assert closed.open("/nowhere/libcupti.so") == lib.NO_LIBRARY
    assert "/nowhere/libcupti.so" in closed.error
    assert closed.open(libraries[0]) == lib.NO_FUNCTION
    assert closed.error == "no cuptiActivityRegisterCallbacks in CUPTI's library"
    assert closed.quick.ks_open(None) == lib.ARGUMENT
    assert closed.open(cupti.library) == closed.open("/nowhere/libcupti.so") == lib.OK
    assert closed.quick.ks_take(None, 5, None, 0, None, 0, None) == lib.ARGUMENT
    assert closed.arm(4) == closed.on(4) == lib.ARGUMENT
    assert closed.error == "flags of 0 to 3, not 4"


@pytest.mark.parametrize(
    ("call", "said", "afterwards"),
    [
        ("register", "cuptiActivityRegisterCallbacks gave 15", "register"),
        ("enable(10)", "cuptiActivityEnable gave 15", "register enable(10) flush(1)"),
        ("enable(1)", "cuptiActivityEnable gave 15", "register enable(10) enable(1) disable(10) flush(1)"),
    ],
)
def test_is_off_where_cupti_refuses(
    sampler: SamplerLibrary, cupti: MockCupti, call: str, said: str, afterwards: str
) -> None:
    cupti.c.mock_fail(call.encode(), 15)
    assert sampler.on(lib.COPIES) == lib.REFUSED
    assert sampler.error == said
    assert cupti.calls() == afterwards.split()
    assert sampler.off() == lib.OK
    assert cupti.calls() == []
    cupti.c.mock_fail(b"", 0)
    assert sampler.on() == lib.OK
    assert cupti.calls() == ["register", "enable(10)"]


@pytest.mark.parametrize("call", ["disable(10)", "flush(1)"])
def test_is_off_even_where_cupti_does_not_let_go(sampler: SamplerLibrary, cupti: MockCupti, call: str) -> None:
    sampler.on()
    cupti.c.mock_fail(call.encode(), 999)
    assert sampler.off() == lib.REFUSED
    assert sampler.error.endswith("gave 999")
    assert sampler.off() == lib.OK
    assert cupti.hoard()[0] == 0


def step(library: SamplerLibrary, cupti: MockCupti, name: bytes) -> list[str]:
    """A step that launches one kernel; gives what was called of CUPTI."""
    library.quick.dd_training_step_begin()
    cupti.replay([a_record(name=name)])
    library.quick.dd_training_step_end()
    return cupti.calls()


def test_a_step_that_was_armed_is_recorded_and_no_other(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    assert step(sampler, cupti, b"before") == []
    assert sampler.arm() == lib.OK
    assert cupti.calls() == [], "arming switches nothing"
    assert step(sampler, cupti, b"armed") == ["register", "enable(10)", "disable(10)"]
    assert step(sampler, cupti, b"after") == []
    assert sampler.off() == lib.OK
    taken = sampler.take()
    assert ([key.name for key in taken.sums], taken.totals.steps) == (["armed"], 1)
    assert sampler.take().totals.steps == 0
    assert sampler.step_error() is None


def test_it_stays_on_over_the_border_of_steps_that_are_both_armed(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    begin, end = sampler.quick.dd_training_step_begin, sampler.quick.dd_training_step_end
    sampler.arm()
    begin()
    assert cupti.calls() == ["register", "enable(10)"]
    for number in range(3):
        sampler.arm()
        end()
        cupti.replay([a_record(name=b"between %d" % number)])
        begin()
        assert cupti.calls() == []
    sampler.arm(lib.COPIES)
    end()
    begin()
    assert cupti.calls() == ["enable(1)"], "only what is asked for besides is switched"
    end()
    assert cupti.calls() == ["disable(10)", "disable(1)"]
    sampler.off()
    taken = sampler.take()
    assert {key.name for key in taken.sums} == {f"between {number}" for number in range(3)}
    assert taken.totals.steps == 5


def test_it_is_armed_again_while_the_step_before_is_still_delivered(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    cupti.c.mock_hold(True)
    sampler.arm()
    step(sampler, cupti, b"first")
    sampler.flush()
    sampler.arm()
    cupti.calls()
    assert step(sampler, cupti, b"second") == ["enable(10)", "disable(10)"], "what is registered stays so"
    assert sampler.take().sums == {}
    cupti.c.mock_hold(False)
    sampler.flush()
    assert {key.name for key in sampler.take().sums} == {"first", "second"}


def test_a_step_that_switches_nothing_waits_for_no_flush(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    # Through a door that lets others run: a step that waits is to fail by its time.
    door = ctypes.CDLL(sampler.quick._name)
    begin, end = door.dd_training_step_begin, door.dd_training_step_end
    for armed in (True, False):
        if armed:
            sampler.arm()
            begin()
        cupti.c.mock_gate(True)
        flushing = threading.Thread(target=sampler.flush)
        flushing.start()
        try:
            until(lambda: cupti.c.mock_waiting() == 1, 20, "a flush that waits")
            for _ in range(2):
                assert (sampler.arm() if armed else 0) == lib.OK
                end()
                begin()
        finally:
            cupti.c.mock_gate(False)
            flushing.join()
        end()
    assert cupti.calls() == ["register", "enable(10)", "flush(0)", "disable(10)", "flush(0)"]
    assert sampler.take().totals.steps == 3


def test_steps_are_heard_of_by_way_of_the_native_tracers_functions(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    signals = StepSignals(sampler.quick)
    signals.look()
    sampler.arm()
    assert cupti.calls() == []
    signals.turn()
    assert cupti.calls() == ["register", "enable(10)"]
    signals.turn()
    assert cupti.calls() == ["disable(10)"]
    sampler.arm()
    signals.turn()
    signals.close()
    assert cupti.calls() == ["enable(10)", "disable(10)"]


@pytest.mark.parametrize("act", ["off", "pause"])
def test_what_was_asked_for_is_taken_back(sampler: SamplerLibrary, cupti: MockCupti, act: str) -> None:
    begin, end = sampler.quick.dd_training_step_begin, sampler.quick.dd_training_step_end
    sampler.on()
    sampler.arm()
    getattr(sampler, act)()
    cupti.calls()
    assert step(sampler, cupti, b"not armed any more") == []
    sampler.arm()
    begin()
    sampler.arm()
    getattr(sampler, act)()
    cupti.calls()
    end()
    begin()
    assert cupti.calls() == [], f"{act}() in a step holds over its end, too"
    end()


def test_one_that_was_switched_on_by_hand_is_on_until_it_is_switched_off(
    sampler: SamplerLibrary, cupti: MockCupti
) -> None:
    sampler.arm()
    sampler.quick.dd_training_step_begin()
    sampler.on()
    cupti.calls()
    sampler.quick.dd_training_step_end()
    assert cupti.calls() == []
    sampler.pause()
    assert cupti.calls() == ["disable(10)"]


@pytest.mark.parametrize(
    ("call", "said"),
    [("enable(10)", "cuptiActivityEnable gave 39"), ("disable(10)", "cuptiActivityDisable gave 39")],
)
def test_what_cupti_refuses_a_step_is_kept(sampler: SamplerLibrary, cupti: MockCupti, call: str, said: str) -> None:
    cupti.c.mock_fail(call.encode(), 39)
    sampler.arm()
    step(sampler, cupti, b"refused")
    assert (sampler.step_error(), sampler.step_error()) == (said, None)
    assert sampler.take().totals.steps == (call != "enable(10)")
    cupti.c.mock_fail(b"", 0)
    assert step(sampler, cupti, b"not armed") == []
    sampler.arm()
    step(sampler, cupti, b"armed")
    assert (sampler.step_error(), sampler.take().totals.steps) == (None, 1)


Tag = tuple[bytes | None, bytes | None]


def hand_over(
    library: SamplerLibrary, trace: int, span: int, has_priority: bool, priority: int, tags: Sequence[Tag]
) -> None:
    names, values = ((ctypes.c_char_p * len(tags))(*texts) for texts in (zip(*tags, strict=True) if tags else ((), ())))
    function = library.quick.dd_set_global_parent_context
    function.argtypes = SET_ARGUMENTS
    function(trace % 2**64, trace >> 64, span, has_priority, priority, names, values, len(tags))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    trace=st.integers(0, 2**128 - 1),
    span=st.integers(1, 2**64 - 1),
    priority=st.none() | st.integers(-(2**31), 2**31 - 1),
    tags=st.lists(st.tuples(*[st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=80)] * 2)),
)
def test_a_parent_is_kept_as_it_was_handed_over(
    closed: SamplerLibrary, trace: int, span: int, priority: int | None, tags: list[tuple[str, str]]
) -> None:
    tags = [(name.encode()[:63].decode(errors="ignore"), value[:60]) for name, value in tags]
    encoded = [(name.encode(), value.encode()) for name, value in tags]
    hand_over(closed, trace, span, priority is not None, 7 if priority is None else priority, encoded)
    most = closed.limits.tags
    assert closed.parent() == lib.Parent(trace, span, priority, tuple(tags[:most]), max(0, len(tags) - most))
    closed.quick.dd_clear_global_parent_context()
    assert closed.parent() is None


def test_of_a_long_tag_the_beginning_is_kept(closed: SamplerLibrary) -> None:
    hand_over(closed, 1, 2, True, 1, [(b"n" * 9999, b"v" * 9999), (b"rank", b"3")])
    parent = closed.parent()
    assert parent is not None
    assert parent.tags == (("n" * (closed.limits.tag_name - 1), "v" * (closed.limits.tag_value - 1)), ("rank", "3"))


def test_tags_that_are_not_there_are_left_out(closed: SamplerLibrary) -> None:
    hand_over(closed, 1, 2, False, 0, [(None, b"1"), (b"rank", None), (b"service", b"zug")])
    assert closed.parent() == lib.Parent(1, 2, None, (("service", "zug"),), 2)
    closed.quick.dd_set_global_parent_context(1, 0, 2, False, 0, None, None, 3)
    assert closed.parent() == lib.Parent(1, 2, None, (), 3)


def test_it_is_found_where_it_is_built_of_this_version(
    libraries: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.c"
    other.write_text(f"unsigned ks_interface(void) {{ return {lib.INTERFACE - 1}; }}")
    (tmp_path / "text.so").write_text("no library")
    stale = compiled([other], tmp_path / "other.so", "-shared", "-fPIC")
    for file, found in (
        (libraries[0], libraries[0]),
        (stale, None),
        (libraries[1], None),
        (tmp_path / "text.so", None),
        (tmp_path / "nothing.so", None),
    ):
        monkeypatch.setattr(lib, "_FILE", file)
        assert lib.find() == found


def test_nobody_else_sees_its_functions(closed: SamplerLibrary) -> None:
    assert closed.quick.dd_training_step_begin
    for name in ("dd_training_step_begin", "dd_set_global_parent_context", "ks_on"):
        with pytest.raises(AttributeError):
            ctypes.PyDLL(None)[name]


def test_the_libcupti_that_is_mapped_is_found(tmp_path: Path, libraries: tuple[Path, Path]) -> None:
    (tmp_path / "a lib").mkdir()
    file = tmp_path / "a lib" / "libcupti.so.13"
    assert lib.libcupti() is None
    shutil.copy(libraries[1], file)
    ctypes.CDLL(str(file))
    assert lib.libcupti() == str(file)
    file.unlink()
    assert lib.libcupti() is None, "it is there no more"


def test_two_names_that_are_no_text_stay_two(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    sampler.on()
    cupti.replay([a_record(name=name) for name in (b"\xff", b"\xfe", "\ufffd".encode())])
    sampler.off()
    assert {key.name for key in sampler.take().sums} == {"\\xff", "\\xfe", "\ufffd"}


def status_of(child: int) -> int:
    try:
        _, status = until(lambda: ended if (ended := os.waitpid(child, os.WNOHANG))[0] else None, 10, "the child's end")
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_off_and_never_waits(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    hand_over(sampler, 3, 4, False, 0, [])
    sampler.arm()
    sampler.quick.dd_training_step_begin()
    cupti.replay([a_record()])
    cupti.c.mock_gate(True)
    switching = threading.Thread(target=sampler.off)
    switching.start()
    until(lambda: cupti.c.mock_waiting() == 1, 20, "a flush that waits")
    cupti.calls()
    child = os.fork()
    if child == 0:
        try:
            cupti.c.mock_gate(False)
            acts = (sampler.on, sampler.pause, sampler.flush, sampler.off, sampler.arm)
            said = {act() for act in acts} | {sampler.open("libm.so.6"), sampler.keep(3)}
            step(sampler, cupti, b"in a child")
            hand_over(sampler, 1, 2, True, 3, [])
            said |= {lib.FORKED} if sampler.parent() is sampler.step_error() is None else {lib.OK}
            silent = said == {lib.FORKED} and sampler.error == "off in a forked child" and cupti.calls() == []
            os._exit(0 if silent and cupti.hoard()[0] == 0 else 1)
        finally:
            os._exit(2)
    try:
        assert status_of(child) == 0
    finally:
        cupti.c.mock_gate(False)
        switching.join()
    assert sampler.take().totals.records == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_no_parent_even_where_nothing_was_opened(closed: SamplerLibrary) -> None:
    hand_over(closed, 3, 4, False, 0, [])
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if closed.parent() is None else 1)
        finally:
            os._exit(2)
    assert status_of(child) == 0
    assert closed.parent() is not None


@pytest.mark.usefixtures("sampler")
def test_what_comes_at_exit_does_no_harm(tmp_path: Path) -> None:
    code = """if True:
        import sys, time
        from harness.kernel_sampler import MockCupti, Record
        from pathlib import Path
        from ddtrace_pytorch.kernels.sampler_library import SamplerLibrary
        here = Path(sys.argv[1])
        # What was loaded first is left first.
        sampler, cupti = SamplerLibrary(here / "kernel_sampler.so"), MockCupti(here / "mock_cupti.so")
        cupti.c.mock_deliver_at_exit()
        assert sampler.open(cupti.library) == sampler.on() == 0
        cupti.replay([Record(time.time_ns() - 9, time.time_ns())])
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    place = {**os.environ, "PYTHONPATH": f"{SOURCES.parent}:{SOURCES.parent.parent}"}
    done = subprocess.run(command, env=place, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "208 bytes delivered\n", "")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_million_records_leave_memory_as_it_was(sampler: SamplerLibrary, cupti: MockCupti) -> None:
    sampler.keep(sampler.limits.raws)
    sampler.on()
    names = [f"void kernel_{number}<float, {'x' * 80}>(int)".encode() for number in range(200)]
    records = [a_record(name=names[number % 200], stream=number % 3) for number in range(1000)]
    counted = 0

    def replay_and_take(times: int) -> int:
        cupti.replay(records, times)
        sampler.flush()
        return int(sampler.take().totals.records)

    for _ in range(4):
        counted += replay_and_take(250)
    before = resident()
    for _ in range(10):
        counted += replay_and_take(900)
    assert counted == 10_000_000
    assert resident() - before < 1 << 20


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_threads_that_switch_take_and_complete_at_once(tmp_path: Path, sanitizers: str) -> None:
    flags = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g", "-O1", "-pthread")
    mock = ks.build_mock(tmp_path, *flags)
    sources = [SOURCES / "kernel_sampler_race.c", OURS / "kernel_sampler.c"]
    driver = compiled(sources, tmp_path / "race", "-Wextra", *flags)
    # The thread sanitizer of older compilers can't place its memory where addresses are very random.
    steady = ["setarch", "-R"] if subprocess.run("setarch -R true", shell=True).returncode == 0 else []
    done = subprocess.run([*steady, str(driver), str(mock)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("every byte is accounted for")
