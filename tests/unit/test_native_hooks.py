"""What torch's hooks tell, read; and a hook that fails inside the user's call, around a process group that stands for
torch's."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ddtrace_pytorch import border
from ddtrace_pytorch.collectives import native_hooks
from ddtrace_pytorch.collectives.in_flight import InFlight
from ddtrace_pytorch.collectives.native_hooks import NativeHooks
from ddtrace_pytorch.ledger import Group, How, Ledger


def group(rank: int = 1, size: int = 4) -> Group:
    return Group("0", "world", "gloo", tuple(range(size)), rank)


def tensors(*sizes: int) -> list[Any]:
    return [SimpleNamespace(nbytes=size) for size in sizes]


@pytest.mark.parametrize(
    ("native", "inputs", "outputs", "root", "told"),
    [
        ("ALLREDUCE", [8], [], -1, ("all_reduce", 8)),
        ("ALLREDUCE", [8, 4], [], -1, ("all_reduce_coalesced", 12)),
        ("BROADCAST", [8], [], 0, ("broadcast", 8)),
        ("REDUCE", [8], [], 0, ("reduce", 8)),
        ("ALLGATHER", [8], [8, 8, 8, 8], -1, ("all_gather", 32)),
        ("ALLGATHER", [8], [32], -1, ("all_gather_into_tensor", 32)),
        ("ALLGATHER", [8, 4], [32, 16], -1, ("all_gather_into_tensor_coalesced", 48)),
        ("ALLGATHER", [8, 4], [8, 8, 8, 8, 4, 4, 4, 4], -1, ("all_gather_coalesced", 48)),
        ("REDUCE_SCATTER", [8, 8, 8, 8], [8], -1, ("reduce_scatter", 32)),
        ("REDUCE_SCATTER", [32], [8], -1, ("reduce_scatter_tensor", 32)),
        ("REDUCE_SCATTER", [32, 16], [8, 4], -1, ("reduce_scatter_tensor_coalesced", 48)),
        ("ALLTOALL", [1, 2, 4, 8], [2, 2, 2, 2], -1, ("all_to_all", 13)),
        ("ALLTOALL", [32], [32], -1, ("all_to_all_single", 24)),
        ("ALLTOALL", [32], [16], -1, ("all_to_all_single", None)),
        ("GATHER", [8], [8, 8, 8, 8], 1, ("gather", 24)),
        ("GATHER", [8], [32], 1, ("gather", 24)),
        ("GATHER", [8], [32], 0, ("gather", 0)),
        ("GATHER", [8], [], 0, ("gather", 0)),
        ("SCATTER", [8, 8, 8, 8], [8], 1, ("scatter", 24)),
        ("SCATTER", [], [8], 0, ("scatter", 0)),
        ("SEND", [8], [], 2, ("send", 8)),
        ("RECV", [], [8], 2, ("recv", 8)),
        ("BARRIER", [], [], -1, ("barrier", 0)),
        ("SPLIT", [], [], -1, ("split", 0)),
        ("SOMETHING_NEW", [8], [8], -1, ("something_new", 8)),
    ],
)
def test_messages_are_those_of_the_table(native: str, inputs: Any, outputs: Any, root: int, told: Any) -> None:
    issued = SimpleNamespace(input_tensors=tensors(*inputs), output_tensors=tensors(*outputs), root=root)
    assert native_hooks.family(native).read(issued, group()) == told


def test_what_has_a_number_that_all_ranks_agree_on() -> None:
    numbered = {name: native_hooks.family(name).numbered for name in ("ALLREDUCE", "SEND", "RECV", "SPLIT", "NEWER")}
    assert numbered == {"ALLREDUCE": True, "SEND": False, "RECV": False, "SPLIT": False, "NEWER": True}


class ProcessGroup:
    """Stands for torch's."""

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[Any], None]] = {}

    def register_pre_hook(self, number: int, hook: Callable[[Any], None]) -> None:
        self.hooks[number] = hook

    def unregister_pre_hook(self, number: int) -> None:
        self.hooks.pop(number, None)

    def issue(self, name: Any, *inputs: Any, outputs: Sequence[Any] = ()) -> None:
        for hook in self.hooks.values():
            hook(SimpleNamespace(name=name, input_tensors=list(inputs), output_tensors=list(outputs), root=-1))


class Groups:
    def actual(self, process_group: Any) -> Any:
        return process_group

    def describe(self, process_group: Any) -> Group:
        return group()


