"""A deadline that several waits share."""

from __future__ import annotations

import time

import pytest

from ddtrace_pytorch.deadline import Deadline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_what_one_has_waited_is_no_longer_there_for_the_next(clock: list[float]) -> None:
    deadline = Deadline(2.0)
    first = deadline.earlier(0.5)
    assert (deadline.left(), first.left(), first.left(at_most=0.8)) == (2.0, 1.5, 0.8)
    clock[0] += 1.0
    assert (deadline.left(), first.left(), first.left(at_most=0.8)) == (1.0, 0.5, 0.5)
    clock[0] += 0.75
    assert (deadline.left(), first.left()) == (0.25, 0.0)
    clock[0] += 9.0
    assert deadline.left() == deadline.earlier(1.0).left() == 0.0
