"""Garbage collections are put on their step."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddtrace_pytorch.training import collector
from ddtrace_pytorch.training.progress import Progress
from ddtrace_pytorch.training.steps import NoGarbage


class Rank(SimpleNamespace):
    """As much of a :class:`ddtrace_pytorch.lifecycle.Lifecycle` as is needed."""

    def __init__(self, current: Any) -> None:
        super().__init__(current=current, progress=Progress(), steps=SimpleNamespace(garbage=NoGarbage()))

    @property
    def ns(self) -> int:
        return self.steps.garbage.ns  # type: ignore[no-any-return]


@pytest.fixture
def quiet() -> Iterator[None]:
    """No collection but those of the test."""
    gc.disable()
    yield
    gc.enable()


def watched(rank: Rank, generation: int = 2) -> Rank:
    undo = collector.watch(rank)  # type: ignore[arg-type]
    try:
        gc.collect(generation)
    finally:
        undo()
    return rank


@pytest.mark.usefixtures("quiet")
def test_a_collection_of_the_oldest_generation_tags_its_step() -> None:
    rank = watched(Rank("session"))
    assert list(rank.progress.step.tags) == ["gc"]
    assert rank.ns > 0


@pytest.mark.usefixtures("quiet")
def test_a_short_one_of_a_younger_generation_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LONG_NS", 10**12)
    rank = watched(Rank("session"), 0)
    assert (rank.ns, list(rank.progress.step.tags)) == (0, [])
    monkeypatch.setattr(collector, "LONG_NS", 0)
    assert watched(Rank("session"), 0).ns > 0


@pytest.mark.usefixtures("quiet")
def test_without_a_session_nothing_is_told() -> None:
    rank = watched(Rank(None))
    assert (rank.ns, list(rank.progress.step.tags)) == (0, [])


@pytest.mark.usefixtures("quiet")
def test_it_is_given_back_and_nothing_else_of_the_list() -> None:
    def theirs(phase: str, info: dict[str, int]) -> None:
        pass

    before = list(gc.callbacks)
    undo = collector.watch(Rank("session"))  # type: ignore[arg-type]
    gc.callbacks.append(theirs)
    undo()
    assert gc.callbacks == [*before, theirs]
    undo()
    gc.callbacks.remove(theirs)


@pytest.mark.usefixtures("quiet")
def test_switched_on_in_the_midst_of_a_collection() -> None:
    rank = Rank("session")
    undo = collector.watch(rank)  # type: ignore[arg-type]
    gc.callbacks[-1]("stop", {"generation": 2})
    undo()
    assert rank.ns == 0


@pytest.mark.usefixtures("quiet")
def test_a_ctrl_c_during_a_collection_is_heard() -> None:
    # A signal waits for the next instruction of Python's. In a callback that is written in Python that would be one of
    # its own, and what comes out of a callback is swallowed.
    heap = [[number] for number in range(300_000)]  # noqa: F841 - for the collection to take its time

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    undo = collector.watch(Rank("session"))  # type: ignore[arg-type]
    before = signal.signal(signal.SIGALRM, interrupt)
    heard = 0
    try:
        for _ in range(20):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                gc.collect()
                pytest.fail("the collection took less than half a millisecond, or the signal was lost")
            except KeyboardInterrupt:
                heard += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        undo()
    assert heard == 20
