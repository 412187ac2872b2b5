"""Numbers on a GPU: read when they have arrived, in the order they were given, never while a graph is captured.

CUDA is not there: :class:`Gpu` is in its place. What it really does is in `tests/gpu/test_records_on_gpu.py`.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from ddtrace_pytorch import event, scalar, set_step
from ddtrace_pytorch.records import on_gpu, scalars, switch
from ddtrace_pytorch.records.on_gpu import CAPTURING, NO_ROOM, NOT_READ, OnGpu
from ddtrace_pytorch.records.recorder import Recorder
from ddtrace_pytorch.training.progress import Progress, Step


class Tensor:
    """One number on the GPU."""

    is_cpu, is_cuda = False, True

    def __init__(self, number: float, device: str = "cuda:0") -> None:
        self.number = number
        self.device = device

    def numel(self) -> int:
        return 1

    def is_complex(self) -> bool:
        return False


class Gpu:
    """Does what it is given when it is told to."""

    def __init__(self) -> None:
        self.captures = False
        self.todo: list[Any] = []
        self.memory: dict[int, float] = {}
        self.marks = 0
        self.asked_by: set[str] = set()

    def capturing(self) -> bool:
        return self.captures

    def copy(self, tensor: Tensor, slot: int) -> None:
        assert not self.captures
        number = tensor.number
        self.todo.append(lambda: self.memory.__setitem__(slot, number))

    def mark(self, stream: object) -> list[bool]:
        self.marks += 1
        passed = [False]
        self.todo.append(lambda: passed.__setitem__(0, True))
        return passed

    def passed(self, event: list[bool]) -> bool:
        assert not self.captures
        self.asked_by.add(threading.current_thread().name)
        return event[0]

    def read(self, slot: int) -> float:
        return self.memory.pop(slot)

    def work(self, many: int = 10**9) -> None:
        for _ in range(min(many, len(self.todo))):
            self.todo.pop(0)()


class Bench:
    def __init__(self) -> None:
        progress = Progress()

        def begin_step(number: int, relative: int | None) -> None:
            progress.step = Step(number, relative)

        self.gpu = Gpu()
        self.recorder = Recorder(progress, 100, begin_step, lambda: None)
        self.recorder.on_gpu = OnGpu(lambda: self.gpu)
        self.recorder.begin()

    def numbers(self) -> list[dict[str, Any]]:
        """What has been recorded since the last time."""
        return [row.values for row in self.recorder.take()[0] if row.kind == "scalar"]

    def look(self) -> None:
        self.recorder.on_gpu.look(self.recorder)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    found = Bench()
    monkeypatch.setattr(scalars, "_tensors", (Tensor, torch.Tensor))
    monkeypatch.setattr(switch, "recorder", found.recorder)
    return found


def test_a_number_is_recorded_when_it_has_arrived_as_it_was_with_step_and_time_of_the_call(bench: Bench) -> None:
    set_step(5)
    loss = Tensor(2.5)
    scalar({"loss": loss, "lr": 0.1})
    loss.number = 0.0  # the GPU's, and behind the copy
    event("later")
    set_step(6)
    bench.look()
    assert [row.kind for row in bench.recorder.take()[0]] == ["event"]
    bench.gpu.work()
    bench.look()
    (row,) = bench.recorder.take()[0]
    assert row.values == {"loss": 2.5, "lr": 0.1}
    assert (row.step.number, row.number) == (5, 1)


def test_one_call_costs_one_event_however_many_numbers_it_has(bench: Bench) -> None:
    scalar({str(number): Tensor(number) for number in range(10)})
    assert bench.gpu.marks == 1
    scalar({"a": Tensor(1), "b": Tensor(2, "cuda:1")})
    assert bench.gpu.marks == 3  # there is none for two GPUs
    bench.gpu.work()
    bench.look()
    assert bench.numbers() == [{str(number): number for number in range(10)}, {"a": 1, "b": 2}]


def test_the_next_scalar_reads_the_ones_before(bench: Bench) -> None:
    for number in range(5):
        scalar({"loss": Tensor(number)})
        bench.gpu.work()
    assert bench.numbers() == [{"loss": number} for number in range(4)]


def test_while_a_graph_is_captured_nothing_is_put_onto_the_stream_or_asked(bench: Bench) -> None:
    scalar({"before": Tensor(1)})
    bench.gpu.work()
    bench.gpu.captures = True
    scalar({"during": Tensor(2), "here": 3})
    scalar({"during": Tensor(4)})
    bench.look()
    assert bench.gpu.marks == 1
    assert bench.numbers() == [{"here": 3}]
    bench.gpu.captures = False
    bench.look()
    assert bench.numbers() == [{"before": 1}]
    assert bench.recorder.on_gpu.lost() == {CAPTURING: 2}
    assert bench.recorder.on_gpu.lost() == {}


def test_where_there_is_no_room_left_numbers_are_counted_and_nobody_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "SLOTS", 3)
    bench.recorder.on_gpu = OnGpu(lambda: bench.gpu)
    scalar({"a": Tensor(1), "b": Tensor(2)})
    scalar({"c": Tensor(3), "d": Tensor(4), "e": 5})
    scalar({"f": Tensor(6)})
    scalar({"g": Tensor(7), "h": 8})
    assert bench.numbers() == [{"h": 8}]
    assert bench.recorder.on_gpu.lost() == {NO_ROOM: 3}
    bench.gpu.work()
    bench.look()
    assert bench.numbers() == [{"a": 1, "b": 2}, {"e": 5, "c": 3}]
    scalar({"a": Tensor(9), "b": Tensor(10), "c": Tensor(11)})
    assert bench.recorder.on_gpu.lost() == {}


def test_no_tensor_is_kept(bench: Bench) -> None:
    loss = Tensor(1)
    gone = weakref.ref(loss)
    scalar({"loss": loss})
    del loss
    gc.collect()
    assert gone() is None


def test_one_look_reads_no_more_than_so_many(bench: Bench) -> None:
    for number in range(20):
        scalar({"loss": Tensor(number)})
    bench.gpu.work()
    bench.look()
    assert len(bench.numbers()) == on_gpu.READ_AT_ONCE
    for _ in range(2):
        bench.look()
    assert len(bench.numbers()) == 20 - on_gpu.READ_AT_ONCE


def test_at_the_end_what_arrives_in_time_is_recorded_and_the_rest_counted(bench: Bench) -> None:
    for number in range(4):
        scalar({"loss": Tensor(number), "here": number})
    bench.gpu.work(5)  # two of the calls, and half of the third
    bench.recorder.on_gpu.finish(bench.recorder, 0.05)
    assert bench.numbers() == [{"here": 0, "loss": 0}, {"here": 1, "loss": 1}, {"here": 2}, {"here": 3}]
    assert bench.recorder.on_gpu.lost() == {NOT_READ: 2}


def test_only_threads_that_record_or_step_ask_whether_an_event_has_passed(bench: Bench) -> None:
    scalar({"loss": Tensor(1)})
    bench.gpu.work()
    bench.recorder.take()
    assert bench.gpu.asked_by == set()
    worker = threading.Thread(target=lambda: scalar({"x": 1, "y": Tensor(2)}), name="records")
    worker.start()
    worker.join()
    assert bench.gpu.asked_by == {"records"}
    assert bench.numbers() == [{"loss": 1}]
