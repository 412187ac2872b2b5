"""Has the signs of frameworks told as they are seen, at no import cost, and gives back what it touched.

A method is wrapped on its class. A function is instrumented in place: whoever holds it, by whatever name and since
whenever, is heard, and it stays itself for `is`, pickle and the registers that torch keeps by function.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

from ddtrace_pytorch import autoload, compiler, in_place
from ddtrace_pytorch.border import leave_no_trace, log, safely
from ddtrace_pytorch.training.frameworks import Use
from ddtrace_pytorch.training.signs import SIGNS, Call, Sign

Undo = Callable[[], None]
Seen = Callable[[Use], object]

# Python's warnings are about the frame that called, and pass over frames whose file is named like these two parts of
# its import system: with that name they stay about the user's line, not about ours.
PASSED_OVER = "{} (passed over by warnings, like importlib._bootstrap)"


def watch(seen: Seen, undo: list[Undo], signs: Iterable[Sign] = SIGNS) -> None:
    """Call `seen` with what each of `signs` tells, also of modules imported later; what undoes it goes into `undo`."""
    for name, rows in itertools.groupby(sorted(signs, key=_module), key=_module):
        undo.append(autoload.after_import(name, functools.partial(_watch_module, tuple(rows), seen, undo)))


def _module(sign: Sign) -> str:
    return sign.module


def _watch_module(signs: tuple[Sign, ...], seen: Seen, undo: list[Undo], module: ModuleType) -> None:
    for sign in signs:
        _watch(sign, seen, undo, module)


@safely("watch for a framework")
def _watch(sign: Sign, seen: Seen, undo: list[Undo], module: ModuleType) -> None:
    owner, _, name = sign.name.rpartition(".")
    around = functools.partial(_around, sign, seen)
    if owner:
        kind = getattr(module, owner, None)
        method = vars(kind).get(name) if kind is not None else None
        if isinstance(method, FunctionType):
            if sign.uncompiled:
                compiler.leave_uncompiled(method.__code__)
            undo.append(_wrap(kind, name, method, around))
            return
    else:
        # `fully_shard` is decorated by what keeps a register of functions: what is inside has to stay itself, too.
        function = inspect.unwrap(getattr(module, name, None))  # type: ignore[arg-type]
        if isinstance(function, FunctionType):
            # Else it is only passed on, from where it is defined.
            if function.__globals__ is vars(module):
                undo.append(in_place.instrument(function, around, file=PASSED_OVER))
            return
    log.debug("this release's %s has no %s", sign.module, sign.name)


def _around(sign: Sign, seen: Seen, original: Callable[..., Any]) -> Callable[..., Any]:
    @safely(f"say what {sign.name} tells")
    def tell(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen(sign.tells(Call(args, kwargs)))

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if sign.before:
            tell(args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            leave_no_trace(error)
            raise
        if not sign.before:
            tell(args, kwargs)
        return result

    ours: Any = call
    ours.__code__ = ours.__code__.replace(co_filename=PASSED_OVER.format(__file__))
    return call


def _wrap(kind: Any, name: str, original: FunctionType, around: in_place.Around) -> Undo:
    ours: Any = around(original)
    compiler.see_through(ours, original)
    compiler.leave_uncompiled(ours.__code__)
    setattr(kind, name, ours)

    def give_back() -> None:
        if vars(kind).get(name) is ours:
            setattr(kind, name, original)
        else:
            in_place.stand_aside(ours, original)

    return give_back
