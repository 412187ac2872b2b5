"""`ddtrace-pytorch timeline` on run logs from the product's own encoder, read back as a trace viewer does."""

from __future__ import annotations

import gzip
import io
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from harness.story import SECOND, T0, Record, at, ended
from harness.trace_events import Event, arrows, checked
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.runlog.reader import scan
from ddtrace_pytorch.runlog.schema import SegmentName, decode, encode, safe_name
from ddtrace_pytorch.timeline.chrome import Chrome, ChromeSink
from ddtrace_pytorch.timeline.drawing import Asked, _Lines, draw
from ddtrace_pytorch.timeline.quick import LeftOut, sieve
from ddtrace_pytorch.timeline.selection import Steps, Thinning, Window, thinning_for

MS = 1_000_000


def identity(rank: int = 0, **more: Any) -> Record:
    job = {"id": more.pop("job", "4242"), "incarnation": more.pop("incarnation", "aaa"), "attempt": None}
    return {
        "type": "identity", "ts": T0, "schema": 1, "rank": rank, "world_size": 2, "host": "host-a", "pid": 1000 + rank,
        "source": "trainer", "job": job, "device": None, "tags": {}, **more,
    }  # fmt: skip


# What other jobs left on this machine is of no concern here.
ALONE = {"COLUMNS": "300", "DD_PYTORCH_STATE_DIR": "/nonexistent"}


def step(number: int, seconds: float = 1.0, **more: Any) -> Record:
    begin = at(number)
    return {
        "type": "step", "ts": begin + round(seconds * SECOND), "step": number, "start": begin,
        "duration": round(seconds * SECOND), "metrics": more.pop("metrics", {}), **more,
    }  # fmt: skip


def call(number: int, start: float, seconds: float, group: str = "0", **more: Any) -> Record:
    return {
        "type": "call", "ts": at(start + seconds), "op": "all_reduce", "group": group, "key": number,
        "start": at(start), "duration": at(start + seconds) - at(start), "bytes": 16, "source": "completion", **more,
    }  # fmt: skip


def span(name: str, start: float, end: float, **more: Any) -> Record:
    return {
        "type": "user_span", "ts": at(end), "name": name, "seq": 1, "thread": "MainThread", "id": "7",
        "start": at(start), "duration": at(end) - at(start), **more,
    }  # fmt: skip


def told(name: str, start: float, end: float, resource: str = "", **more: Any) -> Record:
    return {
        "type": "span", "ts": at(end), "name": name, "resource": resource, "start": at(start),
        "duration": at(end) - at(start), "error": 0, "tags": {}, "metrics": {}, **more,
    }  # fmt: skip


def write(root: Path, records: Iterable[Record], rank: int = 0, **who: Any) -> Path:
    first = identity(rank, **who)
    folder = root / safe_name(first["job"]["id"]) / first["job"]["incarnation"] / (who.get("folder") or "")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / str(SegmentName(rank, who.get("claim", 0), 0))
    path.write_bytes(b"".join(map(encode, (first, *records))))
    return path


def run(root: Path, *args: object) -> Result:
    return CliRunner().invoke(cli, ["timeline", str(root), "-o", str(root / "out.json"), *map(str, args)], env=ALONE)


def timeline(root: Path, *args: object) -> list[Event]:
    result = run(root, *args)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return checked((root / "out.json").read_bytes())


def names(events: list[Event], phases: str = "X") -> Counter[str]:
    return Counter(one["name"] for one in events if one["ph"] in phases)


def of(events: list[Event], name: str) -> Event:
    (one,) = [one for one in events if one["name"] == name]
    return one


def track(events: list[Event], one: Event) -> str:
    (name,) = [
        other["args"]["name"]
        for other in events
        if other["name"] == "thread_name" and (other["pid"], other["tid"]) == (one["pid"], one["tid"])
    ]
    return str(name)


def processes(events: list[Event]) -> list[str]:
    return [one["args"]["name"] for one in events if one["name"] == "process_name"]


def drawn_of(result: Result) -> tuple[int, int]:
    """How many records were drawn, of how many."""
    (line,) = [line for line in result.stdout.splitlines() if " drawn of " in line]
    words = line.replace(",", "").split()
    return int(words[words.index("drawn") - 2]), int(words[words.index("of") + 1])


