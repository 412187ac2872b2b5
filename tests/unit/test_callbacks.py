"""The thread that calls hooks: what reaches them, what is lost and counted, and how it ends."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

import pytest
from harness.waiting import until

from ddtrace_pytorch import border, hooks
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives import callbacks
from ddtrace_pytorch.collectives.callbacks import Callbacks
from ddtrace_pytorch.collectives.listening import BATCH, Call, Listener
from ddtrace_pytorch.collectives.surface import OPERATIONS
from ddtrace_pytorch.hooks import CollectiveStatus
from ddtrace_pytorch.ledger import Group

ROWS = {operation.function: operation for operation in OPERATIONS} | {BATCH.function: BATCH}


class Layer:
    """Stands for the instrument: has the listeners hear what the test makes up."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        self.listeners.append(listener)

    def unlisten(self, listener: Listener) -> None:
        self.listeners.remove(listener)

    def make(self, function: str = "all_reduce", number: int = 1, backend: str = "gloo", work: Any = None) -> None:
        group = Group("7", "dp", backend, (0, 1), 0)
        deferred = work is not None
        made = Call(ROWS[function], group, 4, number, None, deferred, monotonic_ns(), {"p2p_op_list": ()})
        for listener in self.listeners:
            listener.begin(made)
            listener.end(made, work)


class Work:
    def __init__(self) -> None:
        self.complete = False
        self.asked = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.complete


class Placeholder(Work):
    def is_completed(self) -> bool:
        raise AssertionError("nobody may ask")


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Layer]:
    monkeypatch.setattr(border, "_said", set())
    for registered in (hooks.starts, hooks.ends):
        registered.clear()
    layer = Layer()
    made = layer.callbacks = Callbacks(layer, Clock(), Placeholder)  # type: ignore[attr-defined]
    made.open()
    yield layer
    for registered in (hooks.starts, hooks.ends):
        registered.clear()
    made.close()
    assert not running()


def running() -> bool:
    return any(thread.name == "ddtrace_pytorch.callbacks" for thread in threading.enumerate())


def gone() -> bool:
    return not running()


def test_the_thread_and_the_layer_are_there_only_while_a_hook_is(layer: Layer) -> None:
    assert not running()
    first, second = (
        hooks.register_collective_end_hook(print),
        hooks.register_collective_start_hook(print),
    )
    assert running()
    assert len(layer.listeners) == 1
    first.remove()
    assert len(layer.listeners) == 1
    second.remove()
    second.remove()
    assert layer.listeners == []
    until(gone, 5, "the thread ends with the last hook")
    hooks.register_collective_end_hook(print)
    assert running()


def test_hooks_hear_starts_and_ends(layer: Layer) -> None:
    starts: list[CollectiveStatus] = []
    ends: list[CollectiveStatus] = []
    hooks.register_collective_start_hook(starts.append)
    hooks.register_collective_end_hook(ends.append)
    layer.make(number=3)
    layer.make("barrier", number=4, backend="nccl")
    layer.make("batch_isend_irecv")
    until(lambda: len(ends) == 2, 5, "both ends are told")
    assert [(one.operation, one.pg_name, one.backend, one.sequence_number) for one in starts] == [
        ("all_reduce", "7", "gloo", 3),
        ("barrier", "7", "nccl", 4),
    ]
    assert [one.duration for one in starts] == [None, None]
    assert [one.time_source for one in ends] == ["completion", "issue"]
    assert all(0 <= (one.duration or 0) < 5_000 for one in ends)
    assert ends[0].timestamp >= starts[0].timestamp > 1_600_000_000 * 10**9


def test_a_deferred_call_ends_when_its_work_is_complete(layer: Layer) -> None:
    ends: list[CollectiveStatus] = []
    hooks.register_collective_end_hook(ends.append)
    late, early = Work(), Work()
    layer.make(number=1, work=late)
    layer.make(number=2, work=early)
    layer.make("isend", number=0, work=Work())
    layer.make(number=3, backend="nccl", work=Work())
    layer.make(number=4, work=Placeholder())
    early.complete = True
    until(lambda: len(ends) == 4, 5, "all but one have ended")
    assert {one.sequence_number: one.time_source for one in ends} == {
        2: "completion", 0: "issue", 3: "issue", 4: "issue",
    }  # fmt: skip
    late.complete = True
    until(lambda: len(ends) == 5, 5, "the late one ends too")
    assert (ends[-1].sequence_number, ends[-1].time_source) == (1, "completion")


def test_a_slow_hook_loses_events_and_every_one_is_counted(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "HELD", 10)
    seen: list[CollectiveStatus] = []
    go_on = threading.Event()

    def slow(status: CollectiveStatus) -> None:
        seen.append(status)
        go_on.wait(30)

    hooks.register_collective_start_hook(slow)
    for number in range(1, 101):
        layer.make(number=number)
    go_on.set()
    until(lambda: seen and seen[-1].sequence_number == 100, 5, "the last event is told")
    numbers = [0] + [one.sequence_number for one in seen]
    missed = [after - before - 1 for before, after in itertools.pairwise(numbers)]
    assert [one.drop_count for one in seen] == missed
    assert sum(missed) + len(seen) == 100
    assert len(seen) in (10, 11)


def test_works_that_never_complete_are_bounded(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "PENDING_HELD", 5)
    ends: list[CollectiveStatus] = []
    hooks.register_collective_end_hook(ends.append)
    for number in range(20):
        layer.make(number=number, work=Work())
    layer.make(number=21)
    until(lambda: ends, 5, "the one that is complete is told")
    assert (ends[0].sequence_number, ends[0].drop_count) == (21, 15)


