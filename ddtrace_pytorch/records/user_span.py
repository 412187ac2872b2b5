"""A span of the user's, from its beginning to its end. Runs on the user's threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from sys import _getframe
from time import monotonic_ns
from types import CodeType, TracebackType
from typing import Any, Literal, TypeVar
from weakref import ref

from ddtrace_pytorch.border import complain, pass_on
from ddtrace_pytorch.records import here, switch, tags
from ddtrace_pytorch.records.attributes import Plain
from ddtrace_pytorch.records.here import Here, arrive, local, running_loop, task_number
from ddtrace_pytorch.records.recorder import SPAN, Failure, Recorder
from ddtrace_pytorch.records.tags import NONE
from ddtrace_pytorch.spans import MESSAGE_LIMIT, STACK_FRAMES, type_name
from ddtrace_pytorch.training.progress import Step

F = TypeVar("F", bound=Callable[..., Any])

# Deeper ones are nobody's parent: spans that are begun and never ended would keep all that came before them.
DEEPEST = 1_000

# How a loop ends, and a generator that nobody wants any more.
_NO_FAILURES = (StopIteration, StopAsyncIteration, GeneratorExit)

current: ContextVar[Open | None] = ContextVar("ddtrace_pytorch.span", default=None)


class Open:
    """A span that has begun. `took`: how long, in ns, once it is over, and -1 until then; `failed`: by an exception;
    `within`: in the step that it began in; `stray`: it was ended where it wasn't begun, and there it still seems to go
    on.

    `owner`: what was entered, a :class:`Span`, None where that is no matter. A ``with`` whose end a signal's handler
    interrupts is left without one; but it doesn't hold the owner any more, and where nobody does, this is not open."""

    # Set by `begin`, all of them: to call an initialiser would take as long as all the rest.
    __slots__ = (
        "attributes", "chosen", "code", "depth", "failed", "id", "instruction", "name", "owner", "parent", "started",
        "step", "stray", "thread", "took", "within",
    )  # fmt: skip

    attributes: dict[str, Plain]
    chosen: bool | None
    code: CodeType | str
    depth: int
    failed: bool
    id: int
    instruction: int
    name: str
    owner: ref[Span] | None
    parent: Open | None
    started: int
    step: Step
    stray: bool
    thread: Here
    took: int
    within: bool