ALL_KINDS = [
    step(1, metrics={"data_ns": 200 * MS, "device.memory.allocated": 10, "device.memory.peak": 20}),
    span("forward", 1.2, 1.4, step=1),
    span("work", 1.1, 1.5, step=1, attributes={"tokens": 3}),
    call(1, 1.5, 0.1, step=1),
    {"type": "event", "ts": at(1.6), "name": "new best", "seq": 3, "step": 1},
    {"type": "event", "ts": at(1.6), "name": "stall", "tags": {"op": "all_reduce"}},
    {"type": "scalar", "ts": at(1.7), "seq": 4, "metrics": {"loss": 0.5, "lr": 1}},
    {"type": "scalar", "ts": at(1.8), "seq": 5, "metrics": {"loss": math.nan}},
    {"type": "summary", "ts": at(2), "start": at(1), "name": "pytorch.steps", "resource": "none", "metrics": {}},
    {"type": "beat", "ts": at(2), "seq": 1, "steps": 1, "calls": 1},
    {"type": "state", "ts": at(2), "why": "stall", "state": {}},
    {"type": "verdict", "ts": at(2), "kind": "absent", "message": "rank 1 has not entered it"},
    {"type": "drop", "ts": at(2), "reason": "too many", "count": 3, "bytes": 0},
    told("pytorch.checkpoint", 2, 3, "/ckpt/1"),
    told("pytorch.stall", 1, 2, "absent", error=1),
    told("pytorch.collective", 1.5, 1.6, "all_reduce"),
    told("pytorch.profile", 1.5, 1.6, "window 1"),
    {**ended("destroyed", 4), "resource": "rank 0", "duration": at(4) - T0},
    {"type": "of tomorrow", "ts": at(3), "name": "x", "much": [1]},
]


def test_each_kind_of_record_is_where_it_belongs(tmp_path: Path) -> None:
    write(tmp_path, ALL_KINDS)
    events = timeline(tmp_path)
    places = {
        "step 1": "steps", "waiting for data": "waiting for data", "forward": "MainThread", "work": "MainThread",
        "all_reduce #1": "collectives", "new best": "events", "stall": "stalls", "loss: nan": "numbers that are none",
        "none": "totals", "state: stall": "stalls", "rank 1 has not entered it": "stalls", "absent (error)": "stalls",
        "3 not recorded: too many": "run log", "/ckpt/1": "checkpoints", "window 1": "pytorch.profile",
        "all_reduce": "collectives told of one by one", "rank 0": "rank", "of tomorrow x": "run log",
        "identity": "run log",
    }  # fmt: skip
    assert {one["name"]: track(events, one) for one in events if one["ph"] in "Xi"} == places
    counters = [(one["name"], one["args"]) for one in events if one["ph"] == "C"]
    assert sorted(counters, key=str) == [
        ("collectives so far", {"value": 1.0}),
        ("device memory (bytes)", {"allocated": 10.0, "peak": 20.0}),
        ("loss", {"value": 0.5}),
        ("lr", {"value": 1.0}),
    ]
    assert of(events, "loss: nan")["args"]["metrics"] == {"loss": "NaN"}
    assert of(events, "work")["args"]["attributes"] == {"tokens": 3}
    # Nothing is rounded.
    assert of(events, "work")["ts"] - of(events, "step 1")["ts"] == pytest.approx(100_000, abs=0.0005)
    assert of(events, "waiting for data")["dur"] == 200_000


def test_lines_are_in_order_from_top_to_bottom_and_lanes_in_that_of_their_numbers(tmp_path: Path) -> None:
    # Those of the second lane are over first.
    write(tmp_path, [*reversed(ALL_KINDS), span("b", 2, 3, task=2), span("a", 1, 6, task=1), span("c", 5, 7, task=3)])
    events = timeline(tmp_path)
    lines = sorted((one["tid"], one["args"]["name"]) for one in events if one["name"] == "thread_name")
    assert [name for _, name in lines] == [
        "rank", "steps", "waiting for data", "MainThread", "MainThread (2)", "collectives",
        "collectives told of one by one", "checkpoints", "stalls", "events", "numbers that are none", "totals",
        "run log", "pytorch.profile",
    ]  # fmt: skip


def test_each_of_very_many_threads_has_a_line_of_its_own() -> None:
    lines = _Lines(ChromeSink(io.BytesIO(), 0), 1, of=64)
    threads = [lines.get(f"Thread-{number}", True, 0).id for number in range(70_000)]
    assert threads == sorted({*threads})
    assert threads[-1] < lines.get("collectives", False, 0).id < lines.get("checkpoints", False, 0).id


def test_what_is_not_ascii_is_written_as_it_is(tmp_path: Path) -> None:
    """The viewer shows what an escape says, as it is: a process would be called "rank 0 \\u00b7 host"."""
    said = "Schritt – 步骤 😀"
    write(
        tmp_path,
        [span(said, 1, 2, thread=said, attributes={said: said}), {"type": "scalar", "ts": at(1), "metrics": {said: 1}}],
        host=said,
    )
    events = timeline(tmp_path)
    data = (tmp_path / "out.json").read_bytes()
    assert b"\\u" not in data
    assert data.count(said.encode()) == 8
    assert of(events, "process_name")["args"]["name"] == f"rank 0 · {said}"
    assert [one["args"]["attributes"] for one in events if one["ph"] == "X"] == [{said: said}]
    # Of an object with an escape in a name it shows nothing from there on.
    assert run(tmp_path, "--format", "pftrace").exit_code == 0
    data = (tmp_path / "out.json").read_bytes()
    assert b"\\u" not in data
    assert f'{{"{said}":"{said}"}}'.encode() in data


