"""The generated wrappers and the ledger they add to, around functions that stand for torch's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtrace_pytorch import plain_numbers
from ddtrace_pytorch.collectives import c_wrappers, composites, wrappers
from ddtrace_pytorch.collectives.in_flight import InFlight
from ddtrace_pytorch.collectives.surface import OPERATIONS, Operation, release_of
from ddtrace_pytorch.collectives.telling import place
from ddtrace_pytorch.in_place import UnknownShape
from ddtrace_pytorch.ledger import NEVER, SAMPLES_A_BEAT, Cell, Group, How, Ledger
from ddtrace_pytorch.plain_numbers import RECENT

BY_NAME = {row.function: row.for_release(release_of(torch.__version__)) for row in OPERATIONS}


class ProcessGroup:
    """Stands for torch's: something with an identity of its own."""


NOT_A_MEMBER = -100


class Groups:
    def __init__(self) -> None:
        self.default = ProcessGroup()

    def actual(self, process_group: Any) -> Any:
        return self.default if process_group is None else process_group

    def describe(self, process_group: Any) -> Group | None:
        if process_group == NOT_A_MEMBER:
            return None
        return Group(name=str(id(process_group)), label="world", backend="gloo", ranks=(0, 1, 2, 3), rank=1)


class Tensor:
    def __init__(self, nbytes: int, rows: int = 4) -> None:
        self.nbytes = nbytes
        self.shape = (rows,)


class Work:
    pass


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(Groups())


tracked: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_tracked() -> None:
    tracked.clear()


