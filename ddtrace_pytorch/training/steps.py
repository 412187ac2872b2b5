"""Optimizer steps, through torch's own global hooks: no optimizer is wrapped, and every class of them is seen.

What is here runs on the thread that trains. It says which step is under way, and hands over each that has ended with
two readings of the time, and of what it was spent on; all else happens on the Pulse.

A step is known to be over only when the next one's optimizer is about to step (:mod:`.step_rule`). It ended, then, when
the next batch was asked for (:mod:`.feeding`); or, where nobody asked for one, with its last optimizer. Until that is
known, what happens counts as part of it, unless the step before ended like that.

The first one of a session begins where the user says so or its batch is asked for, else with the session.
"""

from __future__ import annotations

import sys
import threading
import time
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.compiler import leave_uncompiled
from ddtrace_pytorch.stack import calls_of
from ddtrace_pytorch.training.feeding import Feeding
from ddtrace_pytorch.training.progress import Progress, Step
from ddtrace_pytorch.training.step_rule import StepRule

Undo = Callable[[], None]


# A moment on the monotonic clock, and how long until then, in all, the training thread had waited for data, been in
# collectives, been in optimizers (less the collectives there) and collected garbage; in ns. A plain tuple: to make one
# with names takes as long as all the rest.
Reading = tuple[int, int, int, int, int]


class Listener(Protocol):
    """A session, as far as steps are concerned; called on the thread that trains."""

    def ended(self, step: Step, start: Reading, end: Reading) -> None:
        """A step is over."""

    def turned(self) -> None:
        """One step ends here and the next begins, as far as can be told by now: once for each, at its end or later."""


class Nobody:
    """Listens where there is no session."""

    def ended(self, step: Step, start: Reading, end: Reading) -> None: ...

    def turned(self) -> None: ...


class Garbage(Protocol):
    """How many `ns` the collections that matter have taken."""

    @property
    def ns(self) -> int: ...


class NoGarbage:
    """Where collections are not watched."""

    ns = 0