def test_every_record_is_drawn_with_every_1(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, ALL_KINDS * 3, rank)
    result = run(tmp_path, "--every", 1)
    assert drawn_of(result) == (3 * (1 + 3 * len(ALL_KINDS)),) * 2
    assert "left out" not in result.output
    checked((tmp_path / "out.json").read_bytes())


def test_ranks_are_named_by_host_gpu_and_mesh_in_their_order(tmp_path: Path) -> None:
    gpu = {"device.id": "GPU-1a2b3c4d-5e6f", "device.kind": "cuda"}
    late = {**identity(10), "tags": {"pytorch.mesh.dp": 3, "pytorch.mesh.dp.size": 4, "pytorch.mesh.tp": 1}}
    write(tmp_path, [late], 10, device=gpu)
    write(tmp_path, [], 9, device={"device.id": "host-a:cuda:1", "device.kind": "cuda"})
    write(tmp_path, [], 2, host="host-b", device={"device.id": "host-b:cpu", "device.kind": "cpu"})
    assert processes(timeline(tmp_path)) == [
        "rank 02 · host-b",
        "rank 09 · host-a · cuda:1",
        "rank 10 · host-a · GPU-1a2b3c4d · dp=3 tp=1",
    ]


def test_tasks_have_lines_of_their_own_and_nested_spans_share_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            span("a.inner", 2, 3, task=1), span("b", 4, 5, task=2), span("a", 1, 6, task=1), span("c", 6, 7, task=3),
            span("io", 1, 6, thread="worker"),
        ],
    )  # fmt: skip
    events = timeline(tmp_path)
    assert {one["name"]: track(events, one) for one in events if one["ph"] == "X"} == {
        "a.inner": "MainThread", "a": "MainThread", "b": "MainThread (2)", "c": "MainThread", "io": "worker",
    }  # fmt: skip


def test_an_arrow_joins_one_collective_from_who_came_first_to_who_came_last(tmp_path: Path) -> None:
    starts = {0: 2.1, 1: 2.0, 2: 2.3, 3: 2.2}
    for rank, start in starts.items():
        # Of each rank other calls are there as well, and at other places of the log.
        others = [call(number, 1 + number / 100, 0.001, group=f"only {rank}") for number in range(rank)]
        write(tmp_path, [*others, call(7, start, 2.5 - start)], rank)
    found = arrows(timeline(tmp_path))
    assert [sorted(points) for points in found.values()] == [[(1, "t"), (2, "s"), (3, "f"), (4, "t")]]


def a_job(root: Path, without: tuple[int, str, int] | None = None, **options: Any) -> Path:
    """Three ranks, of which each lacks one call; `without`: rank, group and number of one call more."""
    for rank in range(3):
        calls = [
            call(number, number + rank / 10, 0.5 - rank / 10, group, step=number)
            for number in range(1, 9)
            for group in ("0", "1")
            if number != rank + 3 and (rank, group, number) != without
        ]
        write(root, [*(step(number) for number in range(1, 9)), *calls], rank, **options)
    return root


@pytest.mark.parametrize("lost", [(0, "0", 1), (1, "1", 2), (2, "0", 8), (1, "0", 3)])
def test_a_record_that_is_missing_changes_no_arrow_but_its_own(tmp_path: Path, lost: tuple[int, str, int]) -> None:
    whole = arrows(timeline(a_job(tmp_path / "whole"), "--every", 1))
    less = arrows(timeline(a_job(tmp_path / "less", lost), "--every", 1))
    assert len(whole) == 16
    changed = {id for id in whole.keys() | less.keys() if whole.get(id) != less.get(id)}
    assert len(changed) == 1


def test_a_call_told_of_twice_has_one_point_and_two_of_one_number_have_none(tmp_path: Path) -> None:
    tags, metrics = {"collective.group_name": "0"}, {"collective.seq": 1}
    both = [call(1, 1, 0.5), told("pytorch.collective", 1, 1.5, "all_reduce", tags=tags, metrics=metrics)]
    write(tmp_path, [*both, call(2, 2, 0.5)], 0)
    write(tmp_path, [*both, call(2, 2, 0.5), call(2, 3, 0.5)], 1)
    assert [*arrows(timeline(tmp_path)).values()] == [[(1, "s"), (2, "f")]]


def test_hosts_are_put_on_one_clock(tmp_path: Path) -> None:
    apart = -3 * SECOND
    write(tmp_path, [call(number, number, 0.5) for number in range(1, 6)], 0)
    late = [call(number, number + 0.2, 0.3) for number in range(1, 6)]
    moved = [{**one, "ts": one["ts"] + apart, "start": one["start"] + apart} for one in late]
    write(tmp_path, [*moved, {"type": "event", "ts": at(9) + apart, "name": "end", "seq": 1}], 1, host="host-b")
    result = run(tmp_path)
    events = checked((tmp_path / "out.json").read_bytes())
    begun = sorted(one["ts"] for one in events if one["name"] == "all_reduce #1")
    assert begun[1] - begun[0] == pytest.approx(200_000)
    assert of(events, "end")["ts"] - begun[0] == pytest.approx(8_000_000)
    assert "clock of host-b: +3s by 5 collectives with host-a, residual 0s" in result.stdout
    assert "WARNING" not in result.output


