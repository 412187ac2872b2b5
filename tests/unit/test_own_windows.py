"""Profiler windows that are taken with the kernel sampler: its library as it is built, and a libcupti that replays."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.kernel_sampler import MockCupti, Record, build_mock, build_sampler, own_copy
from harness.profiled import Job
from harness.sampled import NoGpu, kernels

from ddtrace_pytorch import border
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.kernels import own_trace, windows
from ddtrace_pytorch.kernels.demangling import UNNAMED
from ddtrace_pytorch.kernels.native import Context, NativeParent
from ddtrace_pytorch.kernels.sampler import Sampler
from ddtrace_pytorch.kernels.sampler_library import COPY, KERNEL, Raw, SamplerLibrary
from ddtrace_pytorch.settings import load

WITH = {"DD_PYTORCH_PROFILE_WITH": "sampler", "DD_PYTORCH_PROFILE_EVERY": "4", "DD_PYTORCH_PROFILE_ACTIVE": "2"}


class TorchsOwn(Exception):
    """A window of torch's profiler was made."""


class WindowedJob(Job):
    """A rank with a GPU, as far as windows ask for one, which runs `launched` in each step."""

    def __init__(self, library: Path, cupti: MockCupti, patch: pytest.MonkeyPatch, log: Path, **settings: str) -> None:
        patch.setattr(border, "_said", set())
        self.cupti, self.library = cupti, SamplerLibrary(library)
        self.launched: Callable[[int], list[Record]] = lambda step: kernels(
            (b"_Z4gemmPf", 3_000), (b"ncclDevKernel_AllReduce", 1_000)
        )

        def opened() -> SamplerLibrary:
            if self.library.open(str(cupti.library)):
                raise RuntimeError(self.library.error)
            return self.library

        def torchs(*_: object) -> None:
            raise TorchsOwn

        patch.setattr(windows, "opened", opened)
        patch.setattr(windows, "gpu_is_there", lambda torch: True)
        patch.setattr(windows, "Window", torchs)
        patch.setattr(torch.cuda, "synchronize", self._synchronize)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        super().__init__(log, **WITH | settings)
        cupti.calls()

    def _synchronize(self) -> None:
        self.cupti.replay(self.launched(self.number))

    def steps_of(self, until: int) -> None:
        """The GPU is behind by nothing, but for the last step of a window."""

        def ran() -> None:
            if not self.windows._open or self.number < self.windows._open.plan.ends_before - 1:
                self.cupti.replay(self.launched(self.number))

        self.train(until, ran)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("native")
    return build_sampler(directory), build_mock(directory)


