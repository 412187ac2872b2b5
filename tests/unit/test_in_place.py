"""A function is instrumented without anybody who holds it, compares it or reads its signature noticing."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import sys
import traceback
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import wrapt

from ddtrace_pytorch import in_place

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def decorated(func: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's logging decorators: the real function is in the closure cell `func`."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return wrapper


@decorated
def in_a_cell(first: int, second: int = 2, *, third: int = 3) -> tuple[int, int, int]:
    """A function behind a decorator."""
    return first, second, third


@decorated
@decorated
def in_two_cells(first: int, second: int = 2, *, third: int = 3) -> tuple[int, int, int]:
    return first, second, third


def plain(first: int, second: int = 2, *, third: int = 3) -> tuple[int, int, int]:
    """A plain function."""
    return first, second, third


SHAPES = [in_a_cell, in_two_cells, plain]


@pytest.fixture
def calls() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return []


@pytest.fixture
def counting(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Around:
    return counter(calls)


def counter(calls: list[Any]) -> Around:
    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return original(*args, **kwargs)

        return ours

    return around


def state(function: Any) -> dict[str, Any]:
    """All of a function that a holder could see, and all that we could have changed."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return {
        "id": id(function),
        "hash": hash(function),
        "signature": inspect.signature(function),
        "defaults": function.__defaults__,
        "keyword defaults": function.__kwdefaults__,
        "dict": dict(function.__dict__),
        "name": (function.__name__, function.__qualname__, function.__module__, function.__doc__),
        "code": function.__code__,
        "cells": cells,
        "annotations": dict(function.__annotations__),
    }


def seen_from_outside(function: Any) -> dict[str, Any]:
    code = function.__code__
    shown = {name: value for name, value in state(function).items() if name not in ("code", "cells")}
    return shown | {
        "wrapped": inspect.unwrap(function),
        "code": (code.co_name, code.co_filename, code.co_firstlineno, code.co_argcount, code.co_kwonlyargcount),
        "variables": code.co_varnames[: code.co_argcount + code.co_kwonlyargcount],
        "flags": code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_COROUTINE),
        "free": code.co_freevars,
    }


@pytest.mark.parametrize("function", SHAPES)
def test_every_holder_runs_ours_and_gets_the_same_answer(function: Any, counting: Around, calls: list[Any]) -> None:
    bound_before = functools.partial(function, 1)
    undo = in_place.instrument(function, counting)
    try:
        assert function(1) == (1, 2, 3)
        assert bound_before(third=5) == (1, 2, 5)
        assert function(first=4, second=5, third=6) == (4, 5, 6)
    finally:
        undo()
    assert len(calls) == 3
    function(1)
    assert len(calls) == 3


@pytest.mark.parametrize("function", SHAPES)
def test_nothing_can_be_told_from_outside(function: Any, counting: Around) -> None:
    before, pickled = seen_from_outside(function), pickle.dumps(function)
    undo = in_place.instrument(function, counting)
    try:
        assert seen_from_outside(function) == before
        assert pickle.dumps(function) == pickled
        assert pickle.loads(pickled) is function
        assert copy.deepcopy(function) is function
        assert inspect.isfunction(function)
    finally:
        undo()


@pytest.mark.parametrize("function", SHAPES)
def test_undone_it_is_exactly_what_it_was(function: Any, counting: Around) -> None:
    before = state(function)
    for _ in range(3):
        in_place.instrument(function, counting)()
        after = state(function)
        assert after == before
        assert after["code"] is before["code"]
        assert all(now is then for now, then in zip(after["cells"], before["cells"], strict=True))


@pytest.mark.parametrize("function", SHAPES)
def test_a_wrong_call_fails_as_it_always_did(function: Any, counting: Around) -> None:
    def complaint(*args: Any, **kwargs: Any) -> str:
        with pytest.raises(TypeError) as caught:
            function(*args, **kwargs)
        return str(caught.value)

    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}), ((1, 2, 3), {}), ((1,), {"fourth": 4})]
    before = [complaint(*args, **kwargs) for args, kwargs in wrong]
    undo = in_place.instrument(function, counting)
    try:
        assert [complaint(*args, **kwargs) for args, kwargs in wrong] == before
    finally:
        undo()


def fails(message: str) -> None:
    raise ValueError(message)


@pytest.mark.parametrize("function", [fails, decorated(fails)])
def test_an_error_is_the_same_object_with_the_same_last_frame(function: Any, counting: Around) -> None:
    error: list[BaseException] = []

    def tail() -> list[str]:
        with pytest.raises(ValueError, match="theirs") as caught:
            function("theirs")
        error.append(caught.value)
        return [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)][-1:]

    before = tail()
    undo = in_place.instrument(function, counting)
    try:
        assert tail() == before
    finally:
        undo()
    assert error[1].__context__ is None
    assert error[1].__cause__ is None


def all_kinds(a: Any, b: Any = 2, /, c: Any = 3, *rest: Any, d: Any, e: Any = 5, **more: Any) -> Any:
    return a, b, c, rest, d, e, more


def no_parameters() -> str:
    return "nothing"


def only_keywords(*, one: int = 1) -> int:
    return one


def only_rest(*rest: int) -> tuple[int, ...]:
    return rest


def only_more(**more: int) -> dict[str, int]:
    return more


