"""Instrument a function without replacing it.

torch, Dynamo, pipelining and pickles compare `torch.distributed` functions by identity, and users bind them before
we come (`from torch.distributed import all_reduce`). So the public object stays; what it runs is exchanged:

* a function wrapped by one of torch's decorators keeps the real function in its closure cell ``func``: the cell's
  contents are exchanged, at no extra call layer;
* a plain function gets a code object of the same signature that forwards to ours.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import wrapt

from ddtrace_pytorch.border import log, warn_once
from ddtrace_pytorch.compiler import leave_uncompiled, see_through

Undo = Callable[[], None]
# Takes the original, gives a Python function to run in its place (same parameters).
Around = Callable[[Callable[..., Any]], Callable[..., Any]]
# Takes the original and that function; gives one to take its place that is like the original in all but what it does
# when it is called, and what makes that one pass calls on.
Faster = Callable[[FunctionType, Any], tuple[FunctionType, Undo]]


class UnknownShape(TypeError):
    """The function is neither of the shapes that can be instrumented in place."""


def instrument(function: Any, around: Around, faster: Faster | None = None, file: str = "{}") -> Undo:
    """Make every holder of `function` run ``around(original)``, or what is `faster`; gives what undoes it.

    `file` is what a layer that this adds gives as its file, ``{}`` being that of `function`.

    Raises:
        UnknownShape: `function` is no Python function, or closes over something that is not torch's decorator.
    """
    if not isinstance(function, FunctionType):
        raise UnknownShape(f"{function!r} is not a Python function")
    if function.__closure__ is None:
        return _exchange_code(function, around, file)
    return _exchange_cell(_decorated(function), around, faster)


def _decorated(function: FunctionType) -> CellType:
    """The closure cell with the real function: inside torch's decorator ``func``, and inside that one's ``arg`` where a
    function is deprecated (typing_extensions: exchanging the outer one would move the warning to another file)."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cell = cells.get("func") or cells.get("arg")
    if cell is None or not isinstance(inner := cell.cell_contents, FunctionType):
        raise UnknownShape(f"{function.__qualname__} closes over {', '.join(cells)}, not over a decorated function")
    if "arg" in inner.__code__.co_freevars:
        return _decorated(inner)
    return cell


def _exchange_cell(cell: CellType, around: Around, faster: Faster | None) -> Undo:
    original = cell.cell_contents
    ours = _unseen(around(original), original)
    give_up: Undo = functools.partial(stand_aside, ours, original)
    if faster is not None:
        # Torch's decorators call what is in the cell with `*args`: the one way that never looks into the function.
        ours, give_up = faster(original, ours)
    cell.cell_contents = ours

    def undo() -> None:
        if cell.cell_contents is ours:
            cell.cell_contents = original
        else:
            give_up()

    return undo


def _exchange_code(function: FunctionType, around: Around, file: str) -> Undo:
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    original.__module__ = function.__module__
    ours = _unseen(around(original), original)
    forwarding = _forwarding_code(code, ours).replace(co_filename=file.format(code.co_filename))
    leave_uncompiled(forwarding)
    function.__code__ = forwarding

    def undo() -> None:
        if function.__code__ is forwarding:
            function.__code__ = code
        else:
            stand_aside(ours, original)

    return undo


