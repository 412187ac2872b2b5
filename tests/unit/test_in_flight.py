"""A thread's slot, and the Work of a call that it may wait for, where others come in between."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ddtrace_pytorch.collectives.in_flight import InFlight, Slot
from ddtrace_pytorch.collectives.work import Waits
from ddtrace_pytorch.ledger import Cell, Group, How, Ledger


class NoGroups:
    def actual(self, process_group: Any) -> Any:
        return process_group

    def describe(self, process_group: Any) -> Group | None:
        return None


def made_while(in_flight: InFlight, number: int, meanwhile: Callable[[], object]) -> Slot:
    """A new slot, with `meanwhile` called where another thread, or the handler of a signal, may come in between for
    the `number`-th time."""
    chances = 0

    def chance(frame: FrameType, event: str, argument: object) -> None:
        nonlocal chances
        chances += 1
        if chances == number:
            meanwhile()

    sys.setprofile(chance)
    try:
        return in_flight.new_slot()
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("number", range(1, 20))
def test_memory_that_is_given_back_while_a_slot_is_made_is_not_written_to(number: int) -> None:
    in_flight = InFlight()
    in_flight.write_to(4096)
    given_back: list[int] = []

    def give_back() -> None:
        in_flight.write_to(0)
        given_back.append(number)

    slot = made_while(in_flight, number, give_back)
    assert slot.address == (0 if given_back else 4096)


@pytest.mark.parametrize("number", range(1, 20))
def test_a_handler_that_comes_while_a_slot_is_made_makes_no_second_one(number: int) -> None:
    in_flight = InFlight()
    found: list[Slot] = []
    slot = made_while(in_flight, number, lambda: found.append(in_flight.slot()))
    assert all(one is slot for one in [*found, in_flight.slot(), *in_flight.slots()])


class Work:
    def wait(self) -> str:
        return "done"


class WithoutHash(Work):
    def __eq__(self, other: object) -> bool:
        return self is other


class HashRaises(Work):
    def __hash__(self) -> int:
        raise RuntimeError("no hash")


@pytest.mark.parametrize("kind", [Work, WithoutHash, HashRaises])
def test_a_work_of_the_users_own_class_is_waited_for(kind: type[Work]) -> None:
    waits = Waits(Work, InFlight())
    followed = Work()
    cell = Cell(Ledger(NoGroups()), "all_reduce", Group("0", "world", "gloo", (0,), 0), How.ISSUED, True)
    waits.track(followed, cell)
    try:
        assert kind().wait() == "done"
        assert (followed.wait(), cell.waits) == ("done", 1)
    finally:
        waits.remove()
