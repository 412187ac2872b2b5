from __future__ import annotations

import os
import signal

import pytest

from ddtrace_pytorch.timeline.crew import Lost, each

pytestmark = pytest.mark.once


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_everything_comes_in_order(workers: int) -> None:
    large = "x" * 3_000_000  # more than a pipe holds
    assert list(each(lambda number: (number, large), 7, workers)) == [(number, large) for number in range(7)]


def test_of_nothing_there_is_nothing() -> None:
    assert list(each(lambda number: number, 0, 4)) == []


def test_what_a_task_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(each(lambda number: 1 // (number - 3), 7, 2))


def test_a_process_that_is_killed_is_said_to_be() -> None:
    def task(number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(Lost, match="memory"):
        list(each(task, 7, 2))


def test_who_has_had_enough_leaves_no_process_behind() -> None:
    pids = set()
    for pid in each(lambda number: os.getpid(), 100, 3):
        pids.add(pid)
        if len(pids) == 3:
            break
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