def _unseen(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.isgeneratorfunction(ours):
        see_through(ours, original)
    leave_uncompiled(ours.__code__)
    return ours


def stand_aside(ours: Any, original: Callable[..., Any]) -> None:
    """Somebody wrapped the function after us and calls `ours`: from now on that only calls `original`."""
    ours.__code__ = _forwarding_code(ours.__code__, original)


def _forwarding_code(code: CodeType, target: Callable[..., Any]) -> CodeType:
    """Code with the parameters and free variables of `code` that calls `target` with the parameters.

    `target` travels as a constant: the globals of torch's module are not ours to write to, and a function's closure
    cannot be exchanged.
    """
    placeholder = "the function to call"
    call = "call"
    while call in (*code.co_varnames, *code.co_freevars):
        call += "_"
    positional = code.co_varnames[: code.co_argcount]
    keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    rest = iter(code.co_varnames[code.co_argcount + code.co_kwonlyargcount :])
    star = f"*{next(rest)}" if code.co_flags & inspect.CO_VARARGS else None
    double_star = f"**{next(rest)}" if code.co_flags & inspect.CO_VARKEYWORDS else None

    parameters = list(positional)
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    if star or keyword_only:
        parameters.append(star or "*")
    parameters += keyword_only
    arguments = [*positional]
    if star:
        arguments.append(star)
    arguments += [f"{name}={name}" for name in keyword_only]
    if double_star:
        parameters.append(double_star)
        arguments.append(double_star)

    source = (
        f"def surroundings({', '.join(code.co_freevars)}):\n"
        f"    def forwarding({', '.join(parameters)}):\n"
        f"        {call} = {placeholder!r}\n"
        f"        try:\n"
        f"            return {call}({', '.join(arguments)})\n"
        f"        except BaseException as {call}:\n"
        f"            if {call}.__traceback__ is not None:\n"
        f"                {call}.__traceback__ = {call}.__traceback__.tb_next\n"
        f"            raise\n"
        f"        {', '.join(code.co_freevars) or None}\n"
        f"    return forwarding\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, code.co_filename, "exec"), namespace)
    forwarding: CodeType = namespace.pop("surroundings")(*code.co_freevars).__code__
    constants = tuple(target if value == placeholder else value for value in forwarding.co_consts)
    changes: dict[str, Any] = {
        "co_consts": constants,
        "co_name": code.co_name,
        "co_firstlineno": code.co_firstlineno,
    }
    if sys.version_info >= (3, 11):
        changes["co_qualname"] = code.co_qualname
    return forwarding.replace(**changes)


def place(
    distributed: Any, name: str, around: Around, forced: str = "auto", faster: Faster | None = None
) -> tuple[list[Undo], str]:
    """Have ``around(original)`` run for `torch.distributed`'s function `name`; gives what undoes it, and how.

    `faster` is taken instead where torch's decorators allow for it.

    ``in_place``; or ``wrapt``, a proxy in both modules, where `forced` says so or this torch's function has a shape we
    don't know; or nothing, where this torch has no such function.
    """
    modules = [one for one in (distributed, distributed.distributed_c10d) if hasattr(one, name)]
    if not modules:
        warn_once(f"this torch has no torch.distributed.{name}; ddtrace-pytorch goes on without it")
        return [], ""
    return place_in(modules, name, around, forced, faster)


def place_in(
    holders: Sequence[Any], name: str, around: Around, forced: str = "auto", faster: Faster | None = None
) -> tuple[list[Undo], str]:
    """The same for the function that each of `holders`, modules or classes, has under `name`."""
    if forced != "wrapt":
        try:
            return [instrument(getattr(holders[-1], name), around, faster)], "in_place"
        except UnknownShape as shape:
            log.info("%s is wrapped, not instrumented in place: %s", name, shape)
    return wrap(holders, name, around), "wrapt"


def wrap(modules: Sequence[Any], name: str, around: Around) -> list[Undo]:
    """The fallback: replace `name` in each of `modules` by a proxy that passes for the function it wraps.

    Modules that hold the same function hold the same proxy. Names bound before are missed, and ``is`` no longer
    holds between them and the proxy.
    """
    undo: list[Undo] = []
    proxies: dict[int, tuple[Any, Any]] = {}
    for module in modules:
        function = getattr(module, name)
        if id(function) not in proxies:
            proxies[id(function)] = _proxy(function, around)
        proxy, ours = proxies[id(function)]
        setattr(module, name, proxy)
        undo.append(functools.partial(_put_back, module, name, function, proxy, ours))
    return undo


class Proxy(wrapt.FunctionWrapper):
    """Passes for the function it wraps where wrapt's own doesn't: it can be pickled, copied, and bound as a method."""

    def __reduce_ex__(self, protocol: object) -> Any:
        name = self.__qualname__
        if getattr(sys.modules.get(self.__module__), name, None) is self:
            return name  # as functions are: loads as whatever bears this name there
        return pkgutil.resolve_name, (f"{self.__module__}:{name}",)

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(0)

    def __copy__(self) -> Proxy:
        return self

    def __deepcopy__(self, memo: object) -> Proxy:
        return self

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # As a function does. wrapt would take the instance out of the arguments.
        return self if instance is None else MethodType(self, instance)


def _proxy(function: Any, around: Around) -> tuple[Any, Callable[..., Any]]:
    ours = around(function)
    return Proxy(function, lambda wrapped, instance, args, kwargs: ours(*args, **kwargs)), ours


def _put_back(module: Any, name: str, function: Any, proxy: Any, ours: Any) -> None:
    if getattr(module, name) is proxy:
        setattr(module, name, function)
    else:
        stand_aside(ours, function)
