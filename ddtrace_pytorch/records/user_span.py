"""A span of the user's, from its beginning to its end. Runs on the user's threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from sys import _getframe
from time import monotonic_ns
from types import CodeType, TracebackType
from typing import Any, Literal, TypeVar

from ddtrace_pytorch.border import complain
from ddtrace_pytorch.records import here, switch, tags
from ddtrace_pytorch.records.attributes import Plain
from ddtrace_pytorch.records.here import Here, arrive, local, running_loop, task_number
from ddtrace_pytorch.records.recorder import SPAN, Failure, Recorder
from ddtrace_pytorch.records.tags import NONE
from ddtrace_pytorch.spans import MESSAGE_LIMIT, STACK_FRAMES, type_name
from ddtrace_pytorch.training.progress import Step

F = TypeVar("F", bound=Callable[..., Any])

# Deeper ones are nobody's parent: spans that are begun and never ended would keep all that came before them.
DEEPEST = 100

# How a loop ends, and a generator that nobody wants any more.
_NO_FAILURES = (StopIteration, StopAsyncIteration, GeneratorExit)

current: ContextVar[Open | None] = ContextVar("ddtrace_pytorch.span", default=None)


class Open:
    """A span that has begun. `took`: how long, in ns, once it is over, and -1 until then; `failed`: by an exception;
    `within`: in the step that it began in."""

    __slots__ = (
        "chosen", "code", "depth", "failed", "id", "instruction", "parent", "span", "started", "step", "thread", "took",
        "within",
    )  # fmt: skip

    def __init__(
        self,
        span: Span,
        id: int,
        parent: Open | None,
        step: Step,
        thread: Here,
        chosen: bool | None,
        code: CodeType | str,
        instruction: int,
    ) -> None:
        self.span = span
        self.id = id
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.step = step
        self.thread = thread
        self.chosen = chosen
        self.code = code
        self.instruction = instruction
        self.took = -1
        self.failed = False
        self.within = True
        self.started = monotonic_ns()


class Span:
    """What :func:`ddtrace_pytorch.span` gives: a context manager, also for ``async with``, and a decorator.

    One may be entered as often as wanted, also while it is open, and on several threads and in several tasks at once.
    """

    __slots__ = ("_open", "attributes", "name")

    def __init__(self, name: str, attributes: dict[str, Plain]) -> None:
        self.name = name
        self.attributes = attributes
        self._open: Open | None = None

    def __enter__(self) -> Span:
        recorder = switch.recorder
        if recorder is not None:
            frame = _getframe(1)
            self._open = begin(recorder, self, frame.f_code, frame.f_lasti)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        opened = current.get()
        if opened is None or opened.span is not self:
            opened = self._opened(opened)
        if opened is not None:
            if opened is self._open:
                self._open = None
            end(opened, error)
        return False

    async def __aenter__(self) -> Span:
        recorder = switch.recorder
        if recorder is not None:
            frame = _getframe(1)
            self._open = begin(recorder, self, frame.f_code, frame.f_lasti)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        return self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Have `function` (or coroutine, generator or asynchronous generator function) run in a span of its own."""
        from ddtrace_pytorch.records.decorating import decorated

        return decorated(self, function)

    def _opened(self, opened: Open | None) -> Open | None:
        """The one that ends here, where it isn't the innermost: others in it were never ended, or it was begun in
        another context."""
        while opened is not None and opened.span is not self:
            opened = opened.parent
        return opened or self._open


def begin(recorder: Recorder, span: Span, code: CodeType | str, instruction: int) -> Open | None:
    """A span begins here; None if it isn't recorded."""
    try:
        try:
            thread = local.here
        except AttributeError:
            thread = arrive()
        if thread.deaf:
            return None
        if not recorder.attended:
            recorder.attend()  # first, for what that takes is not the user's
        outer = surrounding(thread)
        step = recorder.progress.step
        chosen = None if step.number is not None else recorder.chooses(span.name)
        opened = Open(span, recorder.random.getrandbits(63) | 1, outer, step, thread, chosen, code, instruction)
        if opened.depth < DEEPEST:
            current.set(opened)
            thread.innermost = opened
        return opened
    except Exception as error:
        complain("begin a span", error)
        return None


def end(opened: Open, error: BaseException | None, failed: Failure | None = None) -> None:
    """It ends here, with `error` if there is one on its way, or with what is known of one: that it `failed`."""
    now = monotonic_ns()
    try:
        if opened.took >= 0:
            return
        opened.took = now - opened.started
        # Not by a token: it may have been begun in another context.
        if current.get() is opened or _is_around(opened, current.get()):
            current.set(opened.parent)
        thread = opened.thread
        if thread.innermost is opened:
            thread.innermost = opened.parent
        recorder = switch.recorder
        if recorder is None:
            return
        if error is not None:
            failed = failure(error)
        opened.failed = failed is not None
        step = opened.step
        now_in = recorder.progress.step
        opened.within = within = now_in is step or _follows(step, now_in)
        span = opened.span
        recorder.add(
            (
                SPAN,
                next(recorder.numbers),
                now,
                span.name,
                span.attributes,
                step,
                tags.tags_of(step) if step.tags or tags.in_tasks else NONE,
                opened.code,
                opened.instruction,
                thread.name,
                task_number() if running_loop() is not None else None,
                opened.parent,
                None,
                None,
                opened.started,
                opened.id,
                opened.chosen,
                within,
                failed,
            )
        )
    except Exception as broken:
        complain("record a span", broken)


def leave_all() -> None:
    """In a forked child: the spans that the parent is in are not ended here."""
    opened = current.get()
    while opened is not None:
        opened.took = 0
        opened = opened.parent
    current.set(None)


def failure(error: BaseException) -> Failure | None:
    """What is kept of `error`, which itself would keep all that its frames hold; None if it is no failure."""
    if isinstance(error, _NO_FAILURES) or (isinstance(error, SystemExit) and not error.code):
        return None
    try:
        message = str(error)[:MESSAGE_LIMIT]
    except Exception as broken:
        message = f"(its text raised {type(broken).__name__})"
    stack: deque[tuple[str, int, str]] = deque(maxlen=STACK_FRAMES)
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        stack.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return Failure(type_name(error), message, tuple(stack))


def _follows(step: Step, later: Step) -> bool:
    """Whether `later` is the step after `step`, at most. A span around an optimizer's step often ends there, because
    that is where the step does."""
    if step.relative is not None and later.relative is not None:
        return later.relative - step.relative <= 1
    return False


def _is_around(outer: Open, inner: Open | None) -> bool:
    while inner is not None and inner is not outer:
        inner = inner.parent
    return inner is not None


def surrounding(thread: Here) -> Open | None:
    """The span that `thread`, this one, is in. Autograd's threads are in that of the thread they work for."""
    outer = current.get()
    if outer is None and thread.foreign and here.main is not None:
        outer = here.main.innermost
        return outer if outer is not None and outer.took < 0 else None
    return outer
