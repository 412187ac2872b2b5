"""Which kernels the GPU spends its time in, all day: CUPTI is on for one step in so many.

The thread that trains switches it at the borders of steps, by the same signals that Datadog's native tracer gets. The
GPU runs behind the host: what was launched in a step is counted when the GPU is past it, which an event of CUDA's tells
without anybody waiting. Then the Pulse takes what was counted, and tells it.

Nobody else may have CUPTI meanwhile: with another client of it there is no sampling, and a profiler that begins ends
it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ddtrace_pytorch.border import safely, warn_first
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.kernels import sampled
from ddtrace_pytorch.kernels.demangling import UNNAMED, name_of
from ddtrace_pytorch.kernels.profilers import Profilers
from ddtrace_pytorch.kernels.sampled import Run, Sum, Totals
from ddtrace_pytorch.kernels.sampler_library import AT_HAND, SamplerLibrary, Taken, opened
from ddtrace_pytorch.kernels.sampling_budget import SamplingBudget
from ddtrace_pytorch.kernels.step_signals import StepSignals
from ddtrace_pytorch.kernels.symbols import functions
from ddtrace_pytorch.kernels.window import NATIVE_TRACER, gpu_is_there, in_the_way
from ddtrace_pytorch.kernels.window_telling import KERNEL as KERNEL_SPAN
from ddtrace_pytorch.kernels.window_telling import short
from ddtrace_pytorch.rank_span import Piece, RankSpan
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.training.progress import Step
from ddtrace_pytorch.training.steps import Steps

# Steps in a row, where one after the other is due: their kernels have to find room.
_MOST_IN_A_ROW = 8
# Steps that may still be told of, of which kernels are known.
_REMEMBERED = 8
# At a session's end, for the GPU to run what was launched.
_PATIENCE = 0.1


@safely("prepare to count the GPU's kernels")
def made(
    torch: Any,
    settings: Settings,
    clock: Clock,
    span: RankSpan,
    exporter: Exporter,
    steps: Steps,
    profilers: Profilers,
) -> Sampler | None:
    """One, where that is wanted and can be."""
    if torch.version.cuda is None or functions(NATIVE_TRACER) is not None:
        return None
    try:
        library = opened()
    except RuntimeError as why:
        warn_first(f"the GPU's kernels are not counted: {why}")
        return None
    return Sampler(settings, clock, span, exporter, steps, profilers, library, Gpu(torch))


class Gpu:
    """What the sampler asks CUDA; never anything that waits."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def is_there(self) -> bool:
        return gpu_is_there(self._torch)

    def obstacle(self) -> str | None:
        return in_the_way(self._torch, True, os.environ)

    def mark(self) -> Any:
        """A point in what was asked of it so far; None where a graph is being captured, which it would be part of."""
        if self._torch.cuda.is_current_stream_capturing():
            return None
        event = self._torch.cuda.Event()
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        """Not while a graph is being captured: to ask would end the capture."""
        return not self._torch.cuda.is_current_stream_capturing() and bool(mark.query())


@dataclass
class _Recorded:
    """Steps in a row under way, or over. `start`, `end`: on the monotonic clock; `one_by_one`: kernels are kept."""

    first: int
    start: int
    one_by_one: bool
    steps: int = 1
    end: int = 0