class Span:
    """What :func:`ddtrace_pytorch.span` gives: a context manager, also for ``async with``, and a decorator.

    One may be entered as often as wanted, also while it is open, and on several threads and in several tasks at once.
    """

    __slots__ = ("__weakref__", "_last", "attributes", "name")

    def __init__(self, name: str, attributes: dict[str, Plain]) -> None:
        self.name = name
        self.attributes = attributes
        self._last: Open | None = None

    def __enter__(self) -> Span:
        recorder = switch.recorder
        if recorder is not None:
            try:
                frame = _getframe(1)
                self._last = begin(recorder, self, frame.f_code, frame.f_lasti, ref(self))
            except RecursionError:
                pass  # the next call of the user's will say so
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        try:
            opened = current.get()
            if opened is None or opened is not self._last:
                opened = self._entered(opened)
            if opened is not None:
                if opened is self._last:
                    self._last = None
                end(opened, error)
        except RecursionError:
            pass  # an error of the user's is on its way, or comes with the next call
        return False

    async def __aenter__(self) -> Span:
        recorder = switch.recorder
        if recorder is not None:
            frame = _getframe(1)
            self._last = begin(recorder, self, frame.f_code, frame.f_lasti, ref(self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        return self.__exit__(kind, error, trace)

    def __reduce__(self) -> tuple[type[Span], tuple[str, dict[str, Plain]]]:
        """A copy has the name and the attributes, and has not been entered."""
        return Span, (self.name, self.attributes)

    def __call__(self, function: F) -> F:
        """Have `function` (or coroutine, generator or asynchronous generator function) run in a span of its own."""
        from ddtrace_pytorch.records.decorating import decorated

        return decorated(self, function)

    def _entered(self, innermost: Open | None) -> Open | None:
        """The entry that ends here, where it isn't plainly the innermost span: others in it were never ended, others
        entered this one too, or it was begun in another context."""
        me, opened = ref(self), innermost
        while opened is not None and (opened.owner is not me or opened.took >= 0):
            opened = opened.parent
        return self._last if opened is None else opened


def begin(
    recorder: Recorder, span: Span, code: CodeType | str, instruction: int, owner: ref[Span] | None = None
) -> Open | None:
    """A span like `span` begins here; None if it isn't recorded."""
    opened = None
    try:
        try:
            thread = local.here
        except AttributeError:
            thread = arrive()
        if thread.deaf:
            return None
        if not recorder.attended:
            recorder.attend()  # first, for what that takes is not the user's
        outer = current.get()
        if outer is not None or thread.foreign:
            outer = surrounding(outer, thread)
        step = recorder.progress.step
        opened = Open()
        opened.owner = owner
        opened.name = span.name
        opened.attributes = span.attributes
        opened.chosen = None if step.number is not None else recorder.chooses(span.name)
        opened.id = next(recorder.ids)
        opened.parent = outer
        opened.step = step
        opened.thread = thread
        opened.code = code
        opened.instruction = instruction
        # In case a signal comes in the midst of this: its handler's spans are in this one already.
        opened.started = 0
        opened.took = -1
        opened.failed = opened.stray = False
        opened.within = True
        opened.depth = depth = 0 if outer is None else outer.depth + 1
        if depth < DEEPEST:
            current.set(opened)
            thread.innermost = opened
        opened.started = monotonic_ns()
        return opened
    except BaseException as error:
        if opened is not None and current.get() is opened:
            leave(opened)
        complain("begin a span", error)
        return None


def end(opened: Open, error: BaseException | None, failed: Failure | None = None) -> None:
    """It ends here, with `error` if there is one on its way, or with what is known of one: that it `failed`."""
    try:
        now = monotonic_ns()
        if opened.took >= 0:
            return
        thread = opened.thread
        # As `leave` does it, which would take a call.
        if current.get() is opened is thread.innermost:
            current.set(opened.parent)
            thread.innermost = opened.parent
        else:
            leave(opened)
        opened.took = now - opened.started
        recorder = switch.recorder
        if recorder is None:
            return
        if error is not None:
            failed = failure(error)
        opened.failed = failed is not None
        step = opened.step
        now_in = recorder.progress.step
        opened.within = within = now_in is step or _follows(step, now_in)
        recorder.add(
            (
                SPAN,
                next(recorder.numbers),
                now,
                opened.name,
                opened.attributes,
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
    except BaseException as broken:
        try:
            leave(opened)
            complain("record a span", broken)
        except RecursionError:
            pass  # what the user's code raised, for that very reason perhaps, is on its way


def leave(opened: Open) -> None:
    """What follows here is not in it any more."""
    # Not by a token: it may have been begun in another context.
    inner = current.get()
    if inner is opened or _is_around(opened, inner):
        current.set(opened.parent)
    else:
        opened.stray = True
    thread = opened.thread
    if thread.innermost is opened:
        thread.innermost = opened.parent


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
        pass_on(broken)
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


def surrounding(outer: Open | None, thread: Here) -> Open | None:
    """The span that `thread`, this one, is in, where `outer` is the last one begun here. Autograd's threads are in that
    of the thread they work for."""
    if outer is not None:
        outer = _not_lost(outer)
    if outer is None and thread.foreign and here.main is not None:
        outer = _not_lost(here.main.innermost)
        return outer if outer is not None and outer.took < 0 else None
    return outer


def _not_lost(opened: Open | None) -> Open | None:
    """`opened`, or the nearest one around it that still goes on, or ended in good order."""
    while opened is not None and (
        opened.stray or (opened.took < 0 and opened.owner is not None and opened.owner() is None)
    ):
        opened = opened.parent
    return opened