def test_hosts_that_share_nothing_are_not_aligned_and_that_is_said(tmp_path: Path) -> None:
    write(tmp_path, [call(1, 1, 0.5)], 0)
    # Not blocking: its end says nothing of the others.
    write(tmp_path, [call(1, 5, 0.5, source="issue")], 1, host="host-b")
    result = run(tmp_path)
    assert "WARNING: no collective that all wait in links host-b to host-a" in result.stdout
    events = checked((tmp_path / "out.json").read_bytes())
    begun = sorted(one["ts"] for one in events if one["name"] == "all_reduce #1")
    assert begun[1] - begun[0] == pytest.approx(4_000_000)


def test_of_what_does_not_wait_on_the_host_barriers_align_clocks(tmp_path: Path) -> None:
    for rank, apart in ((0, 0.0), (1, 4.0)):
        queued = [call(number, number + apart + rank * 0.1, 0.001, source="issue") for number in range(1, 9)]
        barriers = [call(9, 9.5 + apart - rank * 0.3, 0.5 + rank * 0.3, op="barrier", source="issue")]
        write(tmp_path, [*queued, *barriers], rank, host=f"host-{rank}")
    assert "clock of host-1: -4s by 1 collective with host-0, residual 0s" in run(tmp_path).stdout


def test_ranks_of_one_host_share_a_clock(tmp_path: Path) -> None:
    a_job(tmp_path)
    assert "clock" not in run(tmp_path).output


def test_two_processes_that_were_the_same_rank_are_both_drawn(tmp_path: Path) -> None:
    write(tmp_path, [], 0)
    write(tmp_path, [], 0, host="host-b", claim=1)
    assert processes(timeline(tmp_path)) == ["rank 0 · host-a", "rank 0 · host-b"]


def test_other_sources_of_the_job_are_drawn_with_the_attempt_they_were_there_in(tmp_path: Path) -> None:
    write(tmp_path, [step(1)], incarnation="aaa")
    write(tmp_path, [{**step(1), "start": at(101), "ts": at(102)}], incarnation="bbb", ts=at(100))
    write(tmp_path, [{"type": "beat", "ts": at(8), "seq": 1}], incarnation="ccc", source="rollout", ts=T0 - SECOND)
    write(tmp_path, [{"type": "beat", "ts": at(110), "seq": 1}], incarnation="ddd", source="reward", ts=at(50))
    assert processes(timeline(tmp_path)) == ["rank 0 · host-a", "reward 0 · host-a"]
    before = [{"type": "beat", "ts": T0 - 5 * SECOND, "seq": 1}]
    write(tmp_path, before, incarnation="eee", source="prepare", ts=T0 - 9 * SECOND)
    assert processes(timeline(tmp_path, "--attempt", 1)) == [
        "rank 0 · host-a", "rollout 0 · host-a", "reward 0 · host-a", "prepare 0 · host-a"
    ]  # fmt: skip
    assert processes(timeline(tmp_path, "--attempt", "all"))[0] == "attempt 1 · rank 0 · host-a"


def test_the_newest_job_is_drawn_and_the_others_are_listed(tmp_path: Path) -> None:
    write(tmp_path, [step(1)], job="old")
    write(tmp_path, [step(2)], job="new", ts=at(5))
    result = run(tmp_path)
    assert result.stdout.splitlines()[:3] == [
        "Jobs here, newest first; this is the first, --job names another:", "  new", "  old"
    ]  # fmt: skip
    assert names(checked((tmp_path / "out.json").read_bytes())) == {"step 2": 1}
    assert names(timeline(tmp_path, "--job", "ol")) == {"step 1": 1}


def test_ranks_are_chosen(tmp_path: Path) -> None:
    for rank in range(6):
        write(tmp_path, [], rank)
    assert len(processes(timeline(tmp_path, "--ranks", "0-2,5"))) == 4
    nothing = run(tmp_path, "--ranks", "7-9")
    assert nothing.exit_code == 2
    assert "no rank 7-9 in job 4242; the ranks there: 0-5" in nothing.output
    assert run(tmp_path, "--ranks", "x").exit_code == 2


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        (("--last-steps", 2), {7, 8}), (("--steps", "2:3"), {2, 3}), (("--steps", "7:"), {7, 8}),
        (("--steps", ":1"), {1}), (("--steps", "4"), {4}), (("--last-steps", 99), {*range(1, 9)}),
    ],
)  # fmt: skip
def test_steps_are_chosen(tmp_path: Path, asked: tuple[object, ...], steps: set[int]) -> None:
    beats = [{"type": "beat", "ts": at(second + 0.5), "seq": second, "steps": second} for second in range(20)]
    more = [*beats, {**ended("destroyed", 20), "duration": 20 * SECOND}]
    a_job(tmp_path)
    path = tmp_path / "4242" / "aaa" / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes() + b"".join(map(encode, more)))
    events = timeline(tmp_path, *asked)
    assert {one["args"]["step"] for one in events if one["name"].startswith(("step ", "all_reduce"))} == steps
    assert {one["args"]["value"] for one in events if one["name"] == "steps so far"} == steps
    # What was all the time is cut to what is shown.
    assert of(events, "span" if "span" in names(events) else "pytorch.rank")["dur"] == len(steps) * 1_000_000


