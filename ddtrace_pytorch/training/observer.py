"""The training of one session: what its steps took, and what is told of them and when.

The thread that trains only hands over what has ended; all else runs on the Pulse, and while the session closes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from ddtrace_pytorch.border import complain, safely
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.histogram import Times
from ddtrace_pytorch.kernels.step_signals import StepSignals
from ddtrace_pytorch.ledger import Ledger
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.spans import Fact
from ddtrace_pytorch.training import telling
from ddtrace_pytorch.training.progress import Step
from ddtrace_pytorch.training.steps import Nobody, Reading, Steps
from ddtrace_pytorch.training.telling import Memory, Spent

# Steps held between two beats; beyond that they are counted.
STEPS_HELD = 65_536
UNTOLD = "step that can't be told"
# A step is slow that takes so many times the median of so many before it, if there were some to compare with.
SLOW_FACTOR = 3
VERY_SLOW_FACTOR = 5
COMPARED = 101
FEW = 10
# Reading the allocator's statistics takes some 20 µs: only every so many ns.
MEMORY_NS = 100_000_000


class Training:
    """From :meth:`open` to :meth:`close`. `more_of` gives what else there is to say of a step that gets a span, `more`
    of all since it was last asked, and `chosen` whether a step gets a span in any case; `very_slow` is told of one that
    took that many times the median. A session sets them."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        span: RankSpan,
        exporter: Exporter,
        steps: Steps,
        collectives: Ledger | None,
    ) -> None:
        self.more_of: Callable[[Step], Mapping[str, Fact]] = lambda step: {}
        self.more: Callable[[], Mapping[str, Fact]] = dict
        self.chosen: Callable[[Step], bool] = lambda step: False
        self.very_slow: Callable[[Step], object] = lambda step: None
        self.count = 0
        self._told = 0
        self._sample = settings.step_sample
        self._clock = clock
        self._span = span
        self._exporter = exporter
        self._steps = steps
        self._collectives = collectives.blocked if collectives is not None else _none
        self._signals = StepSignals() if settings.step_profiling else None
        self._turn: Callable[[], object] | None = None
        self._ended: deque[tuple[Step, Reading, Reading, Memory | None]] = deque()
        self._lost = 0
        self._lately: deque[int] = deque(maxlen=COMPARED)
        self._took = Times()
        self._spent = Spent()
        self._first: int | None = None
        self._told_at = clock.now()
        self._memory: Memory | None = None
        self._memory_read = 0

    def open(self) -> None:
        self._steps.listener = self
        self._steps.collectives = self._collectives
        if self._signals is not None:
            self._signals.look()
            self.at_turns(self._signals.turn)

    def at_turns(self, call: Callable[[], object]) -> None:
        """Have something called as one step ends and the next begins, on the thread that trains."""
        before = self._turn
        self._turn = call if before is None else lambda: (before(), call())

    def ended(self, step: Step, start: Reading, end: Reading) -> None:
        """A step is over; on the thread that trains."""
        if end[0] - self._memory_read >= MEMORY_NS:
            self._memory_read = end[0]
            self._memory = _memory()
        self.count += 1
        if len(self._ended) < STEPS_HELD:
            self._ended.append((step, start, end, self._memory))
        else:
            step.sampled = False
            self._lost += 1

    def turned(self) -> None:
        if self._turn is not None:
            self._turn()

    def beat(self, last: bool = False) -> None:
        """Tell of the steps that have ended. The `last` of all gets a span in any case."""
        usual = median(self._lately) if len(self._lately) >= FEW else float("inf")
        for _ in range(len(self._ended)):
            try:
                step, start, end, memory = self._ended.popleft()
            except IndexError:  # another thread tells: the end doesn't wait for ever for the Pulse
                break
            times = telling.spent(start, end)
            if self._told:
                self._took.add(times.wall)
                self._spent = self._spent.and_then(times)
                self._lately.append(times.wall)
            else:
                # With what is made, compiled and warmed up in it, it says nothing about the others.
                self._first = times.wall
            regular = bool(self._sample) and (step.number or 0) % self._sample == 0
            chosen = self.chosen(step)
            slow = times.wall > SLOW_FACTOR * usual
            self._tell(step, start[0], times, memory, regular or chosen or slow or (last and not self._ended))
            if times.wall > VERY_SLOW_FACTOR * usual and not chosen:
                self.very_slow(step)
        lost, self._lost = self._lost, 0
        self._exporter.count_lost("too many steps", lost)

    def rotated(self) -> None:
        """A good time to look for the native tracer, which may be loaded late."""
        if self._signals is not None:
            self._signals.look()

    @safely("sum up the steps")
    def summarise(self) -> None:
        """Tell the totals since the last time."""
        took, self._took = self._took, Times()
        times, self._spent = self._spent, Spent()
        first, self._first = self._first, None
        began, self._told_at = self._told_at, self._clock.now()
        more = self.more()
        if took.count or first is not None or more:
            facts = telling.summary_facts(took, times, first, self._memory, more)
            framework = str(self._span.facts().get("framework", "none"))
            self._put_summary(framework, began, self._told_at, facts)

    @safely("tell of the last steps before the end")
    def farewell(self, interrupted: bool, over: bool = False) -> None:
        """The process may be about to die: tell what there is; where that has `interrupted` a step, of that one too.
        `over`: nothing more is to come."""
        step, start, now = self._steps.leave(over, interrupted)
        unfinished = interrupted and step.number is not None
        self.beat(last=True)
        if unfinished:
            times = telling.spent(start, now)
            self._tell(step, start[0], times, self._memory, True, unfinished=True)
        else:
            step.sampled = False
        self.summarise()

    def close(self, interrupted: bool, over: bool) -> None:
        """Tell what is left; `over`: no other session goes on with it."""
        self.farewell(interrupted, over)
        self._detach()
        if self._signals is not None:
            self._signals.close()

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's is counted here."""
        self._detach()

    def _detach(self) -> None:
        if self._steps.listener is self:
            self._steps.listener = Nobody()
            self._steps.collectives = _none

    def _tell(
        self, step: Step, start: int, times: Spent, memory: Memory | None, sampled: bool, unfinished: bool = False
    ) -> None:
        began = self._clock.from_monotonic(start)
        first, self._told = not self._told, self._told + 1
        span = None
        # One that can't be told must not take the others along.
        try:
            record = telling.step_record(step, began, times, memory, unfinished, first)
            if sampled:
                facts = telling.step_facts(step, times, memory, unfinished, first)
                name = f"step {step.number}"
                step.sampled = True
                facts |= self.more_of(step)
                span = self._span.child(telling.STEP, name, began, times.wall, facts, span_id=step.span_id)
        except Exception as error:
            step.sampled = False
            complain("tell of a step", error)
            self._exporter.count_lost(UNTOLD, 1)
            return
        self._exporter.put(record)
        step.sampled = sampled
        if span is not None:
            self._exporter.put_span(span, logged=False)

    def _put_summary(self, framework: str, began: int, ended: int, facts: dict[str, Fact]) -> None:
        record = self._span.child(telling.SUMMARY, framework, began, ended - began, facts)
        self._exporter.put_span(record, logged=False)
        self._exporter.put(record.as_summary())


def _none() -> int:
    return 0


@safely("read how much memory the GPU's tensors take")
def _memory() -> Memory | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    allocated = torch.cuda.memory.memory_stats_as_nested_dict().get("allocated_bytes", {}).get("all", {})
    return Memory(allocated.get("current", 0), allocated.get("peak", 0))