class Sampler:
    """From :meth:`open` to :meth:`close`. `wake`: have :meth:`take` called soon; a session sets it."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        span: RankSpan,
        exporter: Exporter,
        steps: Steps,
        profilers: Profilers,
        library: SamplerLibrary,
        gpu: Gpu,
    ) -> None:
        """`library` is open."""
        self.wake: Callable[[], object] = lambda: None
        self._clock = clock
        self._span = span
        self._exporter = exporter
        self._steps = steps
        self._profilers = profilers
        self._library = library
        self._gpu = gpu
        self.budget = SamplingBudget(settings.kernel_every, settings.kernel_budget / 100)
        self._turned_at = 0
        # At most one of these three: recorded now; launched, and not yet run; to be taken.
        self._on: _Recorded | None = None
        self._launched: tuple[_Recorded, Any] | None = None
        self._over: _Recorded | None = None
        self._is_past = False
        self._wants_detail = True
        self._totals = Totals()
        self._began = clock.now()
        self._steps_of: deque[tuple[int, dict[int, tuple[Step, Piece]]]] = deque(maxlen=_REMEMBERED)
        self._waiting: deque[Run] = deque(maxlen=_REMEMBERED)
        self._closed = False
        self._taking = threading.RLock()
        self._signals = StepSignals(library.quick)

    @property
    def tracer(self) -> Any:
        """What can be told of the open span as Datadog's native tracer is."""
        return self._library.quick

    def open(self, at_turns: Callable[[Callable[[], object]], object]) -> None:
        """`at_turns` has something called as one step ends and the next begins."""
        self._profilers.sampler = self
        at_turns(self.turned)

    @safely("sample the GPU's kernels")
    def turned(self) -> None:
        """One step ends, and the next begins; on the thread that trains."""
        try:
            self._arm_or_not(time.monotonic_ns())
        finally:
            self._signals.turn()

    def _arm_or_not(self, now: int) -> None:
        before, self._turned_at = self._turned_at, now
        if before:
            self.budget.add(self._on is not None, now - before)
        number, on = self._steps.next_number, self._on
        if on is not None:
            on.end = now
            # To look at the kernels of several steps one by one takes the interpreter too long.
            most = 1 if on.one_by_one else _MOST_IN_A_ROW
            if number is not None and on.steps < most and self.budget.is_due(number):
                on.steps += 1
                self._library.arm()
            else:
                self._on, self._is_past = None, False
                self._launched = on, None
                self._launched = on, self._gpu.mark()
        elif self._launched is not None:
            self._follow(*self._launched)
        elif number is not None and self._over is None and self.budget.is_due(number) and self._may():
            self._begin(number, now)

    @safely("give way to a profiler")
    def give_way(self) -> None:
        """A profiler begins, of the user's or of ours."""
        had = self._on or self._launched or self._over
        self._on = self._launched = self._over = None
        if had:
            self._library.off()
            with self._taking:
                self._totals.lost += self._library.take().totals.records

    def takes(self, step: Step) -> bool:
        """Whether kernels of `step`, which is about to be told of, were kept one by one. On the Pulse."""
        for first, known in tuple(self._steps_of):
            if step.number == first and first not in known:
                known[first] = step, self._span.piece
                return True
        return False

    @safely("take what was sampled of the GPU's kernels")
    def take(self) -> None:
        """Tell of the last steps that were sampled, if the GPU is past them. On the Pulse."""
        # What is over is looked for in here: whoever has given way has CUPTI left alone once that has come back.
        with self._taking:
            over = self._over
            if over is None:
                return
            self._library.off()
            taken = self._library.take()
        # A profiler may have begun meanwhile.
        if self._over is over:
            self._over = None
            # Else CUPTI refused.
            if taken.totals.steps:
                self._tell(self._run(over, taken))

    @safely("tell of the GPU's kernels")
    def beat(self) -> None:
        """On the Pulse, once the steps have been told of."""
        self.budget.settle()
        if (error := self._library.step_error()) is not None:
            warn_first(f"the GPU's kernels are not counted any more: {error}", about="kernels are not counted")
            self.budget.asked = 0
        for run in tuple(self._waiting):
            if self._closed or self._around(run.first) is not None:
                self._waiting.remove(run)
                self._tell_kernels(run)

    @safely("sum up the GPU's kernels")
    def summarise(self) -> None:
        """Tell the totals since the last time. On the Pulse."""
        self._wants_detail = True
        if not self._totals.steps:
            return
        totals, self._totals = self._totals, Totals()
        began, self._began = self._began, self._clock.now()
        facts = totals.facts(self.budget.every, self.budget.cost)
        told = self._span.child(sampled.NAME, "GPU kernels", began, self._began - began, facts)
        self._exporter.put_span(told, logged=False)
        self._exporter.put(told.as_summary())

    @safely("end the sampling of kernels")
    def close(self, deadline: Deadline) -> None:
        """Tell what there is. The steps have been told of."""
        self._closed = True
        on, launched = self._on, self._launched
        self._on = self._launched = None
        self._signals.close()
        if on is not None:
            on.end = time.monotonic_ns()
            launched = on, None
        if launched is not None:
            self._over = launched[0]
            self._wait_for(launched[1], Deadline(deadline.left(_PATIENCE)))
        # The Pulse may be in CUPTI, and never come back from it.
        if self._taking.acquire(timeout=max(deadline.left(), 0.0)):
            self._taking.release()
            self.take()
        self.beat()
        self.summarise()
        if self._profilers.sampler is self:
            self._profilers.sampler = None

    @safely("wait for the GPU to be past what is counted")
    def _wait_for(self, mark: Any, deadline: Deadline) -> None:
        mark = mark or self._gpu.mark()
        while mark is not None and not self._gpu.has_passed(mark) and deadline.left():
            time.sleep(0.001)

    def abandon(self) -> None:
        """In a forked child: the library is off there."""
        self._taking = threading.RLock()
        self._on = self._launched = self._over = None
        if self._profilers.sampler is self:
            self._profilers.sampler = None
        self.budget.asked = 0

    def _may(self) -> bool:
        torch = sys.modules["torch"]
        if (
            self._closed
            or not self._gpu.is_there()
            or self._profilers.ours is not None
            or self._profilers.of_the_user(torch)
        ):
            return False
        why = self._gpu.obstacle()
        if why is not None:
            warn_first(f"the GPU's kernels are not counted now: {why}", about=f"kernels are not counted: {why}")
        return why is None

    def _begin(self, number: int, now: int) -> None:
        wanted = self._wants_detail
        self._library.keep(AT_HAND if wanted else 0)
        self._signals.look()
        # In this order: a profiler that begins on another thread meanwhile finds it, or is found.
        self._on = _Recorded(number, now, wanted)
        self._library.arm()
        if not self._may():
            self.give_way()
        elif wanted:
            self._wants_detail = False
            self._steps_of.append((number, {}))

    def _follow(self, recorded: _Recorded, mark: Any) -> None:
        if mark is None:
            self._launched = recorded, self._gpu.mark()
        elif self._is_past:
            # A step later: other streams may have been behind the one that was asked.
            self._launched, self._over = None, recorded
            self.wake()
        else:
            self._is_past = self._gpu.has_passed(mark)

    def _run(self, recorded: _Recorded, taken: Taken) -> Run:
        kernels: dict[str, Sum] = {}
        of_names = ((name_of(key.name), one) for key, one in taken.sums.items())
        rest = ((UNNAMED, taken.other),) if taken.other.many else ()
        sampled.add_up(kernels, ((name, Sum(one.many, one.total, one.longest)) for name, one in (*of_names, *rest)))
        parent = self._library.parent()
        totals, ahead = taken.totals, time.time_ns() - self._clock.now()
        whole = recorded.one_by_one and not totals.raws_left_out
        return Run(
            recorded.first,
            recorded.steps,
            self._clock.from_monotonic(recorded.start),
            self._clock.from_monotonic(recorded.end),
            kernels,
            sum(totals.dropped().values()) + totals.cupti_dropped,
            bool(totals.refusals),
            sampled.detail([sampled.event(raw, ahead) for raw in taken.raws]) if whole else None,
            None if parent is None else (parent.trace_id, parent.span_id),
        )

    def _tell(self, run: Run) -> None:
        self._totals.add(run)
        self._exporter.put(run.record())
        if run.detail is not None:
            self._waiting.append(run)

    def _around(self, first: int) -> tuple[Step, Piece] | None:
        for number, known in reversed(tuple(self._steps_of)):
            if number == first:
                return known.get(first)
        return None

    def _tell_kernels(self, run: Run) -> None:
        step, piece = self._around(run.first) or (None, self._span.piece)
        for one in run.detail.longest if run.detail is not None else ():
            made = self._span.child(KERNEL_SPAN, short(one.name), one.start, one.end - one.start, {}, under=piece)
            if step is not None and step.sampled:
                made = replace(made, parent_id=step.span_id)
            elif run.parent is not None:
                made = replace(made, trace_id=run.parent[0], parent_id=run.parent[1])
            self._exporter.put_span(made, logged=False)
