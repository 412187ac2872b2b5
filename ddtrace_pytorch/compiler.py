"""Keeps out of torch.compile's sight: it is to find torch's own functions, and to compile nothing of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any


def see_through(ours: Any, original: Any) -> None:
    """Have Dynamo trace `original` where it meets `ours`: it breaks the graph where it always did, or doesn't.

    The mark is torch's own, of the functions that `torch.compile` and `torch.compiler.disable` give back.
    """
    ours._torchdynamo_inline = getattr(original, "_torchdynamo_inline", original)


def compiling() -> Callable[[], bool]:
    """What tells a function whether it is Dynamo that reads it."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return getattr(compiler, "is_dynamo_compiling", None) or (lambda: False)


def leave_uncompiled(code: CodeType, to_the_end: bool = False) -> None:
    """Have `code`, and the functions defined in it, run as they are where a compiled function comes to them.

    Else Dynamo would compile each after a graph break, and again whenever a count that it reads has changed. What they
    call is compiled as ever, or, `to_the_end`, not either.
    """
    mark = _mark(to_the_end)
    if mark is not None:
        _each(code, mark)


_PACKAGE = __name__.partition(".")[0]

# These call nothing of the user's, nor functions that are compiled when we are not there.
_TO_THE_END = (
    "ddtrace_pytorch.border",
    "ddtrace_pytorch.collectives.groups",
    "ddtrace_pytorch.collectives.sizes",
    "ddtrace_pytorch.collectives.work",
    "ddtrace_pytorch.identity.mesh",
    "ddtrace_pytorch.ledger",
    "ddtrace_pytorch.records.attributes",
    "ddtrace_pytorch.records.here",
    "ddtrace_pytorch.records.notes",
    "ddtrace_pytorch.records.on_gpu",
    "ddtrace_pytorch.records.recorder",
    "ddtrace_pytorch.records.scalars",
    "ddtrace_pytorch.records.tags",
    "ddtrace_pytorch.records.user_span",
    "ddtrace_pytorch.sampling",
    "ddtrace_pytorch.stack",
    "ddtrace_pytorch.weakly",
)


def leave_package_uncompiled() -> None:
    """The same for all of this package that is loaded, and for what the ledger and its like call."""
    mark, to_the_end = _mark(), _mark(to_the_end=True)
    if mark is not None and to_the_end is not None:
        for name, module in sys.modules.copy().items():  # a snapshot in one step: other threads import
            if name.partition(".")[0] == _PACKAGE:
                for function in _functions(module, name):
                    # What `safely` guards has the code of the guard.
                    whose = function.__globals__.get("__name__")
                    _each(function.__code__, to_the_end if whose in _TO_THE_END else mark)


def _each(code: CodeType, mark: Callable[[CodeType], object]) -> None:
    mark(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _each(inner, mark)


def _functions(scope: Any, module: str) -> Iterator[FunctionType]:
    for value in tuple(vars(scope).values()):
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if getattr(function, "__module__", None) != module:
            continue
        if isinstance(function, FunctionType):
            # Not a decorator's of the standard library: all context managers share one code.
            if str(function.__globals__.get("__name__")).startswith(_PACKAGE):
                yield function
            if "__wrapped__" in vars(function):
                yield vars(function)["__wrapped__"]
        elif isinstance(function, type):
            yield from _functions(function, module)


def _mark(to_the_end: bool = False) -> Callable[[CodeType], object] | None:
    dynamo = getattr(getattr(sys.modules.get("torch"), "_C", None), "_dynamo", None)
    frames: Any = getattr(dynamo, "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if to_the_end else action.DEFAULT)
        return lambda code: frames.set_code_exec_strategy(code, strategy)
    return getattr(frames, "skip_code", None)