def named_like_ours(call: int, call_: int = 2) -> tuple[int, int]:
    return call, call_


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (all_kinds, (1,), {"d": 4}),
        (all_kinds, (1, 2, 3, 4, 5), {"d": 4, "e": 6, "f": 7, "a": 8}),
        (no_parameters, (), {}),
        (only_keywords, (), {"one": 7}),
        (only_rest, (1, 2), {}),
        (only_more, (), {"x": 1}),
        (named_like_ours, (1,), {}),
        (named_like_ours, (), {"call_": 3, "call": 4}),
    ],
)
def test_every_kind_of_parameter_is_passed_on(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], counting: Around, calls: list[Any]
) -> None:
    plainly, before = function(*args, **kwargs), seen_from_outside(function)
    undo = in_place.instrument(function, counting)
    try:
        assert function(*args, **kwargs) == plainly
        assert seen_from_outside(function) == before
    finally:
        undo()
    assert len(calls) == 1


def test_a_default_that_changes_later_is_obeyed(counting: Around) -> None:
    undo = in_place.instrument(plain, counting)
    before = plain.__defaults__
    try:
        plain.__defaults__ = (9,)
        assert plain(1) == (1, 9, 3)
    finally:
        plain.__defaults__ = before
        undo()


class Callable_:
    def __call__(self) -> None: ...


def closing_over_something_else() -> Callable[[], int]:
    number = 7

    def function() -> int:
        return number

    return function


def with_a_func_that_is_no_function() -> Callable[[], Any]:
    func = 3

    def function() -> Any:
        return func

    return function


@pytest.mark.parametrize(
    "thing",
    [
        len,
        Callable_(),
        functools.partial(plain, 1),
        closing_over_something_else(),
        with_a_func_that_is_no_function(),
    ],
)
def test_a_shape_we_do_not_know_is_refused_and_left_alone(thing: Any, counting: Around, calls: list[Any]) -> None:
    before = state(thing) if isinstance(thing, FunctionType) else None
    with pytest.raises(in_place.UnknownShape):
        in_place.instrument(thing, counting)
    if before is not None:
        assert state(thing) == before
    assert calls == []


@pytest.fixture
def modules() -> tuple[ModuleType, ModuleType, Any]:
    """Two modules that hold one function, as torch.distributed and its distributed_c10d do."""
    function = closing_over_something_else()
    first, second = ModuleType("first"), ModuleType("second")
    first.operation = second.operation = function  # type: ignore[attr-defined]
    return first, second, function


def test_the_fallback_wraps_in_both_modules_and_gives_both_back(
    modules: tuple[ModuleType, ModuleType, Any], counting: Around, calls: list[Any]
) -> None:
    first, second, function = modules
    undo = in_place.wrap((first, second), "operation", counting)
    assert [first.operation(), second.operation()] == [7, 7]
    assert first.operation is second.operation
    assert first.operation == function
    assert hash(first.operation) == hash(function)
    assert inspect.signature(first.operation) == inspect.signature(function)
    assert isinstance(first.operation, FunctionType)
    assert len(calls) == 2
    for back in reversed(undo):
        back()
    assert first.operation is function
    assert second.operation is function


def test_a_proxy_passes_for_the_function_where_wrapts_own_does_not(counting: Around, calls: list[Any]) -> None:
    module, function = sys.modules[__name__], plain
    plainly = pickle.dumps(function)
    undo = in_place.wrap((module,), "plain", counting)
    proxy = module.plain
    assert isinstance(proxy, in_place.Proxy)
    assert copy.copy(proxy) is copy.deepcopy({"held": proxy})["held"] is proxy
    assert pickle.dumps(proxy) == plainly
    assert pickle.loads(plainly) is proxy
    assert functools.partial(pickle.loads(pickle.dumps(functools.partial(proxy, 1))))() == (1, 2, 3)
    holder = type("Holder", (), {"method": proxy})()
    assert holder.method(5) == (holder, 5, 3), "bound, as a function would be"
    assert type(holder).method is proxy
    for back in undo:
        back()
    assert module.plain is function
    assert pickle.loads(pickle.dumps(proxy)) is function, "held beyond the end"
    assert len(calls) == 2


@pytest.mark.parametrize("leaving", itertools.permutations(range(3)))
@pytest.mark.parametrize("function", SHAPES)
def test_of_several_instrumentations_each_ends_when_it_leaves(function: Any, leaving: tuple[int, ...]) -> None:
    before = state(function)
    calls: list[list[Any]] = [[], [], []]
    undo = [in_place.instrument(function, counter(mine)) for mine in calls]
    staying = {0, 1, 2}
    for who in leaving:
        undo[who]()
        staying.discard(who)
        for mine in calls:
            mine.clear()
        assert function(1) == (1, 2, 3)
        assert [len(mine) for mine in calls] == [int(number in staying) for number in range(3)]
    if leaving == (2, 1, 0):
        assert state(function) == before
    else:
        give_back(function, before)


def give_back(function: Any, before: dict[str, Any]) -> None:
    """After an order in which nobody can restore the function: the next test gets a whole one."""
    function.__code__ = before["code"]
    for cell, content in zip(function.__closure__ or (), before["cells"], strict=True):
        cell.cell_contents = content


def test_another_tools_wrapper_over_the_fallback_stays_and_ours_falls_silent(
    modules: tuple[ModuleType, ModuleType, Any], counting: Around, calls: list[Any]
) -> None:
    first, second, function = modules
    undo = in_place.wrap((first, second), "operation", counting)
    first.operation = theirs = decorated(first.operation)  # type: ignore[attr-defined]
    for back in reversed(undo):
        back()
    assert first.operation is theirs
    assert second.operation is function
    assert theirs() == 7
    assert calls == []


def test_under_another_tools_proxy_the_function_itself_is_instrumented(counting: Around, calls: list[Any]) -> None:
    for function in SHAPES:
        before = state(function)
        theirs = wrapt.FunctionWrapper(function, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
        undo = in_place.instrument(theirs, counting)
        theirs(1)
        function(1)
        undo()
        assert state(function) == before
    assert len(calls) == 2 * len(SHAPES)