def test_steps_that_are_not_there(tmp_path: Path) -> None:
    a_job(tmp_path)
    result = run(tmp_path, "--steps", "100:200")
    assert (result.exit_code, (tmp_path / "out.json").exists()) == (2, False)
    assert "no such steps in job 4242: the last step that is there is 8" in result.output
    for asked, why in (("3:2", "3:2 ends before it begins"), ("x", "x is not of the form A:B, such as 100:200")):
        result = run(tmp_path, "--steps", asked)
        assert result.exit_code == 2
        assert why in result.output
    assert run(tmp_path, "--steps", "1:2", "--last-steps", 3).exit_code == 2


def test_a_rank_without_steps_is_cut_to_the_time_of_the_others(tmp_path: Path) -> None:
    write(tmp_path, [step(number) for number in range(1, 9)])
    asked = [span(f"ask {second}", second + 0.2, second + 0.4) for second in range(1, 9)]
    write(tmp_path, asked, source="rollout", incarnation="bbb")
    assert names(timeline(tmp_path, "--steps", "3:4")) == {"step 3": 1, "step 4": 1, "ask 3": 1, "ask 4": 1}


def test_that_is_on_the_clock_of_all(tmp_path: Path) -> None:
    barriers = [call(number, number + 0.1, 0.1, op="barrier") for number in range(1, 9)]
    late = [{**one, "ts": one["ts"] + 50 * SECOND, "start": one["start"] + 50 * SECOND} for one in barriers]
    asked = [span(f"ask {second}", second + 50.2, second + 50.4) for second in range(1, 9)]
    write(tmp_path, [*late, *asked], 0, host="host-b")
    write(tmp_path, [*barriers, *(step(number) for number in range(1, 9))], 1)
    shown = names(timeline(tmp_path, "--steps", "3:4"))
    assert {name for name in shown if name.startswith(("ask", "step"))} == {"step 3", "step 4", "ask 3", "ask 4"}


def test_every_nth_is_the_same_on_all_ranks_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    a_job(tmp_path)
    path = tmp_path / "4242" / "aaa" / "rank-00000.jsonl"
    failed = span("failed", 3, 4, step=3, error={"type": "E"})
    spans = [span(f"s{number}", number, number + 0.5, step=number) for number in range(1, 9)]
    for rank in range(3):
        # A rank may be in another step when it comes to the same call.
        with path.with_name(f"rank-0000{rank}.jsonl").open("ab") as file:
            file.write(encode(call(12, 8, 0.1 + rank, "1", step=5 + rank)))
    path.write_bytes(path.read_bytes() + b"".join(map(encode, [*spans, failed])))
    result = run(tmp_path, "--every", 4)
    events = checked((tmp_path / "out.json").read_bytes())
    assert {name for name in names(events) if not name.startswith("step")} == {
        "all_reduce #4", "all_reduce #8", "all_reduce #12", "s4", "s8", "failed (error)"
    }  # fmt: skip
    assert names(events)["step 5"] == 3
    assert len(arrows(events)) == 5
    assert names(events)["all_reduce #12"] == 3
    assert (
        "left out, of call, span, user_span all but every 4th: 32 call, 6 user_span (--every 1 draws all)"
        in result.stdout
    )
    drawn, read = drawn_of(result)
    assert read - drawn == 38


