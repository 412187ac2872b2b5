"""Your own records: what your code does and what it measures, beside what is recorded by itself.

    import ddtrace_pytorch

    with ddtrace_pytorch.span("rollout", prompts=64):
        ...
    ddtrace_pytorch.scalar({"loss": loss})
    ddtrace_pytorch.event("new best")

There is nothing to set up. Where tracing is not switched on, and in what ``torch.compile`` compiles, none of these does
anything. See ``docs/records.md``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from sys import _getframe
from typing import cast

from ddtrace_pytorch.border import complain, safely
from ddtrace_pytorch.kernels.by_hand import ByHand
from ddtrace_pytorch.records import switch
from ddtrace_pytorch.records.attributes import NAME_LIMIT, NOTHING, plain, short_name, text, whole
from ddtrace_pytorch.records.notes import row
from ddtrace_pytorch.records.recorder import EVENT, SCALAR
from ddtrace_pytorch.records.scalars import mapped, split
from ddtrace_pytorch.records.tags import tag
from ddtrace_pytorch.records.user_span import Span

__all__ = ["Span", "event", "profile_window", "scalar", "set_step", "span", "step_tag"]

# Where the user's code is as deep as it may go, a RecursionError passes in silence: there is no room to say anything,
# and the next call of the user's raises its own.

# Dynamo knows this one, also around a break of the graph.
_NO_SPAN = cast("Span", contextlib.nullcontext())


def span(name: str, /, **attributes: object) -> Span:
    """A stretch of your program, as a context manager or as a decorator.

        with span("rollout", prompts=64):
            ...

        @span("evaluate")
        def evaluate(model): ...

    Spans lie in each other as the code does, in each thread and asyncio task by itself. ``async with`` is the same as
    ``with``. Decorated functions may be coroutines, which are awaited in the span, and generators, which the span lasts
    as long as. An exception that comes out of it is recorded, and passes on unchanged.

    Of `attributes`, text, numbers, truth values and None are kept, and of everything else the type and shape.

    Raises:
        TypeError: `name` is no text.

    .. versionadded:: 0.2
    """
    if type(name) is not str:
        name = text(name, "span", "its name")
    if switch.compiling():
        return _NO_SPAN
    try:
        if len(name) > NAME_LIMIT:
            name = short_name(name)
        return Span(name, plain(attributes) if attributes else NOTHING)
    except RecursionError:
        return _NO_SPAN
    except Exception as error:
        complain("keep a span's attributes", error)
        return Span(name, NOTHING)


def event(name: str, /, **attributes: object) -> None:
    """Something that happened just now. `attributes` are as those of :func:`span`.

    Raises:
        TypeError: `name` is no text.

    .. versionadded:: 0.2
    """
    if type(name) is not str:
        name = text(name, "event", "its name")
    if switch.compiling():
        return
    recorder = switch.recorder
    if recorder is None:
        return
    try:
        if len(name) > NAME_LIMIT:
            name = short_name(name)
        values = plain(attributes) if attributes else NOTHING
        frame = _getframe(1)
        found = row(recorder, EVENT, name, values, frame.f_code, frame.f_lasti)
        if found is not None:
            recorder.add(found)
    except RecursionError:
        pass
    except Exception as error:
        complain("record an event", error)


def scalar(values: Mapping[str, object], /, *, step: int | None = None) -> None:
    """Numbers of the step under way, or of another `step`, by their names: ``scalar({"loss": loss})``.

    They may be Python's, NumPy's, or in tensors of one element. One on a GPU is read without waiting for it: what it is
    now is recorded when it has arrived, so it may be changed at once. Nothing of the tensor is held on to.

    Raises:
        TypeError: `values` is no mapping, one of its names no text, or `step` no whole number.

    .. versionadded:: 0.2
    """
    if switch.compiling():
        return
    if type(values) is not dict:
        values = mapped(values)
    of_step = None if step is None else (whole(step, "scalar", "step"), None)
    recorder = switch.recorder
    if recorder is None:
        _check_names(values)
        return
    try:
        parts = split(values)
        if parts is not None:
            numbers, on_gpu, others = parts
            frame = _getframe(1)
            found = row(recorder, SCALAR, "", numbers, frame.f_code, frame.f_lasti, others, of_step)
            if found is None:
                return
            if on_gpu:
                recorder.on_gpu.put(recorder, found, numbers, on_gpu)
            else:
                recorder.add(found)
            return
    except RecursionError:
        return
    except Exception as error:
        complain("record a scalar", error)
        return
    _check_names(values)


def _check_names(values: Mapping[str, object]) -> None:
    for name in values:
        if type(name) is not str:
            text(name, "scalar", "names of numbers")


def set_step(number: int, /, *, relative_step: int | None = None) -> None:
    """The step with that `number` begins here: for loops whose steps aren't those of an optimizer.

    `relative_step` counts them from 1 since the training was begun or resumed.

    Raises:
        TypeError: one of them is no whole number.

    .. versionadded:: 0.2
    """
    if switch.compiling():
        return
    number = whole(number, "set_step", "the step's number")
    if relative_step is not None:
        relative_step = whole(relative_step, "set_step", "relative_step")
    recorder = switch.recorder
    if recorder is None:
        return
    try:
        recorder.set_step(number, relative_step)
    except RecursionError:
        pass
    except Exception as error:
        complain("begin a step", error)


def step_tag(word: str, /) -> None:
    """Put a word on the step under way, such as ``"eval"``: all that is recorded from now until the next step has it.

    In an asyncio task it is on what that task, and those it starts, record; elsewhere on what all of the process does.

    Raises:
        TypeError: `word` is no text.

    .. versionadded:: 0.2
    """
    if type(word) is not str:
        word = text(word, "step_tag", "a word")
    if switch.compiling():
        return
    recorder = switch.recorder
    if recorder is None:
        return
    try:
        tag(recorder.progress, word)
    except RecursionError:
        pass
    except Exception as error:
        complain("tag a step", error)


def profile_window() -> contextlib.AbstractContextManager[None]:
    """A window of torch's profiler over what is done in it, by this thread and on the GPU: for schedules of your own.

        with profile_window():
            for batch in three_batches: ...

    There is a trace, a span and a record of it, as of windows on a schedule (``docs/kernels.md``). Where tracing is
    off, or a profiler is on already, nothing is recorded.

    .. versionadded:: 0.2
    """
    return contextlib.nullcontext() if switch.compiling() else ByHand()


safely("take what is recorded")(switch.wake)()