@pytest.fixture
def job(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., WindowedJob]]:
    made: list[WindowedJob] = []

    def make(**settings: str) -> WindowedJob:
        library, cupti = (own_copy(one, tmp_path) for one in built)
        made.append(WindowedJob(library, MockCupti(cupti), monkeypatch, tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.end()


def trace_of(told: dict[str, Any]) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(Path(told["path"]).read_bytes()))
    return trace


def test_it_has_what_the_gpu_ran_in_its_steps_and_no_more(job: Callable[..., WindowedJob]) -> None:
    one = job()
    one.steps_of(10)
    assert [(told["step"], told["steps"], told["state"]) for told in one.told()] == [
        (4, 2, "complete"), (8, 2, "complete"),
    ]  # fmt: skip
    for told in one.told():
        assert (told["activity"], told["of"]) == ("gpu", "kernels")
        assert {kernel["name"]: kernel["count"] for kernel in told["kernels"]} == {
            "gemm(float*)": 2, "ncclDevKernel_AllReduce": 2,
        }  # fmt: skip
        metrics = told["metrics"]
        assert (metrics["events"], metrics["busy_ms"], metrics["communication_ms"]) == (4, 0.008, 0.002)
        assert all(told["start"] <= kernel["start"] <= told["start"] + told["duration"] for kernel in told["longest"])
        trace = trace_of(told)
        assert trace["distributedInfo"] == {"rank": 0, "world_size": 1, "backend": "none"}
        ran = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert [(event["name"], event["dur"], event["cat"]) for event in ran] == 2 * [
            ("gemm(float*)", 3, "kernel"), ("ncclDevKernel_AllReduce", 1, "kernel"),
        ]  # fmt: skip
    kinds = (10, 1, 2)  # kernels, copies and fills
    switched = ["register", *(f"enable({kind})" for kind in kinds), *(f"disable({kind})" for kind in kinds), "flush(1)"]
    assert one.cupti.calls() == 2 * switched


def test_a_profiler_of_yours_has_cupti_for_itself(job: Callable[..., WindowedJob]) -> None:
    one = job()
    one.steps_of(4)
    one.windows.give_way()
    assert not one.windows._open
    one.steps_of(8)
    # On another thread: at once, and what the window had is not told of.
    other = threading.Thread(target=one.windows.give_way)
    one.cupti.calls()
    other.start()
    other.join()
    assert one.cupti.calls() == ["disable(10)", "disable(1)", "disable(2)", "flush(1)"]
    one.steps_of(16)
    yours = "a profiler of yours began"
    assert [(told["step"], told["state"], told.get("why")) for told in one.told()] == [
        (4, "abandoned", yours), (8, "abandoned", yours), (12, "complete", None),
    ]  # fmt: skip


@pytest.mark.parametrize("call", ["enable(10)", "register"])
def test_where_cupti_refuses_torchs_profiler_takes_its_place(
    job: Callable[..., WindowedJob], call: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = job()
    one.cupti.c.mock_fail(call.encode(), 39)
    one.steps_of(10)
    first, second = one.told()
    assert not one.windows._open
    assert one.profilers.ours is None
    assert first["state"] == "failed"
    assert "gave 39" in first["why"]
    assert (second["state"], "TorchsOwn" in second["why"]) == ("failed", True)
    assert "windows are taken with torch's profiler, not with the sampler" in caplog.text


@pytest.mark.parametrize("asked", ["CPU", "SHAPES", "STACKS"])
def test_what_only_torchs_profiler_records_is_left_to_it(job: Callable[..., WindowedJob], asked: str) -> None:
    one = job(**{f"DD_PYTORCH_PROFILE_{asked}": "true"})
    one.steps_of(6)
    [told] = one.told()
    assert "TorchsOwn" in told["why"]
    [complaint] = load(WITH | {f"DD_PYTORCH_PROFILE_{asked}": "true"}).complaints
    assert complaint.startswith("DD_PYTORCH_PROFILE_WITH=sampler has no effect: DD_PYTORCH_PROFILE_" + asked)


def test_where_no_gpu_is_in_use_it_is_said_that_windows_are_torchs(
    job: Callable[..., WindowedJob], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = job()
    monkeypatch.setattr(windows, "gpu_is_there", lambda torch: False)
    one.steps_of(6)
    [told] = one.told()
    assert "TorchsOwn" in told["why"]
    assert "no GPU is in use, so torch's profiler takes a window of the CPU" in caplog.text


def test_the_end_of_a_job_cuts_it_short(job: Callable[..., WindowedJob]) -> None:
    one = job()
    one.steps_of(5)
    one.windows.cut("the session ended")
    one.tell()
    [told] = one.told()
    assert (told["state"], told["why"]) == ("cut short", "the session ended")
    assert told["metrics"]["events"] == 4


def test_a_forked_child_has_none(job: Callable[..., WindowedJob]) -> None:
    one = job()
    one.steps_of(4)
    child = os.fork()
    if child == 0:
        one.windows.abandon()
        os._exit(one.library.on() == 0 or one.windows._open is not None or one.profilers.ours is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    one.steps_of(7)
    assert [told["state"] for told in one.told()] == ["complete"]


def test_what_there_is_no_room_for_is_said(job: Callable[..., WindowedJob], monkeypatch: pytest.MonkeyPatch) -> None:
    one = job()
    kept = one.library.keep
    monkeypatch.setattr(one.library, "keep", lambda many: kept(min(many, 3)))
    one.steps_of(7)
    [told] = one.told()
    assert (told["state"], told["metrics"]["events"]) == ("partial", 3)
    assert told["why"] == "there was room for 3 records alone"


def test_what_cupti_has_lost_is_said(job: Callable[..., WindowedJob]) -> None:
    one = job()
    one.steps_of(5)
    one.cupti.c.mock_lose(1_234)
    one.steps_of(7)
    [told] = one.told()
    assert (told["state"], told["why"]) == ("partial", "1,234 records were lost")


@pytest.mark.parametrize("begins", ["before it looks again", "while it is switched on"])
def test_a_profiler_that_begins_meanwhile_has_cupti_for_itself(job: Callable[..., WindowedJob], begins: str) -> None:
    """On another thread, as this one prepares a window."""
    one = job()
    on = one.library.on

    def begin_another() -> None:
        if begins == "while it is switched on":
            # As `_begins` does, which is told of the profiler first.
            other = threading.Thread(target=one.profilers.ours.give_way)  # type: ignore[union-attr]
            other.start()
            other.join()
        else:
            one.profilers._begun[1] = lambda: None  # type: ignore[assignment]

    def slowly_on(flags: int) -> int:
        begin_another()
        return on(flags)

    one.library.on = slowly_on  # type: ignore[method-assign]
    one.steps_of(4)
    assert one.cupti.calls()[-4:] == ["disable(10)", "disable(1)", "disable(2)", "flush(1)"]
    assert (one.windows._open, one.profilers.ours) == (None, None)
    one.profilers._begun.clear()
    one.tell()
    assert [(told["step"], told["state"]) for told in one.told()] == [(4, "abandoned")]


def test_an_interrupt_as_it_is_switched_on_leaves_nothing_on(job: Callable[..., WindowedJob]) -> None:
    one = job()
    on = one.library.on

    def interrupted(flags: int) -> int:
        on(flags)
        raise KeyboardInterrupt

    one.library.on = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        one.steps_of(4)
    assert one.cupti.calls()[-4:] == ["disable(10)", "disable(1)", "disable(2)", "flush(1)"]
    assert (one.windows._open, one.profilers.ours) == (None, None)


def test_a_session_that_ends_on_another_thread_leaves_nothing_on(job: Callable[..., WindowedJob]) -> None:
    one = job()
    one.steps_of(4)
    other = threading.Thread(target=one.windows.close, args=(Deadline(5),))
    other.start()
    other.join()
    assert one.cupti.calls()[-4:] == ["disable(10)", "disable(1)", "disable(2)", "flush(1)"]
    assert (one.windows._open, one.profilers.ours) == (None, None)
    assert [(told["step"], told["state"]) for told in one.told()] == [(4, "abandoned")]


def test_the_sampler_of_kernels_goes_on_between_windows(job: Callable[..., WindowedJob]) -> None:
    one = job(DD_PYTORCH_PROFILE_EVERY="10")
    assert one.library.open(str(one.cupti.library)) == 0
    counting = load({"DD_PYTORCH_KERNEL_EVERY": "3", "DD_PYTORCH_KERNEL_BUDGET": "100"})
    sampler = Sampler(
        counting, Clock(), one.span, one.exporter, one.steps, one.profilers, one.library, NoGpu()  # type: ignore[arg-type]
    )  # fmt: skip
    native = NativeParent(lambda: Context(1, 1, 2, ()), ours=sampler.tracer)
    native.look()
    sampler.open(one.training.at_turns)

    def ran() -> None:
        one.cupti.replay(one.launched(one.number))
        sampler.take()
        sampler.beat()

    one.train(24, ran)
    sampler.close(Deadline(30))
    native.take_back()
    counted = [told for told in one.exporter.records if told["type"] == "kernels"]
    # What was counted is waited for in the three steps that follow. In step 9 a window warms up, as one does in step
    # 19, when step 18 hasn't been waited for.
    assert [told["step"] for told in counted] == [3, 12, 24]
    assert [(told["state"], told["metrics"]["events"]) for told in counted] == 3 * [("complete", 2)]
    assert [(told["step"], told["state"]) for told in one.told()] == [(10, "complete"), (20, "complete")]


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError


def test_two_hundred_windows_leave_memory_as_it_was(job: Callable[..., WindowedJob]) -> None:
    one = job(DD_PYTORCH_PROFILE_MAX_MB="0.05")
    many = [(f"kernel {number}".encode(), 1_000) for number in range(50)] * 4
    one.launched = lambda step: kernels(*many)

    def windowed(steps: int) -> int:
        one.steps_of(one.number + steps)
        one.exporter.records.clear()
        one.exporter.spans.clear()
        return resident_kib()

    before = windowed(800)
    # KiB; the budget of one is 10.
    assert windowed(800) - before < 200 * 10


RAWS = [
    Raw(1_700_000_000_123_456_789, 1_700_000_000_123_457_790, 'a "kernel"\\', KERNEL, 0, 7, 41, 0, 0),
    Raw(1_700_000_000_123_458_000, 1_700_000_000_123_458_001, None, KERNEL, 1, 20, 42, 9, 3),
    Raw(1_700_000_000_123_459_000, 1_700_000_001_123_459_000, "memcpy HtoD", COPY, 0, 7, 43, 0, 0),
]


@pytest.mark.parametrize("raws", [RAWS, []])
def test_a_trace_is_json_and_has_each_nanosecond(raws: list[Raw]) -> None:
    trace = json.loads("".join(own_trace.lines(raws, {"rank": 3})))
    assert trace["distributedInfo"] == {"rank": 3}
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    base = trace["baseTimeNanoseconds"]
    assert [(base + round(one["ts"] * 1000), round(one["dur"] * 1000)) for one in found] == [
        (raw.start, raw.end - raw.start) for raw in raws
    ]
    assert [one["cat"] for one in found] == ["kernel", "kernel", "gpu_memcpy"][: len(raws)]
    assert [one["name"] for one in found] == ['a "kernel"\\', UNNAMED, "memcpy HtoD"][: len(raws)]
    lanes = {(one["pid"], one["tid"]) for one in trace["traceEvents"] if one["name"] == "thread_name"}
    assert lanes == {(raw.device, raw.stream) for raw in raws}
    assert [one["args"].get("graph node id") for one in found] == [None, 9, None][: len(raws)]