def test_a_large_picture_is_thinned_to_the_limit(tmp_path: Path) -> None:
    for rank in range(2):
        many = [record for number in range(1, 400) for record in (step(number), call(number, number, 0.5, step=number))]
        spans = [span(f"s{n}", n / 10, n / 10 + 0.05, step=n // 10) for n in range(10, 4000)]
        write(tmp_path, [*many, *spans], rank)
    logs = [(None, log) for log in scan(str(tmp_path)).logs]
    for limit in (2_000_000, 500_000, 150_000, 60_000):
        with (tmp_path / "out.json").open("wb") as file:
            found = draw(logs, Asked(limit=limit), Chrome(), file)
        assert limit / 6 < found.written <= limit
        assert found.thinning != Thinning()
        assert (found.thinning.coarse > 1) is (limit < 300_000)
        checked((tmp_path / "out.json").read_bytes())


MANY_PROCESSES = """
import os
from ddtrace_pytorch.timeline import crew
os.sched_getaffinity = lambda pid: {0, 1, 2}
crew.WORTH_IT = 0
from ddtrace_pytorch.cli.main import main
main()
"""


@pytest.mark.parametrize("options", [(), ("--every", "2", "--steps", "3:6")])
def test_several_processes_draw_the_same_as_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    a_job(tmp_path)
    for rank in range(3, 7):
        write(tmp_path, [*ODD, *ALL_KINDS, call(4, 4, 0.5)], rank, host=f"host-{rank}")
    with (tmp_path / "4242" / "aaa" / "rank-00001.jsonl").open("ab") as file:
        file.write(b"{nonsense}\n")
    out = tmp_path / "out.json"
    alone = run(tmp_path, *options).stdout
    expected = out.read_bytes()
    out.unlink()
    command = [sys.executable, "-c", MANY_PROCESSES, "timeline", str(tmp_path), "-o", str(out), *options]
    together = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ALONE}, check=True)
    assert together.stdout == alone
    assert "skipped 1 damaged line" in alone
    assert out.read_bytes() == expected


def test_how_much_is_thinned() -> None:
    assert thinning_for(50, 50, 100, 200) == Thinning(1, 1)
    assert thinning_for(300, 50, 50, 200) == Thinning(3, 1)
    fine, coarse = (thinning := thinning_for(10_000, 1_000, 50, 200)).fine, thinning.coarse
    assert fine % coarse == 0
    assert 10_000 / fine + 1_000 / coarse + 50 <= 200


HOSTILE = "</script><script>\x1b[31m\u202e\ud800[bold]" + "x" * 5_000


def test_hostile_names_break_neither_the_file_nor_the_terminal(tmp_path: Path) -> None:
    records = [
        span(HOSTILE, 1, 2, thread=HOSTILE, attributes={HOSTILE: HOSTILE}), call(1, 1, 1, group=HOSTILE, op=HOSTILE),
        {"type": "scalar", "ts": at(1), "metrics": {HOSTILE: 1.0, "big": 10**400, "yes": True, "much": "x"}},
        told(HOSTILE, 1, 2, HOSTILE), {"type": HOSTILE, "ts": at(1)},
        {"type": "event", "ts": at(1), "name": "x" * 10**6},
        {"type": "state", "ts": at(1), "why": "x", "state": {"x": "y" * 10**6}},
    ]  # fmt: skip
    write(tmp_path, records, 0, host=HOSTILE, job=HOSTILE, tags={f"pytorch.mesh.{HOSTILE}": 1})
    write(tmp_path, records, 1, host="b", job=HOSTILE, source=HOSTILE)
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    events = checked((tmp_path / "out.json").read_bytes())
    assert max(len(one["name"]) for one in events) <= 200
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output
    assert (tmp_path / "out.json").stat().st_size < 1_000_000


ODD = [
    {"type": "step", "ts": at(1), "step": "x", "start": None, "duration": -5, "metrics": 3},
    {"type": "step", "ts": at(1), "step": 1, "start": 10**30, "duration": 1},
    {"type": "step", "ts": 10**300, "step": 2},
    {"type": "step", "ts": -5, "step": 2, "start": 0, "duration": 2**61},
    {"type": "user_span", "ts": at(1), "name": [], "duration": "long"},
    {"type": "user_span", "ts": at(1), "thread": 3, "task": 10**40, "start": 1, "duration": 1},
    {"type": "call", "ts": at(1), "key": 10**40, "group": [], "start": 1, "duration": 1, "source": "completion",
     "op": "all_reduce"},
    {"type": "call", "ts": at(1), "key": -1, "start": 2**61, "duration": 1, "source": "completion", "op": "all_reduce"},
    {"type": "span", "ts": at(1), "name": "pytorch.collective", "metrics": {"collective.seq": 1e300}, "tags": 1},
    {"type": "span", "ts": at(1), "metrics": {"collective.seq": math.nan}, "name": "pytorch.collective"},
    {"type": "scalar", "ts": at(1)}, {"type": "beat", "ts": at(1), "calls": "x"}, {"type": "summary", "ts": at(1)},
    {"type": "verdict", "ts": at(1)}, {"type": "drop", "ts": at(1)}, {"type": "identity", "ts": 0, "tags": 5},
    {"type": "event", "ts": at(1)}, {"type": "state", "ts": at(1)}, {"type": "span", "ts": at(1), "metrics": {}},
]  # fmt: skip


def test_odd_records_are_drawn_too(tmp_path: Path) -> None:
    write(tmp_path, ODD, 0, world_size="x")
    write(tmp_path, ODD, 1, host="b", ts=5)
    result = run(tmp_path, "--every", 1)
    assert result.exit_code == 0, repr(result.exception)
    assert drawn_of(result) == (2 * len(ODD) + 2,) * 2
    checked((tmp_path / "out.json").read_bytes())
    assert run(tmp_path, "--last-steps", 1).exit_code == 0