class Steps:
    """The steps of this process, whatever sessions there are.

    `first` is called before the first optimizer step of a session, `every` after each. `collectives` gives the ns that
    were spent in collectives; a session sets it, and the `listener`. `garbage` tells of collections. `known`: it is no
    guess any more that the step under way is one, and which.
    """

    def __init__(self, progress: Progress, first: Callable[[], object], every: Callable[[], object]) -> None:
        self.listener: Listener = Nobody()
        self.collectives: Callable[[], int] = lambda: 0
        self.garbage: Garbage = NoGarbage()
        self.progress = progress
        self._first = first
        self._every = every
        self._optimizer = 0
        self._bell = _Bell()
        self._engine: Any = None
        self._by_hand = False
        self._open = progress.step
        self.begin_anew()

    def begin_anew(self, number: int | None = None) -> None:
        """A session begins: the next optimizer step is a first one again, and the step under way has that number, if
        the user didn't give it another."""
        relative = None if number is None else 1
        if self._by_hand:
            number, relative = self._open.number, self._open.relative
        self._rule = StepRule()
        self._feeding: Feeding[Reading] = Feeding()
        self._fresh = True
        self.known = self._by_hand
        self._inside: list[int] = []
        self._in_engine = 0
        self._engine_stepped = False
        self.data_ns = 0
        # By their numbers: the main thread and those that step, for some frameworks train on another one.
        self.trains_on = {threading.main_thread().ident}
        self._entered = self._collectives_then = 0
        self._always_by_hand = self._turned = False
        self._asked_for_batches = self._asks_for_batches = False
        self._open.sampled = False
        self._open = Step(number, relative)
        self.progress.begin(self._open)
        self._next: Step | None = None
        self._started = self._reading(time.monotonic_ns())
        self._end: Reading | None = None

    def watch(self) -> Undo:
        """Register with torch; gives what undoes it."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        # 2.0 and 2.1 lack the function; a compiled step breaks its graph at our hooks there.
        is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
        before = safely("follow an optimizer step")(self._before)
        after = safely("follow an optimizer step")(self._after)
        bell = self._bell
        leave_uncompiled(_Ring.__set__.__code__)

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                before(optimizer, sys._getframe(1))

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_compiling():
                # Dynamo reads this instead of running it. Of what it reads an assignment alone is done whenever the
                # compiled code has run, without being a node of the graph or a break in it.
                bell.rung_by = optimizer
            else:
                after(optimizer)

        undo_before: Undo = register_optimizer_step_pre_hook(before_step).remove
        undo_after: Undo = register_optimizer_step_post_hook(after_step).remove

        def undo() -> None:
            undo_before()
            undo_after()
            bell.call = _nobody

        bell.call = self._compiled_stepped
        return undo

    def set(self, number: int, relative: int | None = None) -> None:
        """The user says which step begins here."""
        was_by_hand, ended = self._by_hand, False
        if self.progress.step is not self._open and self._end is not None:
            self._finish(self._end)
            ended = True
        if not self._begun_with_a_batch():
            self._begin_here(number)
        elif number != self._open.number:
            if self._rule.begun or self._by_hand:
                after = (self._open.relative or 0) + 1
                self._finish(self._reading(time.monotonic_ns()), Step(number, after if relative is None else relative))
                ended = True
            else:
                # Nothing has happened in the step under way: it only had another number.
                self._open.number = number
                self._open.relative = self._open.relative or 1
                self.progress.begin(self._open)
        if relative is not None:
            self._open.relative = relative
        # Who begins one step after the other by hand begins all of them, however many optimizers step in each.
        self._always_by_hand = self._always_by_hand or (ended and was_by_hand)
        self._by_hand = self.known = True

    def fetched(self, started: int, ended: int, data: object = None, exhausted: bool = False) -> None:
        """The thread that trains waited between two moments of the monotonic clock, in ns, for a batch of `data`;
        `exhausted`: there was none any more."""
        # As good as `id`, which raises an audit event: below compiled code Dynamo compiles the hooks for these.
        source = object.__hash__(data)
        if self._end is None:
            if self.known:
                self._feeding.feeds(source)
            elif exhausted:
                self._feeding.over(source)
            else:
                self._feeding.asked(source, self._reading(started))
        elif not self._always_by_hand:
            self._asks_for_batches = True
            if self.progress.step is not self._open:
                self._feeding.feeds_next(source)
            elif exhausted:
                self._feeding.over(source)
            else:
                # Asking for a batch begins the next step, unless another optimizer still steps in this one.
                begins = self._feeding.asked(source, self._reading(started))
                if begins is not None:
                    self._end = begins
                    self._look_ahead()
        self.data_ns += ended - started

    @property
    def next_number(self) -> int | None:
        """While a listener is told of a turn: the number of the step that begins with it."""
        number = self._open.number
        return number + 1 if self._turned and number is not None else number

    def leave(self, over: bool = False, interrupted: bool = False) -> tuple[Step, Reading, Reading]:
        """The session ends: a step that had ended, as far as one can tell now, is told of. One that the user began
        ends with nothing but the next: now where all is `over`, and not at all where it is `interrupted`. Gives what is
        left: the step under way, its start, and now."""
        if self._by_hand and self.progress.step is self._open and (over or interrupted):
            if not interrupted:
                self._finish(self._reading(time.monotonic_ns()))
        elif self._end is not None:
            self._finish(self._end)
        return self._open, self._started, self._reading(time.monotonic_ns())

    def engine_entered(self, engine: Any, depth: int = 1) -> None:
        """An engine begins what is one step, however often optimizers step in it, if any does; `depth`: of how many
        engines it is the innermost."""
        self._in_engine = depth
        self._engine = engine

    def engine_left(self, well: bool) -> None:
        """It came back, or raised."""
        self._in_engine = max(self._in_engine - 1, 0)
        if self._in_engine:
            return
        engine, self._engine = self._engine, None
        stepped, self._engine_stepped = self._engine_stepped, False
        if stepped and well:
            self._leave(engine)

    def _before(self, optimizer: Any, caller: FrameType) -> None:
        if self._in_engine:
            if not self._engine_stepped:
                self._engine_stepped = True
                self._enter(self._engine)
            return
        if self._inside:
            # An optimizer may step in another's step, or in its own (`super().step()`). Of one that raised torch tells
            # nobody: what isn't on the stack any more is over.
            del self._inside[calls_of(caller.f_code, caller) - 1 :]
        if not self._inside:
            self._enter(optimizer)
        self._inside.append(id(optimizer))

    def _after(self, optimizer: Any) -> None:
        if self._in_engine:
            return
        if not self._inside:
            # A compiled step may break its graph in the middle: what was compiled of it told nobody.
            self._enter(optimizer)
        else:
            self._inside.pop()
        if not self._inside:
            self._leave(optimizer)

    def _compiled_stepped(self, optimizer: Any) -> None:
        """The end of an optimizer's step was part of compiled code, which has run."""
        if not self._inside or self._inside[-1] == id(optimizer):
            self._after(optimizer)

    def _enter(self, optimizer: Any) -> None:
        if self._fresh:
            self._first()
            self._fresh = False
            self._begun_with_a_batch()
            self.known = True
        self.trains_on.add(get_ident())
        if self._open.number is None:
            self._open.number = self._open.relative = 1
            self.progress.begin(self._open)
        if not self._always_by_hand and self._end is not None and self._rule.ends_before(optimizer):
            self._finish(self._end if self.progress.step is not self._open else self._feeding.fed_by() or self._end)
        else:
            self._feeding.stepped()
        if self.progress.step is not self._open:
            self.progress.begin(self._open)
        self._collectives_then = self.collectives()
        self._entered = time.monotonic_ns()

    def _leave(self, optimizer: Any) -> None:
        now, collectives = time.monotonic_ns(), self.collectives()
        without = now - self._entered - (collectives - self._collectives_then)
        if without > 0:
            self._optimizer += without
        looks_whole = self._rule.stepped(optimizer)
        self._end = now, self.data_ns, collectives, self._optimizer, self.garbage.ns
        if not self._always_by_hand and not self._turned and looks_whole:
            self._turned = True
            if not self._asked_for_batches:
                self._look_ahead()
            self.listener.turned()
        self._every()

    def _finish(self, end: Reading, successor: Step | None = None) -> None:
        step, start = self._open, self._started
        self._open = successor or self._next or self._successor()
        if self.progress.step is not self._open:
            self.progress.begin(self._open)
        if self._next is not None and self._next is not self._open:
            self._next.sampled = False
        self._next = self._end = None
        self._started = end
        self._by_hand = False
        self._rule.ended()
        self._feeding.ended()
        self._asked_for_batches, self._asks_for_batches = self._asks_for_batches, False
        turned, self._turned = self._turned, False
        if not turned:
            self.listener.turned()
        self.listener.ended(step, start, end)

    def _begun_with_a_batch(self) -> bool:
        """Whether anything is known of the step under way; where it is the first, a batch for it was asked for."""
        began = None if self.known else self._feeding.fed_by()
        if began is not None:
            self._started = began
            self._feeding.ended()
        return self.known or began is not None

    def _begin_here(self, number: int) -> None:
        """So far it was the start-up."""
        self._open.number = self._open.relative = None
        self._open.sampled = False
        self._open = Step(number, 1)
        self.progress.begin(self._open)
        self._started = self._reading(time.monotonic_ns())

    def _look_ahead(self) -> None:
        """What happens from here on belongs to the next step."""
        self._next = self._next or self._successor()
        self.progress.begin(self._next)

    def _successor(self) -> Step:
        return Step((self._open.number or 0) + 1, (self._open.relative or 0) + 1)

    def _reading(self, now: int) -> Reading:
        return now, self.data_ns, self.collectives(), self._optimizer, self.garbage.ns


def _nobody(optimizer: Any) -> None:
    """Answers the bell when we are off: code that was compiled before may still ring it."""


class _Ring:
    """Turns an assignment into a call. A descriptor of its own, and no property: Dynamo would read that."""

    def __set__(self, bell: _Bell, optimizer: Any) -> None:
        # What is called from here is compiled code's callee, and must not be compiled in turn.
        sys.modules["torch._dynamo"].disable(bell.answer)(optimizer)


class _Bell:
    """What compiled code rings when it has stepped an optimizer."""

    rung_by = _Ring()

    def __init__(self) -> None:
        self.call: Callable[[Any], None] = _nobody

    @safely("follow a compiled optimizer step")
    def answer(self, optimizer: Any) -> None:
        self.call(optimizer)
