"""Functions that run in a span: ordinary ones, coroutines and generators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from sys import _getframe
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar, cast

from ddtrace_pytorch.border import leave_no_trace
from ddtrace_pytorch.compiler import leave_uncompiled, see_through
from ddtrace_pytorch.records import switch
from ddtrace_pytorch.records.attributes import given
from ddtrace_pytorch.records.user_span import Open, Span, begin, current, end, leave

F = TypeVar("F", bound=Callable[..., Any])


def decorated(span: Span, function: F) -> F:
    """`function`, each call of which is in a span like `span`.

    Raises:
        TypeError: `function` can't be called.
    """
    if not callable(function):
        raise TypeError(f"span() decorates a callable, not {given(function)}")
    make: Callable[[Span, Any], Any] = _ordinary
    for is_kind, maker in _KINDS:
        if is_kind(function) or is_kind(_method(function)):
            make = maker
    ours = make(span, function)
    # Called from what is compiled, only `function` is there; compiled itself, it is `function` that is compiled.
    see_through(ours, function)
    for code in (ours.__code__, *_OURS):
        leave_uncompiled(code)
    return cast("F", ours)


def _ordinary(span: Span, function: Callable[..., Any]) -> Any:
    where = _where(function)

    @functools.wraps(function)
    def spanned(*args: Any, **kwargs: Any) -> Any:
        recorder = switch.recorder
        if recorder is None or switch.compiling():
            return function(*args, **kwargs)
        opened = _begin(span, where)
        try:
            result = function(*args, **kwargs)
            if opened is not None:
                end(opened, None)
            return result
        except BaseException as error:
            leave_no_trace(error)
            if opened is not None:
                end(opened, error)
            raise
        finally:
            if opened is not None and opened.took < 0:
                leave(opened)

    return spanned


def _coroutine(span: Span, function: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    where = _where(function)

    @functools.wraps(function)
    async def spanned(*args: Any, **kwargs: Any) -> Any:
        opened = _begin(span, where)
        try:
            result = await function(*args, **kwargs)
            if opened is not None:
                end(opened, None)
            return result
        except BaseException as error:
            leave_no_trace(error)
            if opened is not None:
                end(opened, error)
            raise
        finally:
            if opened is not None and opened.took < 0:
                leave(opened)

    return spanned


def _generator(span: Span, function: Callable[..., Generator[Any, Any, Any]]) -> Any:
    where = _where(function)

    @functools.wraps(function)
    def spanned(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        opened = _begin(span, where)
        try:
            inside = _Inside(opened)
            generator = function(*args, **kwargs)
            resume: Callable[..., Any] = generator.send
            given: tuple[Any, ...] = (None,)
            while True:
                outside = inside.enter()
                try:
                    value = resume(*given)
                except StopIteration as stop:
                    result = stop.value
                    break
                finally:
                    inside.leave(outside)
                try:
                    resume, given = generator.send, ((yield value),)
                except BaseException as error:
                    resume, given = generator.throw, (error,)
            if opened is not None:
                end(opened, None)
            return result
        except BaseException as error:
            leave_no_trace(error)
            if opened is not None:
                end(opened, error)
            raise
        finally:
            if opened is not None and opened.took < 0:
                leave(opened)

    return spanned


def _asynchronous_generator(span: Span, function: Callable[..., AsyncGenerator[Any, Any]]) -> Any:
    where = _where(function)

    @functools.wraps(function)
    async def spanned(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        opened = _begin(span, where)
        try:
            inside = _Inside(opened)
            generator = function(*args, **kwargs)
            resume: Callable[..., Any] = generator.asend
            given: tuple[Any, ...] = (None,)
            while True:
                outside = inside.enter()
                try:
                    value = await resume(*given)
                except StopAsyncIteration:
                    break
                finally:
                    inside.leave(outside)
                try:
                    resume, given = generator.asend, ((yield value),)
                except BaseException as error:
                    resume, given = generator.athrow, (error,)
            if opened is not None:
                end(opened, None)
        except BaseException as error:
            leave_no_trace(error)
            if opened is not None:
                end(opened, error)
            raise
        finally:
            if opened is not None and opened.took < 0:
                leave(opened)

    return spanned


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Span, Any], Any]], ...] = (
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isgeneratorfunction, _generator),
    (inspect.isasyncgenfunction, _asynchronous_generator),
)


class _Inside:
    """The innermost span in a generator, while it runs: whoever iterates over it is not in its spans meanwhile."""

    def __init__(self, opened: Open | None) -> None:
        self._opened = opened
        self._innermost = current.get()
        if opened is not None:
            current.set(opened.parent)

    def enter(self) -> Open | None:
        outside = current.get()
        if self._opened is not None:
            current.set(self._innermost)
        return outside

    def leave(self, outside: Open | None) -> None:
        if self._opened is not None:
            self._innermost = current.get()
            current.set(outside)


def _begin(span: Span, where: CodeType) -> Open | None:
    """A span that begins where our caller was called from, or, if that is a loop's machinery, in `where`."""
    recorder = switch.recorder
    if recorder is None or switch.compiling():
        return None
    # There is none where C calls: at the interpreter's exit, as a thread's function, in autograd's hooks.
    frame: FrameType | None = _getframe(1).f_back
    if frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] in _MACHINERY:
        return begin(recorder, span, where, -1)
    return begin(recorder, span, frame.f_code, frame.f_lasti)


def _where(function: Callable[..., Any]) -> CodeType:
    """The code of `function`; of something else that can be called, of its class' method."""
    inner: Any = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    found = getattr(inner, "__code__", None) or getattr(_method(inner), "__code__", None)
    return found if isinstance(found, CodeType) else _where.__code__


def _method(function: Any) -> Any:
    """What calling `function` calls, where its class says."""
    for kind in type(function).__mro__:
        if "__call__" in vars(kind):
            return vars(kind)["__call__"]
    return None


# Packages that run what others wrote: `ddtrace` has a frame of its own between asyncio and a task.
_MACHINERY = ("asyncio", "concurrent", "ddtrace")

# What decorated functions call of this module.
_OURS = (_begin.__code__, *(value.__code__ for value in vars(_Inside).values() if isinstance(value, FunctionType)))