def test_what_can_not_be_read_is_left_out_and_said_once(tmp_path: Path) -> None:
    path = write(tmp_path, [step(1)])
    path.write_bytes(path.read_bytes() + b"{nonsense}\n" + encode(step(2)) + b'{"type":"step","ts"')
    (path.parent / "rank-00001.jsonl").touch()
    (path.parent / "rank-00002.jsonl").write_bytes(b"\0\0\0\n")
    packed = write(tmp_path, [step(3)], 3)
    packed.with_name(packed.name + ".gz").write_bytes(gzip.compress(packed.read_bytes())[:-9])
    packed.unlink()
    result = run(tmp_path)
    assert names(checked((tmp_path / "out.json").read_bytes())) == {"step 1": 1, "step 2": 1, "step 3": 1}
    assert result.stdout.count("skipped 1 damaged line in aaa/rank-00000.jsonl") == 1
    for said in (
        "00000.jsonl, which is cut short",
        "00001.jsonl is empty",
        "00002.jsonl",
        "00003.jsonl.gz is cut short",
    ):
        assert result.stdout.count(said) == 1


@pytest.mark.parametrize(
    ("made", "status", "message"),
    [
        ([], 2, "no directory"),
        ([""], 1, "no run log in"),
        (["rank-00000.jsonl"], 1, "none of the 1 run log(s)"),
    ],
)
def test_where_nothing_can_be_read(tmp_path: Path, made: list[str], status: int, message: str) -> None:
    root = tmp_path / "logs"
    for name in made:
        root.mkdir()
        if name:
            (root / name).touch()
    out = tmp_path / "out.json"
    result = CliRunner().invoke(cli, ["timeline", str(root), "-o", str(out)])
    assert result.exit_code == status
    assert message in result.output
    assert not out.exists()


def test_compressed_by_its_name_and_on_standard_output(tmp_path: Path) -> None:
    a_job(tmp_path)
    plain = timeline(tmp_path)
    out = tmp_path / "out.json.gz"
    said = CliRunner().invoke(cli, ["timeline", str(tmp_path), "-o", str(out)])
    assert said.exit_code == 0
    assert "before compression" in said.output
    assert "before compression" not in run(tmp_path).output
    assert checked(gzip.decompress(out.read_bytes())) == plain
    result = CliRunner().invoke(cli, ["timeline", str(tmp_path), "-o", "-"])
    assert checked(result.stdout_bytes) == plain
    assert "drawn of" in result.stderr


def test_a_reader_that_has_had_enough_gets_no_message(tmp_path: Path) -> None:
    a_job(tmp_path)
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "ddtrace_pytorch.cli.main", "timeline", str(tmp_path), "-o", "-"]
    with open(writes, "wb") as nobody_reads:
        ended = subprocess.run(command, stdout=nobody_reads, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_what_was_there_stays_where_nothing_can_be_written(tmp_path: Path) -> None:
    a_job(tmp_path)
    result = CliRunner().invoke(cli, ["timeline", str(tmp_path), "-o", str(tmp_path / "no" / "out.json")])
    assert (result.exit_code, result.output.count("can't write")) == (1, 1)
    out = tmp_path / "out.json"
    out.write_text("mine")
    assert CliRunner().invoke(cli, ["timeline", str(tmp_path), "-o", str(out), "--steps", "99"]).exit_code == 2
    assert out.read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_steps_are_written_as() -> None:
    assert Steps.parse("3:") == Steps(3)
    assert Steps.parse(":") == Steps()
    with pytest.raises(ValueError, match="x"):
        Steps.parse("x:1")


def test_the_perfetto_package_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, ALL_KINDS)
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    result = run(tmp_path, "--format", "pftrace")
    assert result.exit_code == 2
    assert "pip install 'ddtrace-pytorch[timeline]'" in result.output
    assert not (tmp_path / "out.json").exists()


