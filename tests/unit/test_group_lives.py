"""Who waits where a group is made: known while it lasts, and whatever comes in between leaves nothing behind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.exporter import KeepingExporter
from harness.interrupting import interrupted_everywhere

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives.composites import Composite
from ddtrace_pytorch.collectives.group_lives import GroupLives
from ddtrace_pytorch.collectives.observer import Collectives
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import load

C10D = dist.distributed_c10d


class Followed:
    """The makers of a session, around functions of the test's."""

    def __init__(self) -> None:
        exporter: Any = KeepingExporter()
        span = RankSpan(service="pytorch", rank=0, start=1, facts={})
        self.lives = GroupLives()
        self.collectives = Collectives(torch, load({}), Clock(), span, exporter, self.lives, wraps=False)
        instrument = self.collectives.instrument
        self.lives.follow(lambda group: None, making=instrument._enter_making)
        self.slot = instrument.in_flight.slot()

    @property
    def waits_in(self) -> tuple[str, str] | None:
        """What this thread is in, and on which group."""
        call = self.slot.call
        if call is None:
            return None
        assert isinstance(call, Composite)
        assert call.cell is not None
        return call.cell.operation, call.cell.group.name

    def around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return self.lives.around_maker(C10D, name, original)


@pytest.fixture
def followed() -> Followed:
    return Followed()


@pytest.fixture
def world() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def new(ranks: object = None, use_local_synchronization: bool = False) -> None: ...


class Odd:
    """Calls without saying what of: neither a name nor parameters."""

    __signature__ = "none"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


@pytest.mark.parametrize("odd", [lambda function: function, Odd, functools.partial], ids=["plain", "odd", "partial"])
def test_where_a_group_is_made_it_is_known_who_waits(followed: Followed, world: Any, odd: Callable[..., Any]) -> None:
    seen: list[object] = []

    def new_group(ranks: object = None, use_local_synchronization: bool = False) -> None:
        seen.append(followed.waits_in)

    def split_group(parent_pg: object = None, split_ranks: object = None) -> None:
        seen.append(followed.waits_in)

    parent = dist.new_group([0])
    make = followed.around("new_group", odd(new_group))
    split = followed.around("split_group", odd(split_group))
    other = followed.around("shrink_group", odd(split_group))
    for call in (
        make,
        lambda: make([0], use_local_synchronization=True),
        split,
        lambda: split(parent_pg=parent),
        other,
    ):
        call()
        assert followed.waits_in is None
    here, there = world.group_name, parent.group_name
    assert seen == [("new_group", here), None, ("split_group", here), ("split_group", there), None]


def test_positions_are_those_of_the_function(followed: Followed, world: Any) -> None:
    seen: list[object] = []

    def split_group(parent_pg: object = None, split_ranks: object = None) -> None:
        seen.append(followed.waits_in)

    parent = dist.new_group([0])
    followed.around("split_group", split_group)(parent, [[0]])
    assert seen == [("split_group", parent.group_name)]


def test_without_a_default_group_torch_says_so_alone(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="has not been initialized"):
        followed.around("new_group", C10D.new_group)([0])
    assert followed.waits_in is None
    assert caplog.messages == []


def test_whatever_comes_in_between_nothing_stays_taken(followed: Followed, world: Any) -> None:
    make = followed.around("new_group", new)
    interrupts = 0
    for _ in interrupted_everywhere(make, "group_lives.py", "instrument.py"):
        assert followed.waits_in is None
        interrupts += 1
    assert interrupts > 100
    assert followed.waits_in is None
