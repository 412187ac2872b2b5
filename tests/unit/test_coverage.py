"""Launched, seen and unseen, as plain numbers: what one reading says, when it may be told, what the recorder adds."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from ddtrace_pytorch.collectives import coverage, flight_recorder
from ddtrace_pytorch.collectives.coverage import Coverage, History, Reading, Tally, Unseen, Window
from ddtrace_pytorch.collectives.flight_recorder import Dump, Entry, Status
from ddtrace_pytorch.ledger import Group, How, Ledger

_records = count()


class NoGroups:
    def actual(self, process_group: Any) -> Any:
        return process_group

    def describe(self, process_group: Any) -> Group | None:
        return process_group  # type: ignore[no-any-return]


def group(size: int = 3, rank: int = 0, backend: str = "gloo") -> Group:
    return Group("0", "world", backend, tuple(range(size)), rank)


def used(calls: dict[str, int], size: int = 3, rank: int = 0, moved: int = 0) -> Group:
    """A group on which each of the operations in `calls` was called so often, each call of `moved` bytes."""
    here = group(size, rank)
    ledger = Ledger(NoGroups())
    for operation, many in calls.items():
        cell = ledger.cell(operation, How.WAITED, False, here)
        assert cell is not None
        for _ in range(many):
            cell.add(0, 1, moved)
    return here


@pytest.mark.parametrize(
    ("operation", "size", "rank", "each"),
    [
        ("send", 2, 0, 1),
        ("recv", 2, 1, 1),
        ("isend", 2, 0, 1),
        ("irecv", 2, 1, 1),
        ("send_object_list", 2, 0, 2),
        ("recv_object_list", 2, 1, 2),
        ("monitored_barrier", 2, 0, 2),
        ("monitored_barrier", 3, 0, 4),
        ("monitored_barrier", 3, 2, 2),
        ("reduce_scatter", 3, 0, 2),
        ("all_reduce", 3, 0, 0),
    ],
)
def test_what_gloo_counts_and_is_no_collective_of_ours(operation: str, size: int, rank: int, each: int) -> None:
    here = used({operation: 5}, size, rank)
    read = coverage.reading(here, "gloo", number=100, before=10, under_way=0)
    assert read.launched == 90 - 5 * each
    assert coverage.under_way(operation, here, "gloo") == 1 + each
    assert coverage.reading(here, "nccl", 100, 10, 0).launched == 90, "NCCL counts P2P apart"


def test_gloo_counts_each_tensor_of_a_coalesced_reduce_scatter() -> None:
    here = used({"reduce_scatter_tensor_coalesced": 2, "all_reduce_coalesced": 1}, moved=100)
    here.calls = 3
    here.scattered = 5  # of three and of four tensors
    read = coverage.reading(here, "gloo", number=8, before=0, under_way=0)
    assert (read.launched, read.unseen) == (3, 0)
    assert read.issued == {"all_reduce": Tally(7 + 1, 300, 0)}
    assert coverage.reading(here, "nccl", 3, 0, 0).launched == 3
    assert coverage.reading(here, "nccl", 3, 0, 0).issued["reduce_scatter_tensor"] == Tally(2, 200, 0)


def test_a_backend_whose_count_is_not_known_to_mean_the_same_is_not_guessed_at() -> None:
    assert coverage.reading(used({"all_reduce": 3}), "ucc", 3, 0, 0).launched == 3
    assert coverage.reading(used({"send": 3}), "ucc", 3, 0, 0).launched is None
    assert coverage.reading(used({"all_reduce": 3}), "mpi", None, 0, 0).launched is None
    assert Coverage(None, 3).facts() == {"collective.group_seen": 3, "collective.coverage": "unknown"}


def test_a_call_under_way_is_neither_seen_nor_unseen() -> None:
    read = Reading(number=8, launched=8, seen=5, issued={}, under_way=1)
    assert read.unseen == 2
    assert read.coverage() == Coverage(launched=7, seen=5)
    assert Reading(5, 5, 5, {}, under_way=1).coverage() == Coverage(5, 5)
    assert Reading(None, None, 5, {}, 0).coverage() == Coverage(None, 5)


def test_functions_on_objects_are_taken_apart_as_the_recorder_has_them() -> None:
    here = used({"gather_object": 2, "scatter_object_list": 1, "reduce_scatter_tensor": 1}, size=3, moved=100)
    issued = coverage.reading(here, "gloo", 0, 0, 0).issued
    assert issued == {
        "all_gather": Tally(2, 2 * 24, 0),
        "gather": Tally(2, 200 - 48, 0),
        "broadcast": Tally(1, 8, 0),
        "scatter": Tally(2, 92, 0),
        "all_reduce": Tally(1, 100, 0),
    }


def settled(number: int, seen: int, **issued: Tally) -> Reading:
    return Reading(number, number, seen, issued, 0)


def test_only_what_two_readings_agree_on_is_settled() -> None:
    history = History("gloo", before=0)
    between = Reading(5, 5, 4, {}, 0)  # a thread has made its fifth call and not counted it yet
    history.add(between, settled(5, 5))
    assert history.take() == Window(0, ())
    history.add(settled(9, 5), settled(9, 5))
    assert history.take() == Window(4, (Reading(0, 0, 0, {}, 0), settled(9, 5)))
    assert history.take() == Window(0, ())
    history.add(settled(12, 6), settled(12, 6))
    assert history.take() == Window(2, (settled(9, 5), settled(12, 6)))


def test_what_was_told_unsettled_is_told_once() -> None:
    history = History("gloo", before=0)
    blocked = Reading(11, 11, 0, {}, under_way=1)
    history.add(blocked, blocked)
    assert history.take() == Window(0, ()), "it may settle"
    assert history.take() == Window(10, ()), "it doesn't"
    history.add(settled(14, 1), settled(14, 1))
    history.add(settled(20, 2), settled(20, 2))
    assert history.take() == Window(8, (settled(14, 1), settled(20, 2)))
    history.add(settled(21, 2)._replace(under_way=1), settled(22, 2)._replace(under_way=1))
    assert history.take(last=True) == Window(0, ())
    history.add(blocked._replace(launched=23, seen=2), blocked._replace(launched=23, seen=2))
    assert history.take(last=True) == Window(2, ())


def entry(number: int, name: str = "all_reduce", size: int | None = 4, **more: Any) -> Entry:
    known: dict[str, Any] = {
        "group": "0", "backend": "gloo", "record": number - 1, "p2p": False, "created": 0, "completed": 0, **more
    }  # fmt: skip
    return Entry(name=name, number=number, input_bytes=size, **known)


def dump(*entries: Entry) -> Dump:
    return Dump(frozenset(), entries)


START = Reading(0, 0, 0, {}, 0)


def test_what_was_not_issued_by_a_wrapper_is_told_by_operation_with_its_bytes() -> None:
    end = settled(6, 2, all_reduce=Tally(1, 4), broadcast=Tally(1, 4))
    entries = [
        entry(1),
        entry(2, size=400),
        entry(3, size=40),
        entry(4, "broadcast"),
        entry(5, "allgather"),
        entry(6, "odd"),
    ]
    assert coverage.attribute(group(), Window(4, (START, end)), dump(*entries)) == [
        Unseen("all_gather", 1, 1, 12),
        Unseen("all_reduce", 2, 2, 440),
        Unseen("odd", 1, 0, 0),
    ]


def test_where_the_buffer_has_wrapped_sizes_are_told_of_what_it_still_holds() -> None:
    readings = (START, settled(10, 5, all_reduce=Tally(5, 20)), settled(20, 10, all_reduce=Tally(10, 40)))
    held = [entry(number, size=4 if number % 2 else 100) for number in range(10, 21)]
    assert coverage.attribute(group(), Window(10, readings), dump(*held)) == [
        Unseen("all_reduce", 5, 5, 500),
        Unseen(None, 5, 0, 0),
    ]
    assert coverage.attribute(group(), Window(10, readings), dump(*held[2:])) == [Unseen(None, 10, 0, 0)]


def test_entries_of_an_earlier_group_of_the_same_name_are_not_this_ones() -> None:
    earlier = [entry(number, size=1_000) for number in range(1, 31)]
    mine = [entry(number, record=29 + number) for number in (1, 2, 3)]
    window = Window(3, (START, settled(3, 0)))
    assert coverage.attribute(group(), window, dump(*earlier, *mine)) == [Unseen("all_reduce", 3, 3, 12)]


def test_nothing_is_claimed_where_the_recorder_and_we_disagree() -> None:
    window = Window(1, (START, settled(3, 2, broadcast=Tally(2, 8))))
    assert coverage.attribute(group(), window, dump(entry(1), entry(2), entry(3))) == [Unseen(None, 1, 0, 0)]
    assert coverage.attribute(group(), window, dump()) == [Unseen(None, 1, 0, 0)]


def test_a_size_that_cannot_be_told_is_not_told() -> None:
    window = Window(2, (START, settled(2, 0)))
    entries = dump(entry(1, size=None), entry(2, "alltoall"))
    assert coverage.attribute(group(), window, entries) == [
        Unseen("all_reduce", 1, 0, 0),
        Unseen("all_to_all", 1, 0, 0),
    ]


# As NCCL's recorder has them: torch 2.11, two H100s.
NCCL = {
    "collective_seq_id": 6, "op_id": 6, "p2p_seq_id": 0, "is_p2p": False, "record_id": 5, "pg_id": 0,
    "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "input_dtypes": ["BFloat16"],
    "input_sizes": [[1024, 3]], "output_dtypes": ["BFloat16"], "output_sizes": [[1024, 3]], "retired": True,
    "state": "completed", "time_created_ns": 1_000_000, "time_discovered_started_ns": 0,
    "time_discovered_completed_ns": 4_000_000, "timeout_ms": 600_000,
}  # fmt: skip


def test_an_entry_of_nccl() -> None:
    assert flight_recorder.entry_of(NCCL) == Entry(
        "0", "nccl", "all_reduce", 6, 5, False, 6144, 1_000_000, 4_000_000, 0, True, (1024, 3), "bfloat16"
    )
    assert flight_recorder.entry_of({**NCCL, "input_dtypes": ["Unheard"]}).input_bytes is None
    older = {key: value for key, value in NCCL.items() if key not in ("collective_seq_id", "record_id", "is_p2p")}
    assert flight_recorder.entry_of({**older, "seq_id": 7, "id": 1})[3:6] == (7, 1, False)


def test_times_to_completion_are_from_issued_to_found_complete() -> None:
    def completed(took: int | None, **more: Any) -> Entry:
        end = None if took is None else 1_000_000 + took
        return flight_recorder.entry_of({**NCCL, "time_discovered_completed_ns": end, **more})

    entries = [
        completed(2_000_000),
        completed(4_000_000),
        completed(None),  # still on its way
        completed(9_000_000),  # after the end of the window
        completed(1_000_000, process_group=["1", "dp"]),
        completed(3_000_000, profiling_name="nccl:_all_gather_base"),
    ]
    found = coverage.completions("0", entries, since=1_500_000, until=8_000_000)
    assert found["all_reduce"].facts() == {
        "collective.completion_source": "flight_recorder",
        "collective.completion_ms.count": 2,
        "collective.completion_ms.mean": 3.0,
        "collective.completion_ms.max": 4.0,
    }
    assert found["all_gather_into_tensor"].calls == 1
    assert len(found) == 2


def test_an_answer_of_the_recorder_is_read_entry_by_entry() -> None:
    head = {"pg_status": {"0": {"last_enqueued_collective": "6"}}, "version": "2.10"}
    entries = [{**NCCL, "record_id": number, "profiling_name": 'nccl:"odd"],['} for number in range(50)]
    answer = json.dumps({"comm_lib_version": "", "entries": entries, **head}, separators=(",", ":")).encode()
    rest, found = flight_recorder.parse(answer)
    assert [one.record for one in found] == list(range(50))
    assert rest == {"comm_lib_version": "", "entries": [], **head}
    assert flight_recorder.parse(json.dumps(head).encode()) == (head, [])


class Module:
    """Stands for the extension of a torch that isn't here."""


