"""Profiler windows on paper: when, what their events come to, and the file."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness.exporter import KeepingExporter
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.cli.profile import Pace, first_step
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.kernels import requests, trace_file, window_telling
from ddtrace_pytorch.kernels.aggregates import LONGEST, TOP, Event, aggregate, own_times
from ddtrace_pytorch.kernels.intervals import gaps, length, overlap, union
from ddtrace_pytorch.kernels.profilers import Profilers
from ddtrace_pytorch.kernels.requests import Request, Requests
from ddtrace_pytorch.kernels.schedule import Plan, Schedule
from ddtrace_pytorch.kernels.trace_file import NoTrace
from ddtrace_pytorch.kernels.window_telling import Told
from ddtrace_pytorch.kernels.windows import Windows
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.runlog.schema import RECORDS, REQUEST, is_trace
from ddtrace_pytorch.settings import load, rank_choice
from ddtrace_pytorch.timeline.marks import WINDOWS, Moment, Slice, marks
from ddtrace_pytorch.training.observer import Training
from ddtrace_pytorch.training.progress import Progress, Step
from ddtrace_pytorch.training.steps import Steps

EVERY_500 = Schedule(every=500, warmup=2, active=3)


@pytest.mark.parametrize(
    ("schedule", "step", "first"),
    [
        (EVERY_500, 1, None),
        (EVERY_500, 497, None),
        (EVERY_500, 498, 500),
        (EVERY_500, 500, 500),
        # One that can't have all of its steps any more is not begun.
        (EVERY_500, 501, None),
        (EVERY_500, 1234, None),
        (EVERY_500, 1499, 1500),
        (Schedule(3, 1, 2), 1, None),
        (Schedule(3, 1, 2), 2, 3),
        (Schedule(3, 1, 2), 5, 6),
        (Schedule(2, 0, 2), 2, 2),
        (Schedule(0, 1, 2), 500, None),
    ],
)
def test_windows_are_counted_in_steps_of_the_whole_training(schedule: Schedule, step: int, first: int | None) -> None:
    plan = schedule.plan_at(step)
    assert (plan and plan.first) == first
    assert plan is None or plan.begins_with(step)


@given(st.integers(1, 40), st.integers(0, 10), st.integers(1, 10), st.integers(1, 200))
def test_all_ranks_take_the_same_steps_whenever_they_come_in(every: int, warmup: int, active: int, since: int) -> None:
    schedule = Schedule(every, warmup, active)
    if schedule.overlaps:
        return

    def windows(begin: int) -> list[int]:
        taken, open_ = [], None
        for step in range(begin, 260):
            if open_ is not None and step >= open_.ends_before:
                open_ = None
            if open_ is None and (plan := schedule.plan_at(step)) is not None:
                open_ = plan
                taken.append(plan.first)
        return taken

    whole = windows(1)
    for step in range(1, 200):
        assert all(
            schedule.plan_at(later) in (None, schedule.plan_at(step))
            for later in range(step, schedule.idle_until(step))
        )
        assert schedule.plan_at(schedule.idle_until(step)) is not None
    # The first may come too early to be warmed up.
    assert whole == list(range(every, 260 + warmup, every))[: len(whole)]
    assert windows(since) == [first for first in whole if first >= since]


def test_an_empty_window_is_tried_again_between_it_and_the_next() -> None:
    assert EVERY_500.again(Plan(1000, 3, 2)) == Plan(1130, 3, 2)
    assert Schedule(8, 1, 2).again(Plan(16, 2, 1)) == Plan(21, 2, 1)
    assert Schedule(5, 1, 3).again(Plan(5, 3, 1)) is None
    assert Schedule(5, 1, 4).overlaps is False
    assert Schedule(5, 2, 4).overlaps is True


MINUTES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    return {minute for start, end in intervals for minute in range(start, end)}


@given(MINUTES, MINUTES, st.integers(0, 60), st.integers(0, 60))
def test_intervals_are_as_if_minutes_were_counted(
    one: list[tuple[int, int]], other: list[tuple[int, int]], start: int, end: int
) -> None:
    merged, both = union(one), overlap(union(one), union(other))
    assert covered(merged) == covered(one)
    assert covered(both) == covered(one) & covered(other)
    free = gaps(merged, start, end)
    assert covered(free) == set(range(start, end)) - covered(one)
    for found in (merged, both, free):
        assert length(found) == len(covered(found))
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))


def gpu(name: str, start: int, end: int, stream: int = 7) -> Event:
    return Event(name, start, end, stream, True)


def cpu(name: str, start: int, end: int, thread: int = 1) -> Event:
    return Event(name, start, end, thread, False)


def test_kernels_of_a_gpu_known_to_the_nanosecond() -> None:
    events = [
        cpu("aten::mm", 0, 1000),
        gpu("gemm", 100, 300),
        gpu("gemm", 400, 700),
        gpu("Memcpy HtoD", 650, 720, 13),
        gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 600, 900, 20),
        gpu("relu", 1150, 1300),
    ]
    found = aggregate(events, 0, 1200)
    assert found.of == "kernels"
    assert found.many == 5
    assert found.busy == 200 + 500 + 50  # what begins in the window and ends behind it counts up to there
    assert found.communication == (300, 120, 1)
    assert found.idle == (100 + 100 + 250, 250, 3)
    assert [(one.name[:4], one.many, one.total, one.longest) for one in found.top] == [
        ("gemm", 2, 500, 300), ("nccl", 1, 300, 300), ("relu", 1, 150, 150), ("Memc", 1, 70, 70),
    ]  # fmt: skip
    assert [one.start for one in found.longest] == [100, 400, 600, 650, 1150]


def test_operators_lie_in_each_other_and_count_for_what_is_their_own() -> None:
    events = [
        cpu("step", 0, 100),
        cpu("linear", 10, 60),
        cpu("addmm", 20, 50),
        cpu("c10d::allreduce_", 60, 70),
        cpu("gloo:all_reduce", 62, 120, 2),
    ]
    assert own_times(events) == [40, 20, 30, 10, 58]
    found = aggregate(events, 0, 200)
    assert found.of == "operators"
    assert {one.name: one.total for one in found.top} == {
        "gloo:all_reduce": 58, "step": 50, "addmm": 30, "linear": 20,
    }  # fmt: skip
    assert found.communication == (58, 38, 1)
    assert (found.busy, found.idle) == (120, (80, 80, 1))


def test_of_many_the_first_are_told_and_nothing_is_no_fault() -> None:
    many = [gpu(f"kernel {number:03d}", number * 10, number * 10 + 1 + number % 7) for number in range(100)]
    found = aggregate(many, 0, 1000)
    assert (len(found.top), len(found.longest), found.many) == (TOP, LONGEST, 100)
    assert min(one.end - one.start for one in found.longest) == 4
    none = aggregate([], 0, 10)
    assert (none.busy, none.idle, none.top) == (0, (10, 10, 1), [])
    told = Told("schedule", window_telling.WHOLE, Plan(500, 2), 0, 10, results=none)
    record = told.record()
    assert set(record) <= {"type", "ts", *RECORDS["profile"]}
    [drawn] = marks(record)
    assert isinstance(drawn, Slice)
    assert drawn[:4] == (WINDOWS, "steps 500 to 501", 0, 10)
    [skipped] = marks(Told("schedule", window_telling.SKIPPED, Plan(500, 1), 5, why="nsys").record())
    assert isinstance(skipped, Moment)
    assert skipped.name == "step 500 (skipped)"
    assert told.facts()["profile.busy_share"] == 0
    assert "profile.communication_overlap" not in told.facts()


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "rank-00003_step-000500.json.gz"),
        (
            {"pytorch.mesh.dp": 1, "pytorch.mesh.dp.size": 2, "pytorch.mesh.tp": 0, "pytorch.mesh.tp.size": 4,
             "pytorch.mesh.pp": 0, "pytorch.mesh.pp.size": 1},
            "rank-00003_dp1_tp0_step-000500.json.gz",
        ),
        ({"pytorch.mesh.a/b_c": 7, "pytorch.mesh.a/b_c.size": 8}, "rank-00003_abc7_step-000500.json.gz"),
    ],
)  # fmt: skip
def test_a_trace_is_called_by_where_its_rank_is(facts: dict[str, int], name: str) -> None:
    assert trace_file.name_of(3, trace_file.coordinates(dict(facts)), 500) == name
    assert is_trace(name)


def saves(text: bytes, by_renaming: bool = False) -> object:
    def save(path: str) -> None:
        target = f"{path}.tmp" if by_renaming else path
        with open(target, "wb") as file:
            file.write(text)
        if by_renaming:
            os.rename(target, path)

    return save


NAME = "rank-00003_step-000500.json.gz"


@pytest.mark.parametrize("by_renaming", [False, True])
def test_a_trace_is_compressed_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_renaming: bool
) -> None:
    plain, written = tmp_path / "tmp", tmp_path / "out"
    plain.mkdir()
    written.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(plain))
    text = '{"traceEvents":[{"name":"größe"}]}'.encode() + b" " * 700_000
    # A name that was cut in the middle of a character.
    broken = text.replace("ß".encode(), b"\xc3")
    path, size = trace_file.write(saves(broken, by_renaming), str(written), NAME, 3, 1 << 20)  # type: ignore[arg-type]
    assert os.listdir(written) == [NAME]
    assert os.listdir(plain) == []
    assert os.stat(path).st_size == size
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"] == [{"name": "grö\ufffde"}]
    again, _ = trace_file.write(saves(text), str(written), NAME, 3, 1 << 20)  # type: ignore[arg-type]
    assert os.path.basename(again) == "rank-00003_step-000500-2.json.gz"
    assert is_trace(os.path.basename(again))


def test_the_oldest_traces_of_the_rank_make_room_and_one_that_is_too_large_is_none(tmp_path: Path) -> None:
    for number, name in enumerate(["rank-00003_step-000100", "rank-00003_step-000200", "rank-00004_step-000100"]):
        file = tmp_path / f"{name}.json.gz"
        file.write_bytes(b"." * 400)
        os.utime(file, (number, number))
    path, _ = trace_file.write(saves(b"[]"), str(tmp_path), NAME, 3, 500)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["rank-00003_step-000200.json.gz", NAME, "rank-00004_step-000100.json.gz"]
    large = saves(os.urandom(600_000))
    for limit, goes_on in ((300_000, True), (1 << 20, False)):
        with pytest.raises(NoTrace):
            trace_file.write(large, str(tmp_path), "rank-00003_step-000600.json.gz", 3, limit, lambda: goes_on)  # type: ignore[arg-type]  # noqa: B023
        assert len(os.listdir(tmp_path)) == 3
    assert os.path.exists(path)
    snapshot = trace_file.write_snapshot({"segments": []}, path, 3, 430)
    assert os.path.basename(snapshot) == "rank-00003_step-000500.memory.pickle"
    assert is_trace(os.path.basename(snapshot))
    assert sorted(os.listdir(tmp_path)) == [NAME, os.path.basename(snapshot), "rank-00004_step-000100.json.gz"]
    with pytest.raises(NoTrace):
        trace_file.write_snapshot("." * 500, path, 3, 430)


def test_traces_of_earlier_lives_make_room_too(tmp_path: Path) -> None:
    earlier, now = tmp_path / "earlier", tmp_path / "now"
    for place in (earlier, now):
        place.mkdir()
    old = earlier / "rank-00003_step-000100.json.gz"
    old.write_bytes(b"." * 400)
    os.utime(old, (1, 1))
    trace_file.write(saves(b"[]"), str(now), NAME, 3, 1000, earlier=[str(earlier), str(tmp_path / "gone")])  # type: ignore[arg-type]
    assert old.exists()
    trace_file.write(saves(b"[]"), str(now), NAME, 3, 300, earlier=[str(earlier)])  # type: ignore[arg-type]
    assert not old.exists()
    assert len(os.listdir(now)) == 2


ASKED = Request(Plan(40, 3, 1), rank_choice("0,2-3"))


def test_a_request_is_taken_once_by_the_ranks_it_names_and_goes_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LOOK_SECONDS", 0.0)
    taken: list[tuple[int, Plan]] = []
    past: set[int] = set()

    def seen_by(rank: int) -> Requests:
        return Requests(rank, lambda plan: taken.append((rank, plan)), lambda plan: rank in past)

    ranks = [seen_by(rank) for rank in range(3)]
    path = requests.write(str(tmp_path), ASKED)
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        requests.write(str(tmp_path), ASKED)
    for _ in range(2):
        for one in ranks:
            one.look(str(tmp_path))
    assert taken == [(0, ASKED.plan), (2, ASKED.plan)]
    assert os.listdir(tmp_path) == [REQUEST]
    past.add(1)
    ranks[1].look(str(tmp_path))
    assert os.listdir(tmp_path) == []
    requests.write(str(tmp_path), Request(Plan(90, 1), rank_choice("all")))
    ranks[1].look(str(tmp_path))
    assert taken[2:] == [(1, Plan(90, 1))]


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (b"", 0o600),
        (b"\xff{", 0o600),
        (b"[" * 3000, 0o600),
        (b'{"version":1,"first":40,"steps":3,"warmup":1,"ranks":"all"}', 0o644),
        (b'{"version":1,"first":40,"steps":3,"warmup":1,"ranks":"all"}' + b" " * 5000, 0o600),
        (b'{"version":2,"first":40,"steps":3,"warmup":1,"ranks":"all"}', 0o600),
        (b'{"version":1,"first":true,"steps":3,"warmup":1,"ranks":"all"}', 0o600),
        (b'{"version":1,"first":40,"steps":10000,"warmup":1,"ranks":"all"}', 0o600),
        (b'{"version":1,"first":40,"steps":3,"warmup":1,"ranks":"some"}', 0o600),
        (b'{"version":1,"first":40,"steps":3,"warmup":1}', 0o600),
    ],
)
def test_what_is_no_request_is_said_once_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, mode: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(requests, "warn_first", lambda message, about: said.append(message))
    monkeypatch.setattr(requests, "LOOK_SECONDS", 0.0)
    path = tmp_path / REQUEST
    path.write_bytes(text)
    path.chmod(mode)
    taken: list[Plan] = []
    one = Requests(0, taken.append, lambda plan: True)
    for _ in range(3):
        one.look(str(tmp_path))
    assert (len(said), taken) == (1, [])
    assert path.exists()


def test_a_link_is_no_request(tmp_path: Path) -> None:
    there = requests.write(str(tmp_path), ASKED)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / REQUEST).symlink_to(there)
    with pytest.raises(OSError, match="symbolic"):
        requests.read(str(elsewhere / REQUEST))


def test_a_window_is_asked_for_where_all_ranks_hear_of_it_in_time() -> None:
    assert first_step([Pace(100, 0.01), Pace(101, 0.01)]) == 101 + 2 + 1 + 1
    assert first_step([Pace(100, 20.0), Pace(90, 10.0)]) == 100 + 2 + 1 + 100


def test_the_first_very_slow_step_that_is_not_profiled_has_a_window_soon() -> None:
    exporter: Any = KeepingExporter()
    span, steps = RankSpan(service="pytorch", rank=0, start=1, facts={}), Steps(Progress(), int, int)
    settings = load({"DD_PYTORCH_PROFILE_SLOW": "true", "DD_PYTORCH_PROFILE_ACTIVE": "3"})
    windows = Windows(settings, Clock(), span, exporter, steps, Profilers(), (0, 1, None), lambda: None)
    training = Training(settings, Clock(), span, exporter, steps, None)
    training.open()
    asked: list[tuple[Plan, str]] = []
    training.chosen = lambda step: step.number == 13
    training.very_slow = windows.was_slow
    windows.ask = lambda plan, how: asked.append((plan, how))  # type: ignore[method-assign,misc,assignment]
    for number in range(1, 20):
        steps.progress.begin(Step(number + 1, number + 1))
        took = {13: 60, 15: 40, 16: 51, 18: 70}.get(number, 10)
        training.ended(Step(number, number), (0, 0, 0, 0, 0), (took * 1_000_000, 0, 0, 0, 0))
        training.beat()
    assert asked == [(Plan(19, 3, 1), "slow step")]
