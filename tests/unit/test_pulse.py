from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

import pytest
from harness.waiting import until

from ddtrace_pytorch.pulse import APART_SECONDS, APART_TIMES, Pulse, Task, task
from ddtrace_pytorch.signal_pipe import SignalPipe


class Counting:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def run() -> Counting:
    return Counting()


@pytest.fixture
def wanted(run: Counting) -> Task:
    return task("count", run, math.inf)


@pytest.fixture
def pulse(wanted: Task) -> Iterator[Pulse]:
    pipe = SignalPipe()
    pulse = Pulse([task("sleep", lambda: None, 3600.0), wanted], pipe, lambda heard: None)
    pulse.start()
    yield pulse
    pulse.stop(10)
    pipe.close()


def test_a_task_that_is_wanted_runs_before_anything_is_due(pulse: Pulse, wanted: Task, run: Counting) -> None:
    assert run.times == 0
    pulse.want(wanted)
    until(lambda: run.times == 1, 30, "it ran")
    pulse.want(wanted)
    until(lambda: run.times == 2, 30, "it ran again")


def test_a_task_that_is_wanted_all_the_time_runs_now_and_then(pulse: Pulse, wanted: Task, run: Counting) -> None:
    ran: set[float] = set()

    def has_run_thrice() -> bool:
        pulse.want(wanted)
        ran.add(wanted.ran)
        return len(ran - {-math.inf}) >= 3

    until(has_run_thrice, 30, "it ran three times")
    times = sorted(ran - {-math.inf})
    assert all(later - earlier >= APART_SECONDS for earlier, later in itertools.pairwise(times))


def test_a_task_that_takes_long_is_the_rarer_for_it() -> None:
    pipe, slow = SignalPipe(), task("take long", lambda: time.sleep(0.05), math.inf)
    pulse = Pulse([task("sleep", lambda: None, 3600.0), slow], pipe, lambda heard: None)
    pulse.start()
    pulse.want(slow)
    until(lambda: slow.took >= 0.05, 30, "it ran")
    first, took = slow.ran, slow.took
    pulse.want(slow)
    until(lambda: slow.ran > first, 30, "it ran again")
    assert slow.ran - first >= APART_TIMES * took
    pulse.stop(10)
    pipe.close()


def test_a_task_that_is_wanted_while_it_runs_runs_again(wanted: Task, run: Counting) -> None:
    pipe = SignalPipe()
    again = task("want more", lambda: pulse.want(again) if (run() or run.times) < 2 else None, math.inf)
    pulse = Pulse([task("sleep", lambda: None, 3600.0), again], pipe, lambda heard: None)
    pulse.start()
    pulse.want(again)
    until(lambda: run.times == 2, 30, "it ran again")
    pulse.stop(10)
    pipe.close()


def test_who_catches_up_knows_that_all_signals_that_had_come_were_passed_on() -> None:
    heard: list[bytes] = []

    def slowly(what: bytes) -> None:
        time.sleep(0.05)
        heard.append(what)

    pipe = SignalPipe()
    pulse = Pulse([task("sleep", lambda: None, 3600.0)], pipe, slowly)
    pulse.catch_up(30)
    pulse.start()
    try:
        for number in range(1, 6):
            pipe.poke(bytes([number]))
            pulse.catch_up(30)
            assert b"".join(heard) == bytes(range(1, number + 1))
    finally:
        pulse.stop(10)
        pipe.close()