def test_of_torch_2_4_the_pickled_recorder_is_read_without_stacks_and_older_ones_are_left_alone() -> None:
    import pickle

    def dump(collectives: bool, stacks: bool, active: bool) -> bytes:
        assert (collectives, stacks, active) == (True, False, False)
        return pickle.dumps({"entries": [NCCL], "version": "2.1"}, protocol=2)

    module: Any = Module()
    recorder = flight_recorder.FlightRecorder(module)
    assert not recorder.exists
    module._dump_nccl_trace = lambda: pytest.fail("it takes stacks, and may deadlock")
    assert not recorder.exists
    dump.__doc__ = "_dump_nccl_trace(includeCollectives, includeStackTraces, onlyActive) -> bytes"
    module._dump_nccl_trace = dump
    assert recorder.exists
    assert recorder.dump() == Dump(frozenset(), (flight_recorder.entry_of(NCCL),))


def test_status_is_how_far_each_group_is() -> None:
    module: Any = Module()
    module._dump_fr_trace_json = lambda collectives, active: (
        b'{"pg_status":{"0":{"last_completed_collective":"5","last_enqueued_collective":"6",'
        b'"last_started_collective":"-1"}},"version":"2.10"}'
    )
    assert flight_recorder.FlightRecorder(module).status() == {"0": Status(enqueued=6, started=-1, completed=5)}


@pytest.mark.parametrize(
    ("release", "environ", "set_to"),
    [
        ((2, 1), {}, {}),  # has none
        ((2, 2), {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ((2, 7), {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ((2, 8), {}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ((2, 10), {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, {}),  # the user's
        ((2, 5), {"TORCH_FR_BUFFER_SIZE": "20"}, {}),
        ((2, 11), {}, {}),  # has one
    ],
)
def test_the_recorder_gets_a_buffer_where_it_has_none(release: Any, environ: Any, set_to: Any) -> None:
    assert flight_recorder.buffer_for(release, environ) == set_to