MEMBERS = {"ALLREDUCE": 0, "BARRIER": 1, "SEND": 2, "REDUCE_SCATTER": 3}
BINDINGS = SimpleNamespace(HookOpName=SimpleNamespace(__members__=MEMBERS))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(Groups())


def test_a_call_that_a_wrapper_counts_is_left_to_it(ledger: Ledger) -> None:
    process_group, in_flight = ProcessGroup(), InFlight()
    NativeHooks(BINDINGS, ledger, in_flight).add(process_group)
    (here,) = ledger.groups
    process_group.issue(0, *tensors(8))
    in_flight.slot().call = ledger.cell("all_reduce", How.WAITED, True, process_group)
    process_group.issue(0, *tensors(8))
    in_flight.slot().call = None
    process_group.issue(0, *tensors(4))
    process_group.issue(2, *tensors(1))
    process_group.issue(1)
    cells = {name: (cell.count, cell.bytes) for (name, how), cell in here.cells.items() if how is How.NATIVE}
    assert cells == {"all_reduce": (2, 12), "send": (1, 1), "barrier": (1, 0)}
    assert here.calls == 3


def test_the_tensors_of_a_coalesced_reduce_scatter_are_counted_beside_the_call(ledger: Ledger) -> None:
    process_group = ProcessGroup()
    NativeHooks(BINDINGS, ledger, InFlight()).add(process_group)
    process_group.issue(3, *tensors(8, 8, 8), outputs=tensors(4, 4, 4))
    process_group.issue(3, *tensors(8), outputs=tensors(4))
    process_group.issue(0, *tensors(8, 8))
    (here,) = ledger.groups
    assert (here.calls, here.scattered) == (3, 2)


def test_a_tensor_without_a_size_is_counted_all_the_same(ledger: Ledger) -> None:
    process_group = ProcessGroup()
    NativeHooks(BINDINGS, ledger, InFlight()).add(process_group)
    process_group.issue(0, object())
    (cell,) = ledger.groups[0].cells.values()
    assert (cell.operation, cell.count, cell.bytes, cell.unsized) == ("all_reduce", 1, 0, 1)


def test_what_goes_wrong_in_a_hook_does_not_reach_the_call(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(border, "_said", set())
    process_group = ProcessGroup()
    NativeHooks(BINDINGS, ledger, InFlight()).add(process_group)
    with caplog.at_level(logging.WARNING, "ddtrace_pytorch"):
        process_group.issue(99, *tensors(8))
        process_group.issue("no number", *tensors(8))
        process_group.issue(99, *tensors(8))
    complaints = [record.message for record in caplog.records]
    assert len(complaints) == 2
    assert all("could not count a collective that torch issued by itself" in one for one in complaints)
    process_group.issue(0, *tensors(8))
    assert ledger.calls() == 1


def test_hooks_of_others_stay_and_ours_go(ledger: Ledger) -> None:
    first, second = ProcessGroup(), ProcessGroup()
    theirs = first.hooks[1] = lambda issued: None
    hooks = NativeHooks(BINDINGS, ledger, InFlight())
    hooks.add(first)
    hooks.add(second)
    hooks.add(second)
    assert [len(one.hooks) for one in (first, second)] == [2, 1]
    native_hooks.take_off(second)
    native_hooks.take_off(second)
    assert [len(one.hooks) for one in (first, second)] == [2, 0]
    native_hooks.take_off_all()
    native_hooks.take_off_all()
    assert first.hooks == {1: theirs}


def test_a_session_that_goes_leaves_its_hooks_standing_aside_for_the_next(ledger: Ledger) -> None:
    process_group, in_flight = ProcessGroup(), InFlight()
    first = NativeHooks(BINDINGS, ledger, in_flight)
    first.add(process_group)
    ((_, hook),) = process_group.hooks.items()
    first.remove()
    process_group.issue(0, *tensors(8))
    assert ledger.calls() == 0
    another = Ledger(Groups())
    second = NativeHooks(BINDINGS, another, InFlight())
    second.add(process_group)
    first.remove()
    process_group.issue(0, *tensors(8))
    assert (ledger.calls(), another.calls()) == (0, 1)
    assert list(process_group.hooks.values()) == [hook], "torch's own list of them was not touched"


def test_a_hook_that_stands_aside_holds_nothing_of_the_session(ledger: Ledger) -> None:
    process_group = ProcessGroup()
    hooks = NativeHooks(BINDINGS, ledger, InFlight())
    hooks.add(process_group)
    hooks.remove()
    gone = weakref.ref(hooks)
    del hooks
    gc.collect()
    assert gone() is None
    assert process_group.hooks