def test_perfettos_own_format_says_the_same(tmp_path: Path) -> None:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as words

    for rank in range(2):
        write(tmp_path, [*ALL_KINDS, *ODD, span(HOSTILE, 1, 2, attributes={HOSTILE: HOSTILE})], rank)
    events = timeline(tmp_path)
    size = (tmp_path / "out.json").stat().st_size
    # Of each rank, these records, one more, and its identity.
    assert drawn_of(run(tmp_path, "--format", "pftrace", "--every", 1)) == (2 * (len(ALL_KINDS) + len(ODD) + 2),) * 2
    data = (tmp_path / "out.json").read_bytes()
    assert len(data) < size * 0.8

    tracks, interned, depth = {}, {}, Counter()
    found: Counter[tuple[str, str]] = Counter()
    flows: Counter[int] = Counter()
    for packet in words.Trace.FromString(data).packet:
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            continue
        if packet.sequence_flags & words.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
            interned.clear()
        interned |= {one.iid: one.name for one in packet.interned_data.event_names}
        event = packet.track_event
        track = tracks[event.track_uuid]
        process = tracks[track.parent_uuid].process
        assert process.pid > 0
        assert not track.HasField("thread") or track.thread.pid == process.pid != track.thread.tid
        depth[event.track_uuid] += {event.TYPE_SLICE_BEGIN: 1, event.TYPE_SLICE_END: -1}.get(event.type, 0)
        assert depth[event.track_uuid] in (0, 1)
        flows.update(event.flow_ids)
        if event.type == event.TYPE_COUNTER:
            found["C", track.name] += 1
        elif event.type != event.TYPE_SLICE_END:
            found["X" if event.type == event.TYPE_SLICE_BEGIN else "i", interned[event.name_iid]] += 1
    ours: Counter[tuple[str, str]] = Counter()
    for one in events:
        if one["ph"] == "C":
            ours.update(("C", one["name"] if part == "value" else f"{one['name']}: {part}") for part in one["args"])
        elif one["ph"] in "Xi":
            ours[one["ph"], one["name"]] += 1
    assert {key: many for key, many in found.items() if "script" not in key[1]} == {
        key: many for key, many in ours.items() if "script" not in key[1]
    }
    assert sum(found.values()) == sum(ours.values())
    assert sorted(flows.values()) == [2] * len(arrows(events))
    assert [one.process.process_name for one in tracks.values() if one.HasField("process")] == processes(events)
    assert sorted((one.thread.tid, one.thread.thread_name) for one in tracks.values() if one.HasField("thread")) == (
        sorted((one["tid"], one["args"]["name"]) for one in events if one["name"] == "thread_name")
    )


numbers = st.integers(-3, 30)
maybe = st.one_of(st.none(), numbers)
inside = st.dictionaries(st.sampled_from(["step", "key", "seq", '"step":4,"', "x"]), numbers | st.just('},"step":3,'))
some_records = st.one_of(
    st.builds(lambda n, m: step(1, metrics=m) | {"step": n}, numbers, inside),
    st.builds(lambda n, m: call(1, 1, 1, str(m), step=3) | {"key": n}, maybe, inside),
    st.builds(
        lambda n, m, a, e: {
            "type": "user_span", "ts": T0, "name": str(a), **_written(n, m, a), **({"error": {"type": 1}} if e else {})
        },
        maybe, numbers, inside, st.booleans(),
    ),
    st.builds(lambda n, a: {"type": "scalar", "ts": T0, "seq": 4, "metrics": a, **_step(n)}, maybe, inside),
    st.builds(lambda n, m: {"type": "beat", "ts": T0, "seq": n, "groups": m}, numbers, inside),
)  # fmt: skip


def _written(number: int | None, seq: int, attributes: Record) -> Record:
    """In the order in which records of the user's are written."""
    return {"seq": seq, **({"attributes": attributes} if attributes else {}), **_step(number)}


def _step(number: int | None) -> Record:
    return {} if number is None else {"step": number}


@given(some_records, st.integers(1, 4), st.integers(1, 4), st.none() | st.builds(Steps, maybe, maybe))
def test_a_line_that_is_not_parsed_would_have_been_left_out_for_the_same_reason(
    record: Record, fine: int, coarse: int, steps: Steps | None
) -> None:
    window = None if steps is None else Window(steps, at(1), at(2))
    thinning = Thinning(fine, coarse)
    line = encode(record).rstrip()
    why = left_out(window, thinning, record["type"], line)
    known = decode(line)
    assert known is not None
    outside = window is not None and known not in window
    plain = fine == coarse == 1 and (steps is None or steps.all)
    assert not (plain and why)
    if why:
        assert why == ("outside" if outside else "thinned" if known not in thinning else "")


def left_out(window: Window | None, thinning: Thinning, kind: str, line: bytes) -> str:
    """Why a line is not parsed; nothing if it is."""
    counted: LeftOut = Counter()
    sift = sieve(window, thinning, counted)
    parsed = sift is None or bool([*sift([line])])
    assert list(counted.values()) == ([] if parsed else [1])
    assert all(word == kind for word, _ in counted)
    return "".join(why for _, why in counted)


def test_lines_as_they_are_written_are_not_parsed_where_they_are_left_out(tmp_path: Path) -> None:
    def why(one: Record, window: Window | None = None) -> str:
        return left_out(window, Thinning(4, 2), one["type"], encode(one).rstrip())

    window = Window(Steps(2, 9), at(1), at(2))
    records = [
        step(3), step(1), {"type": "user_span", "ts": T0, "name": 'a "b"', **_written(6, 1, {})},
        {"type": "scalar", "ts": T0, "seq": 1, "metrics": {"x": 1.0}, "step": 5},
    ]  # fmt: skip
    assert [why(one, window) for one in records] == ["thinned", "outside", "thinned", "thinned"]
    failed = {**records[2], "error": {"type": "E"}}
    assert why(failed, window) == why(failed) == ""
    beat = {"type": "beat", "ts": T0, "seq": 3, "steps": 4}
    assert [why(one) for one in (*records, call(5, 1, 1), beat)] == ["thinned"] * 6
