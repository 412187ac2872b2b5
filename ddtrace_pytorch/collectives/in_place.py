"""Instrument a function without replacing it.

torch, Dynamo, pipelining and pickles compare `torch.distributed` functions by identity, and users bind them before
we come (`from torch.distributed import all_reduce`). So the public object stays; what it runs is exchanged:

* a function wrapped by one of torch's decorators keeps the real function in its closure cell ``func``: the cell's
  contents are exchanged, at no extra call layer;
* a plain function gets a code object of the same signature that forwards to ours.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

import wrapt

Undo = Callable[[], None]
# Takes the original, gives what is to run in its place (same parameters).
Around = Callable[[Callable[..., Any]], Callable[..., Any]]


class UnknownShape(TypeError):
    """The function is neither of the shapes that can be instrumented in place."""


def instrument(function: Any, around: Around) -> Undo:
    """Make every holder of `function` run ``around(original)``; gives what undoes it.

    Raises:
        UnknownShape: `function` is no Python function, or closes over something that is not torch's decorator.
    """
    if not isinstance(function, FunctionType):
        raise UnknownShape(f"{function!r} is not a Python function")
    if function.__closure__ is None:
        return _exchange_code(function, around)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    cell = cells.get("func")
    if cell is None or not callable(cell.cell_contents):
        raise UnknownShape(f"{function.__qualname__} closes over {', '.join(cells)}, not over a decorated function")
    return _exchange_cell(cell, around)


def _exchange_cell(cell: CellType, around: Around) -> Undo:
    original = cell.cell_contents
    ours = around(original)
    cell.cell_contents = ours

    def undo() -> None:
        # Somebody may have instrumented it after us; theirs then stays, and ours forwards.
        if cell.cell_contents is ours:
            cell.cell_contents = original

    return undo


def _exchange_code(function: FunctionType, around: Around) -> Undo:
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    original.__module__ = function.__module__
    ours = _forwarding_code(code, around(original))
    function.__code__ = ours

    def undo() -> None:
        if function.__code__ is ours:
            function.__code__ = code

    return undo


def _forwarding_code(code: CodeType, target: Callable[..., Any]) -> CodeType:
    """Code with the parameters of `code` that calls `target` with them.

    `target` travels as a constant, since a function without closure can only reach constants and the globals of
    torch's module, which are not ours to write to.
    """
    placeholder = "the function to call"
    positional = code.co_varnames[: code.co_argcount]
    keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    rest = iter(code.co_varnames[code.co_argcount + code.co_kwonlyargcount :])
    star = f"*{next(rest)}" if code.co_flags & 0x04 else None
    double_star = f"**{next(rest)}" if code.co_flags & 0x08 else None

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
        f"def {code.co_name}({', '.join(parameters)}):\n"
        f"    _call = {placeholder!r}\n"
        f"    return _call({', '.join(arguments)})\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, code.co_filename, "exec"), namespace)
    forwarding: CodeType = namespace[code.co_name].__code__
    constants = tuple(target if value == placeholder else value for value in forwarding.co_consts)
    changes: dict[str, Any] = {"co_consts": constants, "co_firstlineno": code.co_firstlineno}
    if sys.version_info >= (3, 11):
        changes["co_qualname"] = code.co_qualname
    return forwarding.replace(**changes)


def wrap(modules: tuple[Any, ...], name: str, around: Around) -> list[Undo]:
    """The fallback: replace `name` in each of `modules` by a proxy that passes for the function it wraps.

    Names bound before are missed, and ``is`` no longer holds.
    """
    undo: list[Undo] = []
    for module in modules:
        function = getattr(module, name)
        ours = around(function)
        proxy = wrapt.FunctionWrapper(
            function, lambda wrapped, instance, args, kwargs, ours=ours: ours(*args, **kwargs)
        )
        setattr(module, name, proxy)
        undo.append(functools.partial(_put_back, module, name, function, proxy))
    return undo


def _put_back(module: Any, name: str, function: Any, proxy: Any) -> None:
    if getattr(module, name) is proxy:
        setattr(module, name, function)
