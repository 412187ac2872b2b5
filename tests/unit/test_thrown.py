"""What another thread can tell of an exception: that it is on its way, or was caught."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from harness.waiting import until

from ddtrace_pytorch import thrown
from ddtrace_pytorch.thrown import Thrown

FIRST, SECOND = object(), object()


class Trainer:
    """What a thread does; it stops where it is to be looked at."""

    def __init__(self) -> None:
        self.stops, self.goes_on = threading.Event(), threading.Event()
        self.thrown: Thrown | None = None

    def stop(self) -> None:
        self.stops.set()
        assert self.goes_on.wait(60)

    def collective(self) -> None:
        """Raises, as it was told."""
        error = ValueError("no")
        self.thrown = Thrown(error, FIRST)
        raise error

    def with_a_handler(self) -> None:
        try:
            self.collective()
        except ValueError:
            self.stop()

    def with_a_handler_that_fails_in_turn(self) -> None:
        try:
            self.collective()
        except ValueError:
            try:
                raise KeyError from None
            except KeyError:
                self.stop()

    def with_a_finally(self) -> None:
        try:
            self.collective()
        finally:
            self.stop()

    def with_a_with(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.stop)
            self.collective()

    @contextlib.contextmanager
    def cleaning_up(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.stop()

    def with_a_generator(self) -> None:
        with self.cleaning_up():
            self.collective()

    def that_catches(self) -> None:
        with contextlib.suppress(ValueError):
            self.collective()
        self.stop()

    def that_catches_and_handles_another(self) -> None:
        with contextlib.suppress(ValueError):
            self.collective()
        try:
            raise KeyError
        except KeyError:
            self.stop()

    def that_catches_further_out(self) -> None:
        try:
            self.with_a_finally_that_is_short()
        except ValueError:
            pass
        self.stop()

    def with_a_finally_that_is_short(self) -> None:
        try:
            self.collective()
        finally:
            len("")

    def that_dies(self) -> None:
        self.collective()


def look(work: Callable[[Trainer], None], step: object) -> bool:
    trainer = Trainer()

    def run() -> None:
        with contextlib.suppress(Exception):
            work(trainer)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: trainer.stops.is_set() or not thread.is_alive(), 60, "it stops, or ends")
    assert trainer.thrown is not None
    try:
        return trainer.thrown.is_caught(step)
    finally:
        trainer.goes_on.set()
        thread.join(60)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrown, "PASSES_NS", 0)


ON_ITS_WAY = (
    Trainer.with_a_handler,
    Trainer.with_a_handler_that_fails_in_turn,
    Trainer.with_a_finally,
    Trainer.with_a_with,
    Trainer.with_a_generator,
)


@pytest.mark.parametrize("work", ON_ITS_WAY)
@pytest.mark.parametrize("step", [FIRST, SECOND], ids=["in its step", "in a later step"])
def test_what_is_handled_is_on_its_way(work: Callable[[Trainer], None], step: object) -> None:
    assert not look(work, step)


@pytest.mark.parametrize(
    "work", [Trainer.that_catches, Trainer.that_catches_and_handles_another, Trainer.that_catches_further_out]
)
def test_who_runs_on_has_caught_it(work: Callable[[Trainer], None]) -> None:
    assert look(work, FIRST)


def test_what_ended_another_thread_is_caught_where_the_training_goes_on() -> None:
    assert not look(Trainer.that_dies, FIRST)
    assert look(Trainer.that_dies, SECOND)


def test_what_is_not_caught_yet_may_be_later_and_stays_so() -> None:
    trainer = Trainer()

    def both() -> None:
        trainer.with_a_handler()
        trainer.stops.clear()
        trainer.goes_on.clear()
        trainer.stop()

    thread = threading.Thread(target=both)
    thread.start()
    assert trainer.stops.wait(60)
    assert trainer.thrown is not None
    assert not trainer.thrown.is_caught(FIRST)
    trainer.goes_on.set()
    until(lambda: trainer.thrown is not None and trainer.thrown.is_caught(FIRST), 60, "it is caught")
    until(trainer.stops.is_set, 60, "it stops again")
    trainer.goes_on.set()
    thread.join(60)
    assert trainer.thrown.is_caught(FIRST)


def test_where_it_was_only_just_thrown_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thrown, "PASSES_NS", 60 * 10**9)
    assert not look(Trainer.that_catches, FIRST)
