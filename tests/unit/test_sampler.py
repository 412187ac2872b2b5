"""The kernels of one step in so many: when, of whom, and what is told of them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.kernel_sampler import MockCupti, build_mock, build_sampler, own_copy
from harness.sampled import SampledJob, kernels

from ddtrace_pytorch.kernels.sampler import Gpu


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("sampler")
    return build_sampler(place), build_mock(place)


@pytest.fixture
def job(built: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[..., SampledJob]]:
    jobs: list[SampledJob] = []

    def make(**settings: str) -> SampledJob:
        sampler, mock = (own_copy(library, tmp_path) for library in built)
        jobs.append(SampledJob(sampler, MockCupti(mock), **settings))
        return jobs[-1]

    yield make
    for one in jobs:
        one.end()


def test_one_step_in_so_many_is_counted_kernel_by_kernel(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="5")
    training.launched = lambda step: kernels(
        (b"gemm", 3_000 * step), (b"ncclDevKernel_AllReduce", 1_000), (b"gemm", 500)
    )
    training.train(18)
    told = training.told()
    assert [(one["step"], one["steps"], one["state"]) for one in told] == [
        (5, 1, "complete"), (10, 1, "complete"), (15, 1, "complete"),
    ]  # fmt: skip
    assert [one["metrics"]["events"] for one in told] == [3, 3, 3]
    assert told[0]["metrics"]["kernels_ms"] == (15_000 + 1_000 + 500) / 1e6
    assert told[0]["metrics"]["communication_ms"] == 0.001
    assert told[0]["metrics"]["communication_calls"] == 1
    # Of the first one in a minute each kernel is known.
    assert told[0]["kernels"][0] == {"name": "gemm", "count": 2, "total_ns": 15_500, "max_ns": 15_000}
    assert [(one["name"], one["duration"], one["stream"]) for one in told[0]["longest"]] == [
        ("gemm", 15_000, 7), ("ncclDevKernel_AllReduce", 1_000, 7), ("gemm", 500, 7),
    ]  # fmt: skip
    assert told[0]["metrics"]["busy_share"] == 1.0
    assert "longest" not in told[1]


def test_its_kernels_are_spans_below_the_span_of_their_step(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="5")
    training.train(9)
    (step,) = training.spans("pytorch.step")
    found = training.spans("pytorch.kernel")
    assert step.resource == "step 5"
    assert [(one.resource, one.duration) for one in found] == [("gemm", 3_000), ("relu", 1_000)]
    assert {(one.trace_id, one.parent_id) for one in found} == {(step.trace_id, step.span_id)}
    assert abs(found[0].start - step.start) < 5e9


def test_names_are_as_their_authors_wrote_them(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="5")
    training.launched = lambda step: kernels((b"_ZN2at6native4gemmIfEEvPKT_i", 3_000), (b"_Zno", 2_000))
    training.train(9)
    assert [one["name"] for one in training.told()[0]["kernels"]] == [
        "void at::native::gemm<float>(float const*, int)", "_Zno",
    ]  # fmt: skip
    assert training.spans("pytorch.kernel")[0].resource.startswith("void at::native::gemm<float>")


def test_once_a_minute_totals_are_told(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="5")
    training.launched = lambda step: (
        kernels((b"gemm", 3_000), (b"ncclKernel", 1_000)) + kernels((b"relu", 2_000), stream=9)
    )
    training.train(19)
    training.sampler.summarise()
    (told,) = training.spans("pytorch.kernels")
    assert told.metrics["kernels.steps"] == 3
    assert told.metrics["kernels.every"] == 5
    assert told.metrics["kernels.per_step"] == 3
    assert told.metrics["kernels.time_ms"] == 0.006
    assert told.metrics["kernels.communication_ms"] == 0.001
    assert told.metrics["kernels.lost"] == 0
    assert 0 < told.metrics["kernels.busy_share"] <= 1
    assert json.loads(told.tags["kernels.top"])[0] == ["gemm", 3, 0.009, 0.003, 0.003]
    training.sampler.summarise()
    assert len(training.spans("pytorch.kernels")) == 1
    training.train(29)
    assert len([one for one in training.told() if "longest" in one]) == 2


def test_it_is_told_of_the_open_span_and_of_steps_as_datadogs_tracer_would_be(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="2")
    training.train(5)
    parent = training.library.parent()
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (training.span.piece.trace_id, training.span.piece.span_id)
    assert parent.tags == (("rank", "0"),)
    training.end()
    assert training.library.parent() is None


def test_what_the_gpu_has_not_run_yet_is_waited_for_by_nobody(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="4")
    training.gpu.behind = 3
    told: list[int] = []
    training.train(12, lambda: told.append(len(training.told())))
    # Step 4 is launched as 5 begins. The GPU is asked from 6 on, and past it at 9; at 10 other streams are taken to be.
    assert told.index(1) + 2 == 11
    assert [(one["step"], one["metrics"]["events"]) for one in training.told()] == [(4, 2)]


def test_while_a_graph_is_captured_nothing_of_ours_goes_into_it(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="4")
    training.gpu.capturing = True
    training.train(8)
    assert training.told() == []
    training.gpu.capturing = False
    training.train(12)
    assert [one["step"] for one in training.told()] == [4]


def test_nothing_is_asked_of_a_gpu_whose_work_is_being_captured() -> None:
    asked: list[str] = []
    capturing = True
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: capturing)
    gpu, mark = Gpu(SimpleNamespace(cuda=cuda)), SimpleNamespace(query=lambda: asked.append("query") or True)
    assert gpu.mark() is None
    assert gpu.has_passed(mark) is False
    assert asked == []
    capturing = False
    assert gpu.has_passed(mark) is True


def test_steps_that_follow_each_other_are_counted_without_switching(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="1")
    training.train(8)
    assert training.told()[0]["steps"] == 1  # its kernels were looked at one by one
    training.cupti.calls()
    training.train(26)
    one = training.told()[-1]
    assert one["steps"] == 8
    assert one["metrics"]["events"] == 16
    assert training.cupti.calls().count("enable(10)") <= 2


@pytest.mark.parametrize("way", ["no GPU", "another client", "a profiler of ours"])
def test_where_it_may_not_be_it_is_not(job: Callable[..., SampledJob], way: str) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="5")
    training.gpu.there = way != "no GPU"
    training.gpu.why = "another profiler is there" if way == "another client" else None
    training.profilers.ours = object() if way == "a profiler of ours" else None  # type: ignore[assignment]
    training.train(9)
    assert training.told() == []
    assert training.cupti.calls() == []
    training.gpu.there, training.gpu.why, training.profilers.ours = True, None, None
    training.train(19)
    assert [one["step"] for one in training.told()] == [10, 15]


@pytest.mark.parametrize("begins", [4, 5])
def test_a_profiler_of_the_users_has_cupti_for_itself(job: Callable[..., SampledJob], begins: int) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="4")
    undo = training.profilers.watch(torch)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    try:
        # In the step that is counted, and while the GPU is still behind it.
        training.gpu.behind = 2
        training.train(begins)
        training.cupti.calls()
        profile.start()
        assert training.cupti.calls()[-1].startswith("flush")
        training.train(14)
        assert training.cupti.calls() == []
        assert training.told() == []
        profile.stop()
        training.train(24)
        assert [one["step"] for one in training.told()] == [16]
    finally:
        for one in undo:
            one()


def test_what_cupti_refuses_ends_it_with_one_warning(
    job: Callable[..., SampledJob], caplog: pytest.LogCaptureFixture
) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="2")
    training.cupti.c.mock_fail(b"enable(10)", 39)
    training.train(9)
    assert training.told() == []
    (said,) = [one.getMessage() for one in caplog.records if "not counted any more" in one.getMessage()]
    assert "cuptiActivityEnable gave 39" in said
    calls = training.cupti.calls()
    training.train(15)
    assert "enable(10)" not in training.cupti.calls(), calls


def test_what_is_under_way_at_the_end_is_told(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="4")
    training.train(4)
    training.cupti.replay(kernels((b"last", 2_000)))
    training.end()
    (one,) = training.told()
    assert (one["step"], one["metrics"]["events"]) == (4, 1)
    assert training.spans("pytorch.kernels")


def test_a_forked_child_counts_nothing(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="2")
    training.train(3)
    child = os.fork()
    if not child:
        try:
            training.sampler.abandon()
            forgotten = training.sampler._on is None and training.profilers.sampler is None
            before = len(training.told())
            training.train(9)
            os._exit(0 if forgotten and len(training.told()) == before else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    training.train(9)
    assert [one["step"] for one in training.told()][:1] == [2]


def test_records_that_are_none_are_counted_as_lost(job: Callable[..., SampledJob]) -> None:
    training = job(DD_PYTORCH_KERNEL_EVERY="3")
    training.launched = lambda step: [
        *kernels((b"gemm", 1_000)),
        *(one.__class__(one.end, one.start, b"odd") for one in kernels((b"odd", 5))),
    ]
    training.train(7)
    (one, *_) = training.told()
    assert one["state"] == "partial"
    assert one["metrics"]["events"] == 1
    training.sampler.summarise()
    assert training.spans("pytorch.kernels")[0].metrics["kernels.lost"] >= 1


@pytest.mark.parametrize(("budget", "every"), [("1", 8), ("10", 2)])
def test_what_a_step_costs_decides_how_often(
    job: Callable[..., SampledJob], monkeypatch: pytest.MonkeyPatch, budget: str, every: int
) -> None:
    clock, added = {"now": 0}, {"share": 0.05}
    monkeypatch.setattr("ddtrace_pytorch.kernels.sampler.time.monotonic_ns", lambda: clock["now"])
    training = job(DD_PYTORCH_KERNEL_EVERY="2", DD_PYTORCH_KERNEL_BUDGET=budget)

    def launched(step: int) -> Any:
        clock["now"] += int(1e7 * (1 + added["share"] * (training.sampler._on is not None)))
        return kernels((b"gemm", 1_000))

    training.launched = launched
    training.train(400)
    assert training.sampler.budget.every == every
    added["share"] = 0.0
    training.train(1_500)
    assert training.sampler.budget.every == 2


def test_whoever_it_has_given_way_to_is_left_alone(job: Callable[..., SampledJob]) -> None:
    """The Pulse comes late to what is over: a profiler has begun since."""
    one = job(DD_PYTORCH_KERNEL_EVERY="3")
    take = one.sampler.take
    one.sampler.take = lambda: None  # type: ignore[method-assign]
    one.train(8)
    assert one.sampler._over is not None
    comes, may_go_on = threading.Event(), threading.Event()
    lock = one.sampler._taking

    @contextlib.contextmanager
    def late() -> Iterator[None]:
        comes.set()
        assert may_go_on.wait(30)
        with lock:
            yield

    one.sampler._taking = late()  # type: ignore[assignment]
    pulse = threading.Thread(target=take)
    pulse.start()
    assert comes.wait(30)
    one.sampler._taking = lock
    one.sampler.give_way()
    assert one.library.on() == 0  # the other one
    one.cupti.calls()
    may_go_on.set()
    pulse.join()
    assert one.cupti.calls() == []
    assert one.sampler._totals.lost == 2


def test_what_another_has_recorded_is_not_counted_as_lost(job: Callable[..., SampledJob]) -> None:
    one = job(DD_PYTORCH_KERNEL_EVERY="0")
    assert one.library.on() == 0
    one.cupti.replay(kernels((b"gemm", 3_000)))
    assert one.library.off() == 0
    one.sampler.give_way()
    assert one.sampler._totals.lost == 0