def test_a_failing_hook_is_told_once_and_given_up_after_ten_times(
    layer: Layer, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    others: list[CollectiveStatus] = []

    def bad(status: CollectiveStatus) -> None:
        calls.append(status.sequence_number)
        if status.sequence_number != 5:  # failures have to follow each other
            raise KeyError("the user's")

    hooks.register_collective_start_hook(bad)
    hooks.register_collective_start_hook(others.append)
    for number in range(1, 31):
        layer.make(number=number)
    until(lambda: len(others) == 30, 5, "the other hook hears everything")
    assert calls == list(range(1, 16))
    assert caplog.text.count("the user's") == 1
    assert caplog.text.count("failed 10 times in a row") == 1


def test_a_loop_of_ours_that_keeps_failing_backs_off_and_stops(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[int] = []

    def poll(self: Any) -> None:
        failures.append(monotonic_ns())
        raise OSError("ours")

    monkeypatch.setattr(callbacks, "BACK_OFF_SECONDS", 0.02)
    monkeypatch.setattr(callbacks.Teller, "_poll", poll)
    hooks.register_collective_start_hook(print)
    layer.make()
    until(gone, 10, "the thread stops")
    assert len(failures) == 10
    assert all(after - before >= 19_000_000 for before, after in itertools.pairwise(failures))
    assert caplog.text.count("has stopped") == 1
    assert layer.listeners == []
    hooks.register_collective_start_hook(print)
    assert not running()


def test_closing_delivers_what_waits_but_waits_for_no_hook_for_long(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callbacks, "CLOSE_SECONDS", 0.1)
    going, go_on = threading.Event(), threading.Event()

    def stuck(status: CollectiveStatus) -> None:
        going.set()
        go_on.wait(30)

    hooks.register_collective_start_hook(stuck)
    for _ in range(3):
        layer.make()
    assert going.wait(5)
    layer.callbacks.close()  # type: ignore[attr-defined]
    assert "2 events of collectives came too late" in caplog.text
    go_on.set()
    until(gone, 5, "the thread ends")


def test_works_are_asked_at_intervals_and_not_at_each_event_that_is_delivered(layer: Layer) -> None:
    works, starts, ends = [Work() for _ in range(100)], [], []
    going, go_on = threading.Event(), threading.Event()

    def wait_once(status: CollectiveStatus) -> None:
        starts.append(status)
        going.set()
        go_on.wait(30)

    handle = hooks.register_collective_start_hook(wait_once)
    hooks.register_collective_end_hook(ends.append)
    for work in works:
        layer.make(work=work)
    assert going.wait(5)
    before = sum(work.asked for work in works)
    for work in works[:50]:
        work.complete = True
    closing = threading.Thread(target=layer.callbacks.close)  # type: ignore[attr-defined]
    closing.start()
    until(lambda: layer.listeners == [], 5, "it is closing")
    go_on.set()
    closing.join(10)
    assert (len(starts), len(ends)) == (100, 50)
    # A look at all of them for each of 150 events would be some 10,000 questions.
    assert sum(work.asked for work in works) - before <= 20 * len(works)
    handle.remove()


class Sideways(BaseException):
    """A user's own, which is no Exception."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Sideways("so be it")], ids=repr)
def test_a_hook_ends_neither_its_thread_nor_the_listening(
    layer: Layer, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    seen: list[int] = []

    def raises(status: CollectiveStatus) -> None:
        seen.append(status.sequence_number)
        raise error

    hooks.register_collective_start_hook(raises)
    layer.make(number=1)
    until(lambda: seen == [1], 5, "the first is told")
    layer.make(number=2)
    until(lambda: seen == [1, 2], 5, "the second is told")
    assert type(error).__name__ in caplog.text
    assert layer.listeners


@pytest.mark.parametrize("error", [SystemExit(3), Sideways("so be it"), ValueError("no")], ids=repr)
def test_what_a_process_group_hook_raises_does_not_reach_who_makes_the_group(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def raises(process_group: Any, name: str) -> None:
        raise error

    raises.__qualname__ = f"raises {error!r}"  # once for each hook
    handle = hooks.register_process_group_hook(raises)
    try:
        hooks.tell_of(object(), "dp")
    finally:
        handle.remove()
    assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("kind", [SystemExit, Sideways, ValueError, KeyboardInterrupt])
def test_what_a_signals_handler_raises_while_a_hook_runs_passes(kind: type[BaseException]) -> None:
    def handler(number: int, frame: object) -> None:
        raise kind("of the signal")

    before = signal.signal(signal.SIGUSR1, handler)
    handle = hooks.register_process_group_hook(lambda process_group, name: signal.raise_signal(signal.SIGUSR1))
    try:
        with pytest.raises(kind, match="of the signal"):
            hooks.tell_of(object(), "dp")
    finally:
        handle.remove()
        signal.signal(signal.SIGUSR1, before)


def test_what_a_hook_itself_does_is_not_told_to_it(layer: Layer) -> None:
    seen: list[CollectiveStatus] = []

    def curious(status: CollectiveStatus) -> None:
        seen.append(status)
        layer.make(number=99)

    hooks.register_collective_start_hook(curious)
    layer.make(number=1)
    layer.make(number=2)
    until(lambda: len(seen) == 2, 5, "both are told")
    assert [one.sequence_number for one in seen] == [1, 2]


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="callable"):
        hooks.register_collective_start_hook("print")  # type: ignore[arg-type]


def test_registering_where_nothing_is_on_says_so(layer: Layer, caplog: pytest.LogCaptureFixture) -> None:
    hooks.register_collective_start_hook(print)
    assert "ddtrace_pytorch.patch()" in caplog.text