@pytest.fixture(params=[False, True], ids=["python", "c"], autouse=True)
def in_c(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether ordinary calls are counted in C; both have to do the same."""
    c_wrappers.prepare(torch)
    form.append(request.param)
    yield
    form.pop()


form: list[bool] = []


def wrapped(ledger: Ledger, name: str, original: Any, in_flight: InFlight | None = None) -> Any:
    follow = lambda work, cell, *peer: tracked.append((work, cell, *peer))  # noqa: E731
    leaf = wrappers.Leaf(BY_NAME[name], original, ledger, in_flight or InFlight(), follow)
    careful = leaf(original)
    if not form[-1]:
        return careful
    function, _ = leaf.in_c(original, careful)
    # As torch's decorators call it, from a module of torch's.
    names = {"__name__": "torch.distributed.c10d_logger", "function": function}
    return functools.wraps(function)(eval("lambda *args, **kwargs: function(*args, **kwargs)", names))


def all_reduce(tensor: Any, op: str = "sum", group: Any = None, async_op: bool = False) -> Any:
    if isinstance(tensor, BaseException):
        raise tensor
    return Work() if async_op else None


def only(ledger: Ledger, how: How = How.WAITED) -> Any:
    (cell,) = [cell for here in ledger.groups for (_, kind), cell in here.cells.items() if kind is how]
    return cell


def test_a_call_is_counted_with_its_bytes_and_time(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    for size in (8, 16):
        assert ours(Tensor(size)) is None
    cell = only(ledger)
    assert (cell.count, cell.bytes, cell.group.calls) == (2, 24, 2)
    assert sum(cell.buckets) == 2
    assert 0 < cell.slowest <= cell.time


def test_the_signature_is_the_functions_own(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    parameters = inspect.signature(ours).parameters
    assert list(parameters) == ["tensor", "op", "group", "async_op"]
    assert [one.default for one in parameters.values()] == [inspect.Parameter.empty, "sum", None, False]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tensors'"):
        ours(tensors=1)


def test_an_error_passes_through_as_the_same_object(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    mistake = ValueError("theirs")
    with pytest.raises(ValueError, match="theirs") as raised:
        ours(mistake)
    assert raised.value is mistake
    assert raised.traceback[-1].name == "all_reduce"
    assert raised.traceback[-1].path.name == "test_wrappers.py"
    cell = only(ledger)
    assert (cell.count, cell.errors, cell.group.calls) == (0, 1, 0)
    ours(Tensor(1))
    assert cell.count == 1


def test_a_message_without_a_size_is_counted_all_the_same(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    ours(object())
    cell = only(ledger)
    assert (cell.count, cell.bytes, cell.unsized) == (1, 0, 1)


def test_calls_that_return_early_are_counted_apart_and_followed(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    work = ours(Tensor(4), async_op=True)
    ours(Tensor(4))
    assert tracked == [(work, only(ledger, How.ISSUED))]
    assert only(ledger).count == only(ledger, How.ISSUED).count == 1


def test_the_default_group_has_one_cell_under_both_its_names(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    ours(Tensor(1))
    ours(Tensor(1), group=ledger._ask.actual(None))
    assert only(ledger).count == 2


def test_who_is_not_in_the_group_counts_nothing(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    ours(Tensor(1), group=NOT_A_MEMBER)
    assert ledger.groups == []


def test_a_call_that_enters_twice_is_counted_once(ledger: Ledger) -> None:
    ours: Any = None

    def entering_again(tensor: Any, op: str = "sum", group: Any = None, async_op: bool = False) -> Any:
        # As torch does for tensor subclasses and torch.function modes.
        return ours(tensor.inner, op, group, async_op) if hasattr(tensor, "inner") else None

    ours = wrapped(ledger, "all_reduce", entering_again)
    ours(SimpleNamespace(inner=Tensor(4), nbytes=4))
    cell = only(ledger)
    assert (cell.count, cell.bytes, cell.group.calls) == (1, 4, 1)


def test_an_object_function_is_one_call_of_the_size_that_its_parts_move(ledger: Ledger) -> None:
    in_flight = InFlight()
    inner = wrapped(ledger, "all_reduce", all_reduce, in_flight)

    def all_gather_object(object_list: Any, obj: Any, group: Any = None) -> None:
        inner(Tensor(8), group=group)
        inner(Tensor(100), group=group)

    outer = composites.objects(BY_NAME["all_gather_object"], ledger, in_flight)(all_gather_object)
    outer([None], 1)
    outer([None], 1, None)
    (here,) = ledger.groups
    cell = here.cells["all_gather_object", How.WAITED]
    assert (cell.count, cell.bytes) == (2, 216)
    assert here.calls == 4, "torch counts the inner collectives"
    assert here.cells["all_reduce", How.WAITED].count == 0
    assert not in_flight.taken()


def test_eight_threads_are_counted_to_the_unit(ledger: Ledger) -> None:
    many = 100_000
    ours = wrapped(ledger, "all_reduce", all_reduce)
    tensor = Tensor(3)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [ours(tensor) for _ in range(many)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    cell = only(ledger)
    assert (cell.count, cell.bytes, cell.group.calls) == (8 * many, 24 * many, 8 * many)
    assert sum(cell.buckets) == 8 * many


def test_a_process_group_is_not_kept_alive_and_its_id_not_confused(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    group = ProcessGroup()
    ours(Tensor(1), group=group)
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None
    for _ in range(50):  # of which some will have the same id
        another = ProcessGroup()
        ours(Tensor(1), group=another)
        del another
    assert [here.calls for here in ledger.groups] == [1] * 51


def test_who_looks_during_a_call_sees_what_it_is(ledger: Ledger) -> None:
    in_flight = InFlight()
    seen: list[Any] = []

    def looked_at(tensor: Any, op: str = "sum", group: Any = None, async_op: bool = False) -> Any:
        seen.extend((slot.call.operation, slot.started > 0, slot.thread) for slot in in_flight.taken())
        if op == "wrong":
            raise ValueError(op)

    failed: list[Any] = []
    ledger.on_failure = lambda cell, error: failed.append((cell.operation, str(error)))
    ours = wrapped(ledger, "all_reduce", looked_at, in_flight)
    tensor = Tensor(4)
    for _ in range(2):
        ours(tensor)
        with pytest.raises(ValueError, match="wrong"):
            ours(op="wrong", tensor=tensor)
    assert seen == [("all_reduce", True, threading.get_ident())] * 4
    assert failed == [("all_reduce", "wrong")] * 2
    assert not in_flight.taken()


def test_the_last_calls_of_a_group_are_remembered_with_their_sizes(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    for size in range(1, 41):
        ours(Tensor(size))
    here = only(ledger).group
    operations = {cell.number + 1: cell.operation for cell in here.cells.values()}
    places = {key: 2 * (key % RECENT) for key in range(41 - RECENT, 41)}
    last = [(operations[here.recent[place]], here.recent[place + 1]) for place in places.values()]
    assert last == [("all_reduce", key) for key in places]


@pytest.mark.parametrize("in_c", [True], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_what_a_thread_enters_is_written_where_it_outlives_the_process(ledger: Ledger, dtype: torch.dtype) -> None:
    in_flight = InFlight()
    memory = (ctypes.c_int64 * 8)()
    during: list[list[int]] = []

    def looked_at(tensor: Any, op: str = "sum", group: Any = None, async_op: bool = False) -> Any:
        during.append(list(memory))

    ours = wrapped(ledger, "all_reduce", looked_at, in_flight)
    ours(torch.ones(3, dtype=dtype))
    in_flight.slot().address = ctypes.addressof(memory)
    ours(torch.ones(3, dtype=dtype))
    number, key, size, kind, started, *_ = during[-1]
    assert (number, key, size) == (only(ledger).number + 1, 2, 3 * torch.ones(1, dtype=dtype).element_size())
    assert c_wrappers.dtypes(torch)[kind - 1] is dtype
    assert 0 < started < time.monotonic_ns()
    assert memory[0] == 0
    in_flight.slot().address = 0
    ours(torch.ones(3))
    assert list(memory)[:2] == [0, 2]


@pytest.mark.parametrize("in_c", [True], indirect=True)
def test_a_call_that_raised_stays_written_until_that_is_told(ledger: Ledger) -> None:
    """In between, whoever asks would find neither."""
    in_flight = InFlight()
    memory = (ctypes.c_int64 * 8)()
    told: list[list[int]] = []
    ledger.on_failure = lambda cell, error: told.append(list(memory))

    def refused(tensor: Any, op: str = "sum", group: Any = None, async_op: bool = False) -> Any:
        if op == "wrong":
            raise ValueError(op)

    ours = wrapped(ledger, "all_reduce", refused, in_flight)
    ours(torch.ones(3))  # what a group's first call is gone through with is not in C
    in_flight.slot().address = ctypes.addressof(memory)
    with pytest.raises(ValueError, match="wrong"):
        ours(torch.ones(3), "wrong")
    assert told[0][:2] == [only(ledger).number + 1, 2]
    assert memory[0] == 0


def test_the_copy_counted_in_c_passes_for_the_original(ledger: Ledger) -> None:
    leaf = wrappers.Leaf(BY_NAME["all_reduce"], all_reduce, ledger, InFlight(), lambda work, cell: None)
    copy, release = leaf.in_c(all_reduce, leaf(all_reduce))
    call = functools.partial(copy, Tensor(3))
    assert copy.__code__ is all_reduce.__code__
    assert inspect.signature(copy) == inspect.signature(all_reduce)
    assert (copy.__name__, copy.__qualname__, copy.__module__) == ("all_reduce", "all_reduce", __name__)
    call()
    assert only(ledger).count == 1
    release()
    call()
    release()
    assert only(ledger).count == 1
    assert vars(copy) == vars(all_reduce)


def test_released_while_calls_are_under_way(ledger: Ledger) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(tensor: Any, op: str = "sum", group: Any = None, async_op: bool = False) -> Any:
        entered.set()
        assert leave.wait(30)
        return tensor

    leaf = wrappers.Leaf(BY_NAME["all_reduce"], slow, ledger, InFlight(), lambda work, cell: None)
    function, release = leaf.in_c(slow, leaf(slow))
    call = functools.partial(function, Tensor(3))
    leave.set()
    call()  # the first is done with care
    leave.clear()
    entered.clear()
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert entered.wait(30)
        release()
        del leaf, function, release
        gc.collect()
    finally:
        leave.set()
        thread.join()
    assert only(ledger).count == 2


@pytest.mark.parametrize("in_c", [True], indirect=True)
def test_a_function_where_another_was_has_a_counter_of_its_own(ledger: Ledger) -> None:
    # Of where a function lies its counter is remembered: 300 of them come and go, released or simply dropped.
    tensor, in_flight = Tensor(3), InFlight()
    lay_at: set[int] = set()
    for turn in range(300):
        name = ("all_reduce", "broadcast")[turn % 2]
        leaf = wrappers.Leaf(BY_NAME[name], all_reduce, ledger, in_flight, lambda work, cell: None)
        function, release = leaf.in_c(all_reduce, leaf(all_reduce))
        lay_at.add(id(function))
        call = functools.partial(function, tensor)
        call(), call()
        if turn % 3:
            release()
            call()
        del leaf, function, release, call
        gc.collect(0)
    assert len(lay_at) < 300
    assert sorted(cell.count for here in ledger.groups for cell in here.cells.values()) == [300, 300]


def interrupted(*_: object) -> Any:
    """As the handler of a signal does that comes while code of ours runs."""
    raise KeyboardInterrupt


class InterruptsWhenMeasured:
    nbytes = property(interrupted)


@pytest.mark.parametrize("while_we", ["measure", "follow", "note", "tell of an error"])
def test_an_interrupt_reaches_the_user_from_wherever_it_comes(
    ledger: Ledger, while_we: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = interrupted if while_we == "follow" else lambda *_: None
    in_flight = InFlight()
    leaf = wrappers.Leaf(BY_NAME["all_reduce"], all_reduce, ledger, in_flight, follow)
    careful = leaf(all_reduce)
    function = leaf.in_c(all_reduce, careful)[0] if form[-1] else careful
    ours = functools.partial(function)  # calls it as torch's decorators do
    ours(Tensor(1))  # the first is done with care
    tensor: Any = Tensor(1)
    if while_we == "measure":
        tensor = InterruptsWhenMeasured()
    elif while_we == "note":
        monkeypatch.setattr(Cell, "note", interrupted)
        only(ledger).notable = -1
    elif while_we == "tell of an error":
        monkeypatch.setattr(ledger, "on_failure", interrupted)
        tensor = RuntimeError("theirs")
    if while_we == "follow":
        with pytest.raises(KeyboardInterrupt):
            ours(tensor, async_op=True)  # again with care
    with pytest.raises(KeyboardInterrupt) as caught:
        ours(tensor, async_op=while_we == "follow")
    assert (caught.value.__context__ is tensor) == (while_we == "tell of an error")
    assert in_flight.slot().call is None
    monkeypatch.undo()
    assert ours(Tensor(1)) is None


class Decoy:
    """As large as a slot, and could pass for an empty one."""

    __slots__ = ("__weakref__", "a", "b", "c", "d", "e")

    def __init__(self) -> None:
        self.a = self.b = self.c = self.d = self.e = None

    def is_untouched(self) -> bool:
        return all(getattr(self, name) is None for name in "abcde")


def on_a_thread_of_c(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Both on one thread that Python doesn't know: each time it is a new one of Python's."""
    libc, function = ctypes.CDLL(None), ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    thread, key = ctypes.c_ulong(), ctypes.c_uint()

    def begin(_: object) -> None:
        libc.pthread_setspecific(key, ctypes.c_void_p(1))
        first()

    begins, ends = function(begin), function(lambda _: second())
    assert libc.pthread_key_create(ctypes.byref(key), ends) == 0
    assert libc.pthread_create(ctypes.byref(thread), None, begins, None) == 0
    assert libc.pthread_join(thread, None) == 0
    libc.pthread_key_delete(key)


def test_a_thread_of_c_that_calls_again_writes_to_no_memory_of_others(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    tensor, decoys = Tensor(8), list[Decoy]()

    def call() -> None:
        for _ in range(3):
            ours(tensor)

    def call_again() -> None:
        decoys.extend(Decoy() for _ in range(1_000))
        call()

    on_a_thread_of_c(call, call_again)
    assert len(decoys) == 1_000
    assert all(one.is_untouched() for one in decoys)
    assert only(ledger).count == 6


def test_of_a_transfer_it_is_known_whom_it_is_with(ledger: Ledger) -> None:
    def irecv(tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        return Work()

    ours = wrappers.Leaf(BY_NAME["irecv"], irecv, ledger, InFlight(), lambda work, cell, peer: tracked.append(peer))(
        irecv
    )
    ours(Tensor(1), 3)
    ours(Tensor(1), group_src=2)
    ours(Tensor(1))
    assert tracked == [3, 2, None]


def test_arguments_by_name_in_any_order_and_from_text_made_at_run_time(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    names = ["".join(["async", "_op"]), "".join(["ten", "sor"])]
    for _ in range(2):
        ours(**dict(zip(names, (True, Tensor(6)), strict=True)))
        ours(op="max", tensor=Tensor(5))
        ours(Tensor(1), async_op=1)  # not a truth value, and true
    assert (only(ledger, How.ISSUED).count, only(ledger, How.ISSUED).bytes) == (4, 14)
    assert (only(ledger).count, only(ledger).bytes) == (2, 10)


def test_totals_beyond_64_bits(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    ours(Tensor(1))
    for size in (2**63 - 1, 2**62):
        ours(Tensor(size))
    assert only(ledger).bytes == (2**63 - 1 if plain_numbers.exist else 2**63 + 2**62)


@pytest.mark.skipif(not hasattr(torch.Tensor, "nbytes"), reason="the bytes are worked out from the elements")
@pytest.mark.parametrize("size", [2**63, -(2**63) - 1, None, 1.5, "much"])
def test_what_is_no_number_of_64_bits_is_no_size(ledger: Ledger, size: Any) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    for one in (Tensor(size), Tensor(3), Tensor(size)):
        assert ours(one) is None
    assert (only(ledger).count, only(ledger).bytes, only(ledger).unsized) == (3, 3, 2)


def test_messages_of_many_tensors(ledger: Ledger) -> None:
    def all_to_all(
        output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
    ) -> None: ...

    ours = wrapped(ledger, "all_to_all", all_to_all)
    ours([], [Tensor(4), Tensor(8), Tensor(16), Tensor(32)])
    ours(input_tensor_list=[Tensor(4), Tensor(8), Tensor(16), Tensor(32)], output_tensor_list=[])
    assert only(ledger).bytes == 2 * 52
    ours([], [object()])
    assert (only(ledger).unsized, only(ledger).count) == (1, 3)


def test_a_size_that_raises_is_not_the_users(ledger: Ledger) -> None:
    class Odd:
        @property
        def nbytes(self) -> int:
            raise RuntimeError("ours")

    ours = wrapped(ledger, "all_reduce", all_reduce)
    for _ in range(2):
        assert ours(Odd()) is None
    assert only(ledger).unsized == 2


def test_nothing_is_counted_once_the_ledger_is_closed(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    ours(Tensor(1))
    ledger.close()
    ours(Tensor(1))
    assert only(ledger).count == 1


def test_the_slowest_call_names_the_users_line(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    ours(Tensor(1))
    cell = only(ledger)
    assert place(cell.slowest_code, cell.slowest_at) == f"{__file__}:{line}"
    cell.take_slowest()
    ours(Tensor(1))
    assert place(cell.slowest_code, cell.slowest_at) == f"{__file__}:{line + 4}"


def test_each_call_can_be_noted_and_what_does_not_fit_is_counted() -> None:
    ledger = Ledger(Groups(), each=lambda here: True)
    ours = wrapped(ledger, "all_reduce", all_reduce)
    for _ in range(5_000):
        ours(Tensor(2))
    notes, lost = ledger.take_notes()
    assert len(notes) + lost == 5_000
    assert lost > 0
    assert [note.key for note in notes[:3]] == [1, 2, 3]
    ledger.beat()
    ours(Tensor(2))
    assert len(ledger.take_notes()[0]) == 1, "a beat does not end it"


def test_only_slow_calls_are_noted(ledger: Ledger) -> None:
    ours = wrapped(ledger, "all_reduce", all_reduce)
    ours(Tensor(2))
    cell = only(ledger)
    assert cell.slow == NEVER
    assert not ledger.notes
    slow = Ledger(Groups(), slow=1_000_000)
    wrapped(slow, "all_reduce", all_reduce)(Tensor(2))
    cell = only(slow)
    cell.add(0, 999_999, 1)
    assert not slow.notes
    cell.add(0, 1_000_001, 1)
    assert [note.took for note in slow.notes] == [1_000_001]
    for _ in range(200):
        cell.add(0, 900_000, 1)
    slow.beat()
    assert cell.slow > 4_000_000, "eight times its p99"
    cell.add(0, 1_000_001, 1)
    assert len(slow.notes) == 1


def test_samples_are_bounded_and_the_same_on_every_rank() -> None:
    keys = []
    for _rank in range(2):
        ledger = Ledger(Groups())
        ours = wrapped(ledger, "all_reduce", all_reduce)
        mine: list[int] = []
        for beat in range(20):
            for _ in range(500 + beat):
                ours(Tensor(1))
            taken = ledger.take_samples()
            assert len(taken) <= SAMPLES_A_BEAT
            mine += [key for _, key, *_ in taken]
            ledger.beat()
        keys.append(mine)
    assert keys[0] == keys[1]
    assert len(keys[0]) > 100


def test_a_function_of_another_shape_is_told(ledger: Ledger) -> None:
    with pytest.raises(UnknownShape, match="all_reduce has no parameter async_op, group"):
        wrapped(ledger, "all_reduce", lambda tensor, op=None: None)
    with pytest.raises(UnknownShape, match="of another kind: tensor"):
        wrapped(ledger, "all_reduce", lambda *tensor, op=None, group=None, async_op=False: None)


def here(rank: int, size: int) -> Group:
    return Group("0", "world", "gloo", tuple(range(size)), rank)


def sized(operation: Operation, where: Group, **arguments: Any) -> Any:
    from ddtrace_pytorch.collectives import sizes

    return eval(operation.size, {**vars(sizes), "here": where, **arguments})


@pytest.mark.parametrize(
    ("function", "rank", "arguments", "expected"),
    [
        ("all_reduce", 0, {"tensor": Tensor(12)}, 12),
        ("all_gather", 1, {"tensor_list": [Tensor(4), Tensor(8)]}, 12),
        ("reduce_scatter", 1, {"input_list": [Tensor(4), Tensor(8)]}, 12),
        ("all_to_all", 1, {"input_tensor_list": [Tensor(4), Tensor(8), Tensor(16)]}, 20),
        ("all_to_all_single", 1, {"input": Tensor(80, rows=4), "input_split_sizes": None}, 60),
        ("all_to_all_single", 1, {"input": Tensor(80, rows=4), "input_split_sizes": []}, 60),
        ("all_to_all_single", 1, {"input": Tensor(80, rows=8), "input_split_sizes": [1, 4, 3, 0]}, 40),
        ("all_to_all_single", 1, {"input": Tensor(0, rows=0), "input_split_sizes": [0, 0, 0, 0]}, 0),
        ("gather", 0, {"gather_list": [Tensor(4), Tensor(8)]}, 8),
        ("gather", 1, {"gather_list": None}, 0),
        ("gather", 1, {"gather_list": []}, 0),
        ("gather_single", 0, {"gather_tensor": Tensor(8), "tensor": Tensor(2), "dst": None, "group_dst": None}, 6),
        ("gather_single", 1, {"gather_tensor": Tensor(8), "tensor": Tensor(2), "dst": 0, "group_dst": None}, 0),
        ("gather_single", 1, {"gather_tensor": Tensor(8), "tensor": Tensor(2), "dst": None, "group_dst": 1}, 6),
        ("scatter", 1, {"scatter_list": [Tensor(4), Tensor(8)]}, 4),
        ("all_gather_coalesced", 0, {"output_tensor_lists": [[Tensor(1), Tensor(2)], [Tensor(4)]]}, 7),
        ("all_reduce_coalesced", 0, {"tensors": [Tensor(1), Tensor(2)]}, 3),
        ("barrier", 0, {}, 0),
    ],
)
def test_message_sizes(function: str, rank: int, arguments: dict[str, Any], expected: int) -> None:
    assert sized(BY_NAME[function], here(rank, 4), **arguments) == expected


def test_a_warning_in_the_callers_name_comes_from_where_it_came_without_us(ledger: Ledger) -> None:
    def barrier(group: Any = None, async_op: bool = False) -> None:
        warnings.warn("theirs", stacklevel=2)

    def decorated(func: Any) -> Any:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

        return wrapper

    public = decorated(barrier)

    def warned() -> list[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            public()
            public()
        return [(one.filename, one.lineno) for one in caught]

    before = warned()
    (cell,) = public.__closure__
    cell.cell_contents = wrappers.Leaf(BY_NAME["barrier"], public, ledger, InFlight(), lambda work, cell: None)(barrier)
    assert warned() == before
    assert len(before) == 1
    assert only(ledger).count == 2


def test_what_a_part_calls_in_turn_is_not_another_part(ledger: Ledger) -> None:
    in_flight = InFlight()

    def isend(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0) -> Any:
        return Work()

    inner = wrapped(ledger, "isend", isend, in_flight)

    def send(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0) -> None:
        inner(tensor, dst, group, tag)  # as torch's own does

    middle = wrapped(ledger, "send", send, in_flight)

    def send_object_list(object_list: Any, dst: Any = None, group: Any = None, device: Any = None) -> None:
        middle(Tensor(8), dst, group)
        middle(Tensor(5), dst, group)

    composites.objects(BY_NAME["send_object_list"], ledger, in_flight)(send_object_list)([1], 1)
    (here,) = ledger.groups
    assert here.cells["send_object_list", How.WAITED].bytes == 13
    assert here.calls == 0
    assert not in_flight.taken()


def test_what_is_slow_does_not_change_because_a_summary_was_told() -> None:
    ledger = Ledger(Groups(), slow=1_000_000)
    wrapped(ledger, "all_reduce", all_reduce)(Tensor(2))
    cell = only(ledger)
    for _ in range(200):
        cell.add(0, 900_000, 1)
    ledger.beat()
    slow = cell.slow
    assert slow > 4_000_000
    assert cell.take_slowest()[0] >= 900_000
    ledger.beat()
    assert cell.slow == slow


def test_the_slowest_since_a_summary_is_known_at_once(ledger: Ledger) -> None:
    wrapped(ledger, "all_reduce", all_reduce)(Tensor(2))
    cell = only(ledger)
    cell.add(0, 900_000_000, 1)
    assert cell.take_slowest()[0] == 900_000_000
    assert cell.take_slowest()[0] == 0
    cell.add(0, 5_000, 1)  # before the next beat
    assert cell.take_slowest()[0] == 5_000


def test_a_transfer_has_no_number() -> None:
    ledger = Ledger(Groups(), each=lambda here: True)
    in_flight = InFlight()
    wrapped(ledger, "all_reduce", all_reduce, in_flight)(Tensor(1))

    def isend(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0) -> Any:
        return Work()

    ours = wrapped(ledger, "isend", isend, in_flight)

    def batch(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        yield SimpleNamespace(works=[])

    block = composites.coalescing(BY_NAME["_coalescing_manager"], ledger, in_flight, lambda work, cell: None)(batch)
    with contextlib.contextmanager(block)():
        ours(Tensor(4), 1)
    notes, _ = ledger.take_notes()
    assert [(note.cell.operation, note.key) for note in notes] == [("all_reduce", 1), ("isend", 0)]


def test_two_threads_that_meet_a_group_at_once_have_one_cell() -> None:
    groups = Groups()
    meeting = threading.Barrier(2)
    describe = groups.describe

    def slowly(process_group: Any) -> Group | None:
        meeting.wait(10)
        return describe(process_group)

    groups.describe = slowly  # type: ignore[method-assign]
    ledger = Ledger(groups)
    ours = wrapped(ledger, "all_reduce", all_reduce)
    threads = [threading.Thread(target=ours, args=(Tensor(1),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert only(ledger).count == 2
    assert len(ledger.groups) == 1


def test_a_cell_is_told_of_when_it_is_new(ledger: Ledger) -> None:
    told: list[Cell] = []
    ledger.on_new = told.append
    ours = wrapped(ledger, "all_reduce", all_reduce)
    ours(Tensor(4))
    ours(Tensor(4))
    assert told == [only(ledger)]
    native = ledger.cell("all_reduce", How.NATIVE, True, None)
    assert told[1:] == [native]


def test_what_two_threads_take_at_once_each_gets_in_part(ledger: Ledger) -> None:
    class Overtaken(deque[Any]):
        def popleft(self) -> Any:
            taken = super().popleft()
            if self:
                elsewhere.extend(ledger.take_samples())
            return taken

    elsewhere: list[Any] = []
    ledger.samples = Overtaken([1, 2, 3])
    assert sorted([*ledger.take_samples(), *elsewhere]) == [1, 2, 3]
