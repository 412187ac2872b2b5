"""A thread's slot, and the Work of a call that it may wait for, where others come in between."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from ddtrace_pytorch import plain_numbers
from ddtrace_pytorch.collectives import c_wrappers
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


class WithSlots:
    __slots__ = ()

    def wait(self) -> str:
        return "done"


@pytest.fixture(params=["python", "c"])
def waits(request: pytest.FixtureRequest) -> Iterator[Waits]:
    in_c = request.param == "c"
    if in_c and not plain_numbers.exist:
        pytest.skip("built without a C compiler")
    c_wrappers.prepare(torch)
    waits = Waits(Work, InFlight(), in_c)
    yield waits
    waits.remove()


def a_cell(numbered: bool = True) -> Cell:
    return Cell(Ledger(NoGroups()), "all_reduce", Group("0", "world", "gloo", (0,), 0), How.ISSUED, numbered)


@pytest.mark.parametrize("kind", [Work, WithoutHash, HashRaises])
def test_a_work_of_the_users_own_class_is_waited_for(waits: Waits, kind: type[Work]) -> None:
    followed, cell = Work(), a_cell()
    waits.track()(followed, cell)
    assert kind().wait() == "done"
    assert (followed.wait(), cell.waits) == ("done", 1)


def test_works_are_followed_while_they_live(waits: Waits) -> None:
    cell, other = a_cell(), a_cell(numbered=False)
    cell.group.calls = 41
    one, another = Work(), Work()
    waits.track()(one, cell)
    waits.track()(another, other, 3)
    assert sorted(waits._pending.values(), key=lambda awaited: -awaited[1]) == [(cell, 42, None), (other, 0, 3)]
    del one
    assert list(waits._pending.values()) == [(other, 0, 3)]
    another.wait()
    assert (waits._pending, cell.waits, other.waits) == ({}, 0, 1)
    del another  # after the wait nobody looks for it


def test_a_work_that_cannot_be_followed_is_left_alone(waits: Waits) -> None:
    for kind in (WithSlots, HashRaises):
        waits.track()(kind(), a_cell())
    assert waits._pending == {}


def test_a_callers_interrupt_while_a_work_is_followed_is_the_callers(waits: Waits) -> None:
    class Interrupts(Work):
        def __hash__(self) -> int:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waits.track()(Interrupts(), a_cell())
