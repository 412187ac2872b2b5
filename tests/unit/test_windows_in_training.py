"""Profiler windows of a training in this process, with torch's own profiler, and those that come to nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.profiled import Job

from ddtrace_pytorch.kernels import reading, window, windows
from ddtrace_pytorch.kernels.memory import MemoryHistory
from ddtrace_pytorch.kernels.schedule import Plan


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def made(**settings: str) -> Job:
        jobs.append(Job(tmp_path, **settings))
        return jobs[-1]

    yield made
    for one in jobs:
        one.end()
    assert not torch._C._autograd._profiler_enabled()


EVERY_20 = {"DD_PYTORCH_PROFILE_EVERY": "20", "DD_PYTORCH_PROFILE_ACTIVE": "2"}


def test_one_that_is_asked_for_between_two_others_ends_where_it_should(job: Callable[..., Job]) -> None:
    one = job(**EVERY_20)
    one.train(25)
    one.windows.ask(Plan(30, 3, 1))
    one.windows.ask(Plan(10, 3, 1))
    one.train(45)
    assert [(told["step"], told["steps"], told["how"], told["state"]) for told in one.told()] == [
        (20, 2, "schedule", "complete"), (10, 3, "asked", "skipped"), (30, 3, "asked", "complete"),
        (40, 2, "schedule", "complete"),
    ]  # fmt: skip
    steps = [next(kernel for kernel in told["kernels"] if "SGD.step" in kernel["name"]) for told in one.told()
             if told["state"] == "complete"]  # fmt: skip
    assert [step["count"] for step in steps] == [2, 3, 2]


def test_the_sampler_of_kernels_gives_way_to_each(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    training, order = job(DD_PYTORCH_PROFILE_EVERY="4"), []
    training.profilers.sampler = SimpleNamespace(give_way=lambda: order.append("gives way"))
    prepare = window.Window.prepare
    monkeypatch.setattr(window.Window, "prepare", lambda self: (order.append("begins"), prepare(self)))
    training.train(10)
    assert order == 2 * ["gives way", "begins"]
    assert len(training.told()) == 2


def test_where_each_epoch_counts_from_one_each_has_its_windows(job: Callable[..., Job]) -> None:
    one = job(**EVERY_20)
    one.train(30)
    one.steps.set(1)
    one.train(30)
    assert [(told["step"], told["state"]) for told in one.told()] == [(20, "complete"), (20, "complete")]
    assert [Path(told["path"]).name for told in one.told()] == [
        "rank-00000_step-000020.json.gz", "rank-00000_step-000020-2.json.gz",
    ]  # fmt: skip
    profiled = [one["step"] for one in one.exporter.records if "profile" in one.get("tags", ())]
    assert profiled == [20, 21, 20, 21]
    windows = [span for span in one.exporter.spans if span.name == "pytorch.profile"]
    steps = [span.span_id for span in one.exporter.spans if span.name == "pytorch.step" and span.resource == "step 20"]
    assert [span.parent_id for span in windows] == steps


def test_an_empty_one_is_a_failure_and_tried_again_once(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(**EVERY_20)
    real, ended = window.Window.end, []

    empty = reading.Recorded(SimpleNamespace(events=list))

    def end(self: window.Window) -> object:
        ended.append(real(self))
        return empty if len(ended) in (1, 3) else ended[-1]

    monkeypatch.setattr(window.Window, "end", end)
    monkeypatch.setattr(windows, "warn_first", lambda message, about=None: None)
    one.train(65)
    assert [(told["step"], told["state"]) for told in one.told()] == [
        (20, "empty"), (28, "complete"), (40, "empty"), (60, "complete"),
    ]  # fmt: skip
    spans = [span for span in one.exporter.spans if span.name == "pytorch.profile"]
    assert [span.error for span in spans] == [True, False, True, False]


def test_one_that_cannot_begin_or_be_read_is_told_of_and_the_next_one_comes(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(**EVERY_20)
    said: list[str] = []
    monkeypatch.setattr(windows, "warn_first", lambda message, about=None: said.append(message))

    def broken(*_: object) -> None:
        raise RuntimeError("no CUPTI")

    for step, name in ((25, "prepare"), (45, "start"), (65, "settle")):
        with monkeypatch.context() as patch:
            patch.setattr(window.Window, name, broken)
            one.train(step)
    with monkeypatch.context() as patch:
        patch.setattr(windows.reading, "events", broken)
        one.train(85)
    one.train(105)
    states = [(told["step"], told["state"], "no CUPTI" in told.get("why", "")) for told in one.told()]
    assert states == [
        (20, "failed", True), (40, "failed", True), (60, "failed", True), (80, "failed", False),
        (100, "complete", False),
    ]  # fmt: skip
    assert len(said) == 3


def test_one_that_is_longer_than_what_it_is_every_is_none(job: Callable[..., Job]) -> None:
    one = job(DD_PYTORCH_PROFILE_EVERY="3", DD_PYTORCH_PROFILE_ACTIVE="3")
    one.train(15)
    assert one.told() == []
    other = job(**EVERY_20, DD_PYTORCH_PROFILE_RANKS="1-7")
    other.train(25)
    assert other.told() == []


def test_steps_that_are_set_elsewhere_leave_no_window_open(job: Callable[..., Job]) -> None:
    one = job(**EVERY_20, DD_PYTORCH_PROFILE_WARMUP="2")
    one.train(18)
    one.steps.set(500)
    one.train(501)
    assert [(told["step"], told["state"]) for told in one.told()] == [(20, "skipped")]
    assert not torch._C._autograd._profiler_enabled()


def test_a_user_s_fork_or_end_in_the_midst_keeps_what_there_is(job: Callable[..., Job], tmp_path: Path) -> None:
    one = job(**EVERY_20, DD_PYTORCH_PROFILE_SHAPES="true", DD_PYTORCH_PROFILE_STACKS="true")
    one.train(21)
    one.windows.cut("the process forked")
    one.tell()
    one.steps.set(22)
    one.tell()
    [told] = one.told()
    assert (told["state"], told["why"]) == ("cut short", "the process forked")
    trace = json.loads(gzip.decompress(Path(told["path"]).read_bytes()))
    assert (trace["record_shapes"], trace["with_stack"]) == (1, 1)
    assert Path(told["path"]).is_relative_to(tmp_path / "job" / "run" / "profiles")


def test_what_is_in_the_way() -> None:
    nsight = {"CUDA_INJECTION64_PATH": "/opt/nvidia/libToolsInjection64.so"}
    assert window.in_the_way(torch, False, nsight) is None
    assert window.in_the_way(torch, True, nsight) == "another profiler is there (CUDA_INJECTION64_PATH)"
    said: list[str | None] = []
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda gradient: said.append(window.in_the_way(torch, False, {})))
    tensor.sum().backward()
    assert said == ["an optimizer steps in the midst of a backward pass"]


class Allocator:
    """A GPU's, as far as its history goes."""

    def __init__(self, kept: bool) -> None:
        self.calls: list[object] = []
        self._C = self.cuda = self.memory = self
        self._cuda_isHistoryEnabled = lambda: kept

    def _record_memory_history(self, enabled: object, **_: object) -> None:
        self.calls.append(enabled)

    def _snapshot(self) -> dict[str, object]:
        self.calls.append("snapshot")
        return {"segments": []}


@pytest.mark.parametrize(("kept", "calls"), [(False, ["all", "snapshot", None]), (True, ["snapshot"])])
def test_the_users_history_of_memory_goes_on(kept: bool, calls: list[object]) -> None:
    allocator = Allocator(kept)
    history = MemoryHistory(allocator)
    history.begin()
    assert history.end() == {"segments": []}
    history.leave()
    assert allocator.calls == calls
