"""torchtitan's records in ours, as its log gives them to a handler: odd orders, odd numbers, steps that go back."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest

from ddtrace_pytorch import span
from ddtrace_pytorch.integrations.torchtitan import DEPTH, Handler
from ddtrace_pytorch.records import switch
from ddtrace_pytorch.records.attributes import NAME_LIMIT
from ddtrace_pytorch.records.recorder import Recorder, Row
from ddtrace_pytorch.records.user_span import current
from ddtrace_pytorch.training.progress import Progress, Step


class Log:
    def __init__(self) -> None:
        self.handler = Handler()
        self.recorder = self.new_recorder()

    def new_recorder(self) -> Recorder:
        progress = Progress()

        def begin_step(number: int, relative: int | None) -> None:
            progress.step = Step(number, relative)

        self.recorder = Recorder(progress, 100, begin_step, lambda: None)
        self.recorder.begin()
        return self.recorder

    def say(self, kind: str, type_: str = "event", **extra: Any) -> None:
        record = logging.LogRecord("torchtitan", logging.INFO, "/x/train.py", 12, "", (), None, "step")
        record.__dict__.update({"log_type": type_, "log_type_name": kind, **extra})
        self.handler.emit(record)

    def rows(self) -> list[Row]:
        return list(self.recorder.take()[0])

    def names(self) -> list[str]:
        return [row.name for row in self.rows()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    made = Log()
    monkeypatch.setattr(switch, "recorder", made.recorder)
    yield made
    left = current.get()
    current.set(None)
    assert left is None


def test_a_step_that_goes_back_is_followed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (500, 501, 1, 2, 300)
    for step in steps:
        log.say("x", "instant", step=step)
    assert [row.step.number for row in log.rows()] == [*steps]
    # Patched anew.
    monkeypatch.setattr(switch, "recorder", log.new_recorder())
    for step in (300, 5):
        log.say("x", "instant", step=step)
    assert [row.step.number for row in log.rows()] == [300, 5]


def test_tasks_in_different_steps_do_not_turn_the_process_back_and_forth(log: Log) -> None:
    async def actor(first: int) -> None:
        for step in (first, first + 1):
            log.say("x", "instant", step=step)
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(actor(20), actor(10))
        log.say("x", "instant", step=1)

    asyncio.run(main())
    found = log.rows()
    assert [row.step.number for row in found] == [20, 20, 21, 21, 1]
    assert [(row.of_step or (row.step.number,))[0] for row in found] == [20, 10, 21, 11, 1]


def test_an_end_without_a_beginning_ends_nothing(log: Log) -> None:
    log.say("a_start")
    log.say("b_start")
    log.say("never_end")
    with span("ours"):
        pass
    log.say("b_end")
    log.say("a_end")
    ours, b, a = log.rows()
    assert [row.name for row in (ours, b, a)] == ["ours", "b", "a"]
    assert ours.parent is not None
    assert (ours.parent.id, b.parent and b.parent.id) == (b.id, a.id)


@pytest.mark.parametrize("same", [True, False])
def test_of_too_many_in_each_other_the_outer_ones_are_recorded(log: Log, same: bool) -> None:
    names = ["same" if same else str(number) for number in range(DEPTH + 5)]
    for name in names:
        log.say(f"{name}_start")
    for name in reversed(names):
        log.say(f"{name}_end")
    found = log.rows()
    assert [row.name for row in found] == names[:DEPTH][::-1]
    assert [row.parent.id for row in found if row.parent is not None] == [row.id for row in found[1:]]
    log.say("next_start")
    log.say("next_end")
    (row,) = log.rows()
    assert row.parent is None


@pytest.mark.parametrize(
    "took", [math.nan, math.inf, -math.inf, -1.0, 10**300, 2**1024 - 1, "x"], ids=lambda took: str(took)[:9]
)
def test_a_duration_that_is_none_is_taken_from_the_clock(log: Log, took: Any) -> None:
    log.say("a_start")
    log.say("a_end", value=took)
    (row,) = log.rows()
    assert 0 <= row.at - row.started < 60e9
    assert current.get() is None


def test_those_that_were_never_ended_are_around_nothing_after_the_one_they_were_in(log: Log) -> None:
    for name in ("a", "lost", "lost too"):
        log.say(f"{name}_start")
    log.say("a_end")
    assert current.get() is None
    with span("ours"):
        pass
    assert [(row.name, row.parent) for row in log.rows()] == [("a", None), ("ours", None)]


def test_long_names_are_cut_off(log: Log) -> None:
    long = "n" * (NAME_LIMIT + 9)
    log.say(f"{long}_start")
    log.say(long, "instant")
    log.say("metric_value", event_name=long, value=1.0)
    log.say(f"{long}_end")
    event, number, around = log.rows()
    short = "n" * NAME_LIMIT + "…(+9 chars)"
    assert [event.name, *number.values, around.name] == [short] * 3
