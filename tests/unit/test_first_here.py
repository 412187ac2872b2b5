"""Which process of a job says what all have reason to say."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import pytest

from ddtrace_pytorch import first_here
from ddtrace_pytorch.first_here import is_first, is_present, present

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"first-{os.getpid()}")


def forked(work: Callable[[], object]) -> int:
    """A child that ends with status 0 once `work` is done, and 1 where that raises."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return child


def ended_well(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def test_the_first_is_first_for_as_long_as_it_lives_and_not_for_as_long_as_what_it_forked() -> None:
    until, over = os.pipe()
    begun, begins = os.pipe()

    def stays() -> None:
        os.close(over)
        os.write(begins, b"!")
        os.read(until, 1)

    def asks() -> None:
        assert is_first("a word")
        assert not ended_well(forked(lambda: is_first("a word") or os._exit(2)))
        forked(stays)
        os.read(begun, 1)

    assert ended_well(forked(asks))
    assert is_first("a word"), "the one that was is gone; what it forked is not"
    assert not is_first("a word")
    os.close(over)


def test_a_number_that_is_somebody_elses_by_now_is_left_to_them() -> None:
    read, write = os.pipe()

    def asks() -> None:
        assert is_first("another word")
        ((number, _),) = first_here._held.items()
        os.dup2(write, number)
        assert ended_well(forked(lambda: os.write(number, b"theirs")))

    assert ended_well(forked(asks))
    assert os.read(read, 10) == b"theirs"


def test_who_is_there_is_found_for_as_long_as_it_is() -> None:
    until, over = os.pipe()
    begun, begins = os.pipe()

    def is_there() -> None:
        os.close(over)
        with present("rank 7"):
            os.write(begins, b"!")
            os.read(until, 1)

    assert not is_present("rank 7")
    child = forked(is_there)
    os.read(begun, 1)
    assert is_present("rank 7")
    with present("rank 7"):
        assert is_present("rank 7")
    assert is_present("rank 7"), "it was there before"
    assert not is_present("rank 8")
    os.close(over)
    assert ended_well(child)
    assert not is_present("rank 7")
    with present("rank 7"):
        assert ended_well(forked(lambda: is_present("rank 7") or os._exit(2)))
    assert not is_present("rank 7")
