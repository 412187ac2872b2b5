"""The profiler windows of one session: begun and ended where steps are, read and written where nobody waits for it.

The thread that trains begins and ends a window; the Pulse sees that one has ended, and gives it to a thread of its own,
which lives as long as that takes; the Pulse tells what came of it. No two are in hand at a time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

from ddtrace_pytorch.border import in_words, pass_on, safely, warn_first
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.kernels import own_window, reading, trace_file, window_telling
from ddtrace_pytorch.kernels.aggregates import Aggregates, aggregate
from ddtrace_pytorch.kernels.own_window import OwnWindow
from ddtrace_pytorch.kernels.profilers import Profilers
from ddtrace_pytorch.kernels.sampler_library import SamplerLibrary, opened
from ddtrace_pytorch.kernels.schedule import Plan, Schedule
from ddtrace_pytorch.kernels.trace_file import NoTrace
from ddtrace_pytorch.kernels.window import Options, Window, gpu_is_there, in_the_way, prepare_environment
from ddtrace_pytorch.kernels.window_telling import Told
from ddtrace_pytorch.private import make_directories, make_private
from ddtrace_pytorch.rank_span import Piece, RankSpan
from ddtrace_pytorch.runlog.left_behind import Left
from ddtrace_pytorch.runlog.writer import MIB, log_directory
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.threads import leave_signals_to_others
from ddtrace_pytorch.training.progress import Step
from ddtrace_pytorch.training.steps import Steps

# Of a step that is in a window.
TAG = "profile"
# Windows whose steps may still be told of.
_REMEMBERED = 8
_YOURS_BEGAN = "a profiler of yours began"
SCHEDULED, ASKED, SLOW, BY_HAND = "schedule", "asked", "slow step", "by hand"


@dataclass
class _Open:
    """A window that has begun. `start`: when it began to record, in ns since the epoch, and `ahead`: by how much the
    system's clock was ahead of ours then."""

    window: Window | OwnWindow
    plan: Plan
    how: str
    options: Options
    thread: int
    start: int | None = None
    ahead: int = 0


@dataclass(frozen=True)
class _Ended:
    """One that has ended, to be read; `memory`: a snapshot of the GPU's, if there is one."""

    results: reading.Recorded | own_window.Recorded
    memory: Any
    plan: Plan
    how: str
    activity: str
    start: int
    end: int
    ahead: int
    cut: str | None


class Windows:
    """From :meth:`open` to :meth:`close`."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        span: RankSpan,
        exporter: Exporter,
        steps: Steps,
        profilers: Profilers,
        place: tuple[int, int, str | None],
        run: Callable[[], tuple[str, str] | None],
        left: Left | None = None,
    ) -> None:
        """`place`: rank, world size, backend; `run` and `left`: as the exporter has them. `wake`: have :meth:`read`
        called soon; `follow`: have :meth:`turned` called from now on; a session sets both."""
        self.wake: Callable[[], object] = lambda: None
        self.follow: Callable[[], object] = lambda: None
        self._follows = False
        self._settings = settings
        self._clock = clock
        self._span = span
        self._exporter = exporter
        self._steps = steps
        self._profilers = profilers
        self._place = place
        self._run_ids = run
        self._left = left or Left()
        every = settings.profile_every if place[0] in settings.profile_ranks else 0
        self._awaits_slow_step = settings.profile_slow and place[0] in settings.profile_ranks
        self._schedule = Schedule(every, settings.profile_warmup, settings.profile_active)
        self._asked: deque[tuple[Plan, str]] = deque()
        # Between these steps no scheduled window begins.
        self._idle_since = self._idle_until = 0
        # Whether windows are taken with the kernel sampler's library, and that.
        self._own = settings.profile_with == "sampler" and not settings.profile_operators
        self._library: SamplerLibrary | None = None
        self._tried_again = False
        self._past = 0
        self._open: _Open | None = None
        self._ended: deque[_Ended] = deque()
        self._reader: threading.Thread | None = None
        self._told: deque[Told] = deque()
        self._waiting: deque[Told] = deque()
        self._steps_of: deque[tuple[Plan, dict[int, tuple[Step, Piece]]]] = deque(maxlen=_REMEMBERED)
        self._beginning = threading.Lock()
        self._hurry = False
        self._over = False
        self._counts = {"windows": 0, "failed": 0}

    @safely("schedule profiler windows")
    def open(self) -> None:
        if self._schedule.overlaps:
            self._schedule = self._schedule._replace(every=0)
        if not self._schedule.every:
            return
        if not self._own:
            self._prepare_environment(sys.modules["torch"])
        self._begin_to_follow()

    @safely("take a request for a profiler window")
    def ask(self, plan: Plan, how: str = ASKED) -> None:
        """Somebody wants this one, too; from any thread."""
        if self.is_over(plan):
            self._missed(plan, how)
            return
        self._asked.append((plan, how))
        self._begin_to_follow()

    def was_slow(self, step: Step) -> None:
        """A step took many times as long as usual: if that is wanted, there is a window soon, once. On the Pulse."""
        number, its = self._steps.progress.step.number, step.number or 0
        # To switch the profiler on and off takes its time, too.
        ours = any(plan.warms_up_at - 1 <= its <= plan.ends_before for plan, _ in tuple(self._steps_of))
        if self._awaits_slow_step and number is not None and not ours:
            self._awaits_slow_step = False
            self.ask(Plan(number + 2, self._schedule.active, 1), SLOW)

    def is_over(self, plan: Plan) -> bool:
        """Whether its first step has begun before now."""
        number = self._steps.progress.step.number
        return number is not None and number > plan.first

    @safely("follow the steps with a profiler")
    def turned(self) -> None:
        """One step ends, and the next begins; on the thread that trains."""
        number, open_ = self._steps.next_number, self._open
        if number is None:
            return
        if open_ is None:
            if self._idle_since <= number < self._idle_until and not self._asked:
                return
            wanted = self._plan_at(number)
            if wanted is not None and not self._over:
                self._begin(*wanted, number)
        elif open_.thread == get_ident() and open_.how != BY_HAND and not open_.window.must_wait():
            self._go_on(open_, number)

    @safely("begin a profiler window")
    def begin_by_hand(self) -> bool:
        """The user asks for one, from here until :meth:`end_by_hand`; whether there is one now."""
        if self._over:
            return False
        step = self._steps.progress.step.number or 0
        self._begin(Plan(step, 1), BY_HAND, step)
        return self._open is not None and self._open.how == BY_HAND

    @safely("end a profiler window")
    def end_by_hand(self) -> None:
        open_ = self._open
        if open_ is not None and open_.how == BY_HAND and open_.thread == get_ident():
            step = self._steps.progress.step.number or 0
            open_.plan = Plan(open_.plan.first, max(step - open_.plan.first, 1))
            self._end(open_)

    @safely("give way to a profiler of yours")
    def give_way(self) -> None:
        """A profiler of the user's begins."""
        open_ = self._open
        if open_ is None:
            return
        if open_.thread == get_ident():
            self._drop(open_, window_telling.ABANDONED, _YOURS_BEGAN)
        else:
            open_.window.give_way()

    @safely("end a profiler window early")
    def cut(self, why: str) -> None:
        """End it here, if it was begun on this thread: what it has is kept."""
        open_ = self._open
        if open_ is None or open_.thread != get_ident():
            return
        if open_.start is None:
            self._drop(open_, window_telling.SKIPPED, why)
        else:
            self._end(open_, why)

    def takes(self, step: Step) -> bool:
        """Whether a window took `step`, which is about to be told of; it is tagged then. On the Pulse."""
        for plan, known in tuple(self._steps_of):
            # Some count from 1 again in each epoch.
            if step.number is not None and plan.first <= step.number < plan.ends_before and step.number not in known:
                step.tags[TAG] = None
                known[step.number] = step, self._span.piece
                return True
        return False

    @safely("read a profiler window")
    def read(self) -> None:
        """Have what has ended read on a thread of its own. On the Pulse."""
        reader = self._reader
        if reader is not None and not reader.is_alive():
            reader = self._reader = None
        if reader is None and self._ended:
            reader = threading.Thread(
                target=self._read, args=(self._ended[0],), name="ddtrace_pytorch.profile", daemon=True
            )
            reader.start()
            self._reader = reader

    @safely("tell of profiler windows")
    def beat(self) -> None:
        """Tell of what was read, once its first step has been told of: that one's span is around it."""
        self.read()
        while self._told:
            told = self._told.popleft()
            self._exporter.put(told.record())
            if told.state == window_telling.FAILED:
                self._tell(told)
            elif told.state not in (window_telling.SKIPPED, window_telling.ABANDONED):
                self._waiting.append(told)
        while self._waiting and (
            self._over or len(self._waiting) > _REMEMBERED or self._around(self._waiting[0].plan) is not None
        ):
            self._tell(self._waiting.popleft())

    @safely("tell the last of the profiler windows")
    def close(self, deadline: Deadline) -> None:
        """Tell what can be read until then. The steps have been told of."""
        self._over = True
        open_ = self._open
        if open_ is not None and open_.window.ends_anywhere:
            self._drop(open_, window_telling.ABANDONED, "the session was ended on another thread")
        while self._ended and deadline.left():
            self.read()
            if self._reader is not None:
                self._reader.join(deadline.left())
        self._hurry = True
        self._told += [_told(ended, window_telling.FAILED, why="the session was ending") for ended in self._ended]
        self.beat()

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's is profiled here."""
        self._over = self._hurry = True
        self._beginning = threading.Lock()
        self._open = None
        self._profilers.ours = None
        self._profilers.ranges.end()

    def _prepare_environment(self, torch: Any) -> None:
        """For a window of torch's profiler."""
        prepare_environment(torch, first=self._profilers.none_yet)

    def _new_window(self, torch: Any, options: Options) -> Window | OwnWindow:
        if self._own and options.gpu:
            try:
                self._library = self._library or opened()
                return OwnWindow(torch, self._library, options.memory)
            except RuntimeError as why:
                self._go_without_library(why)
        if self._own:
            warn_first(
                "DD_PYTORCH_PROFILE_WITH=sampler: no GPU is in use, so torch's profiler takes a window of the CPU"
            )
        self._prepare_environment(torch)
        return Window(torch, options)

    def _go_without_library(self, why: object) -> None:
        self._own = False
        warn_first(
            f"profiler windows are taken with torch's profiler, not with the sampler: {why}",
            about="windows without the sampler",
        )

    def _begin_to_follow(self) -> None:
        if not self._follows:
            self._follows = True
            self.follow()

    def _plan_at(self, number: int) -> tuple[Plan, str] | None:
        """Which window can be begun as the step of that `number` begins, and how it came about."""
        for one in tuple(self._asked):
            if one[0].begins_with(number):
                return one
            if number > one[0].first:
                self._asked.remove(one)
                self._missed(*one)
        plan = self._schedule.plan_at(number)
        if plan is not None:
            return (plan, SCHEDULED) if plan.first != self._past else None
        self._past = 0
        self._idle_since, self._idle_until = number, self._schedule.idle_until(number)
        return None

    def _begin(self, plan: Plan, how: str, number: int) -> None:
        # Two threads may come here at once, one of them by hand.
        if self._beginning.acquire(blocking=False):
            try:
                self._begin_alone(plan, how, number)
            finally:
                self._beginning.release()

    def _begin_alone(self, plan: Plan, how: str, number: int) -> None:
        torch = sys.modules["torch"]
        gpu = gpu_is_there(torch)
        why = self._busy(torch) or in_the_way(torch, gpu, os.environ)
        if why is not None:
            # What is in the way may be gone when the last step begins that it can begin with.
            if number >= plan.first:
                self._pass(plan, how)
                self._skip(plan, how, why)
            return
        settings = self._settings
        options = Options(
            cpu=settings.profile_cpu or not gpu,
            gpu=gpu,
            shapes=settings.profile_shapes,
            stacks=settings.profile_stacks,
            memory=settings.profile_memory,
        )
        self._pass(plan, how)
        try:
            window = self._new_window(torch, options)
        except Exception as error:
            pass_on(error)
            self._fail(plan, how, options.activity, in_words(error))
            return
        open_ = _Open(window, plan, how, options, get_ident())
        # In this order: who begins on another thread meanwhile finds it, or is found.
        self._open, self._profilers.ours = open_, self
        try:
            if self._profilers.sampler is not None:
                self._profilers.sampler.give_way()
            open_.window.prepare()
        except BaseException as error:
            self._break(open_, error)
            return
        self._steps_of.append((plan, {}))
        if open_.window.is_spoilt or self._profilers.of_the_user(torch):
            self._drop(open_, window_telling.ABANDONED, _YOURS_BEGAN)
        elif number >= plan.first:
            self._start(open_)

    def _break(self, open_: _Open, error: BaseException) -> None:
        """In ``except``: `error` ends it, and what is not ours passes on."""
        self._cancel(open_)
        pass_on(error)
        why = in_words(error)
        if isinstance(open_.window, OwnWindow):
            self._go_without_library(why)
        self._fail(open_.plan, open_.how, open_.options.activity, why)

    def _pass(self, plan: Plan, how: str) -> None:
        """It is begun, or is not to be."""
        if (plan, how) in self._asked:
            self._asked.remove((plan, how))
        else:
            self._past = plan.first

    def _busy(self, torch: Any) -> str | None:
        ours = self._profilers.ours
        if ours is not None and ours is not self:
            ours.give_way()  # of a session that was ended on another thread
        if self._profilers.of_the_user(torch):
            return "a profiler of yours is there, or a range that was opened in one"
        if self._profilers.ours is not None:
            return "another window is open"
        return "the window before is still being written" if self._ended else None

    def _go_on(self, open_: _Open, number: int) -> None:
        plan = open_.plan
        if open_.window.is_spoilt:
            self._drop(open_, window_telling.ABANDONED, _YOURS_BEGAN)
        elif number >= plan.ends_before or number < plan.warms_up_at:
            if open_.start is None:
                self._drop(open_, window_telling.SKIPPED, f"the steps were set to {number}")
            elif open_.window.may_end():
                self._end(open_)
        elif number >= plan.first and open_.start is None:
            self._start(open_)

    def _start(self, open_: _Open) -> None:
        try:
            open_.window.start(*self._place)
        except BaseException as error:
            self._break(open_, error)
            return
        self._profilers.ranges.begin(sys.modules["torch"])
        open_.start = self._clock.now()
        open_.ahead = time.time_ns() - open_.start

    def _end(self, open_: _Open, cut: str | None = None) -> None:
        options, start = open_.options, open_.start or self._clock.now()
        try:
            open_.window.settle()
            end = self._clock.now()
            memory = open_.window.memory()
            results = open_.window.end()
        except BaseException as error:
            self._break(open_, error)
            return
        if open_.window.is_spoilt:
            self._drop(open_, window_telling.ABANDONED, _YOURS_BEGAN)
            return
        self._close_window()
        self._ended.append(
            _Ended(results, memory, open_.plan, open_.how, options.activity, start, end, open_.ahead, cut)
        )
        self.wake()

    def _drop(self, open_: _Open, state: str, why: str) -> None:
        self._cancel(open_)
        self._forget(open_.plan)
        self._told.append(Told(open_.how, state, open_.plan, self._clock.now(), why=why))

    def _cancel(self, open_: _Open) -> None:
        try:
            safely("switch the profiler off")(open_.window.cancel)()
        finally:
            self._close_window()

    def _close_window(self) -> None:
        self._profilers.ranges.end()
        self._open = None
        self._profilers.ours = None

    def _forget(self, plan: Plan) -> None:
        for known in tuple(self._steps_of):
            if known[0] is plan:
                self._steps_of.remove(known)

    def _skip(self, plan: Plan, how: str, why: str) -> None:
        warn_first(
            f"a profiler window was skipped at step {plan.first}: {why}", about=f"profiler window skipped: {why}"
        )
        self._told.append(Told(how, window_telling.SKIPPED, plan, self._clock.now(), why=why))

    def _missed(self, plan: Plan, how: str) -> None:
        self._told.append(Told(how, window_telling.SKIPPED, plan, self._clock.now(), why="its first step had passed"))

    def _fail(self, plan: Plan, how: str, activity: str, why: str) -> None:
        self._forget(plan)
        warn_first(f"a profiler window failed at step {plan.first}: {why}", about=f"profiler window failed: {why}")
        self._told.append(Told(how, window_telling.FAILED, plan, self._clock.now(), activity=activity, why=why))

    def _read(self, ended: _Ended) -> None:
        leave_signals_to_others()
        try:
            told = safely("read a profiler window")(self._read_one)(ended)
            self._told.append(told or _told(ended, window_telling.FAILED, why="it can't be read"))
        finally:
            self._ended.popleft()

    def _read_one(self, ended: _Ended) -> Told:
        many, events = ended.results.read(ended.ahead)
        if not many:
            return self._empty(ended)
        missing = ended.results.missing()
        state = window_telling.SHORT if ended.cut else window_telling.PARTIAL if missing else window_telling.WHOLE
        told = _told(ended, state, why=missing, results=aggregate(events, ended.start, ended.end))
        try:
            path, size = self._write(ended, many)
        except (NoTrace, OSError) as error:
            why = str(error) if isinstance(error, NoTrace) else in_words(error)
            warn_first(f"a profiler window has no trace file: {why}")
            return replace(told, why=f"no file: {why}")
        return replace(told, path=path, bytes=size, memory=self._keep_memory(ended, path))

    @safely("write a snapshot of the GPU's memory")
    def _keep_memory(self, ended: _Ended, trace: str) -> str | None:
        if ended.memory is None:
            return None
        limit = int(self._settings.profile_max_mb * MIB)
        return trace_file.write_snapshot(ended.memory, trace, self._place[0], limit, self._left.traces)

    def _empty(self, ended: _Ended) -> Told:
        if ended.cut:
            return _told(ended, window_telling.SHORT)
        why = "nothing was recorded"
        if ended.how == SCHEDULED and not self._tried_again:
            self._tried_again = True
            again = self._schedule.again(ended.plan)
            if again is not None:
                self._asked.append((again, SCHEDULED))
                why += f"; tried again at step {again.first}"
        warn_first(f"the profiler window at step {ended.plan.first} is empty: {why}", about="empty profiler window")
        return _told(ended, window_telling.EMPTY, why=why)

    def _write(self, ended: _Ended, many: int) -> tuple[str, int]:
        settings = self._settings
        if self._hurry:
            raise NoTrace("the session was ending")
        if trace_file.plain_size(many) > trace_file.PLAIN_LIMIT:
            raise NoTrace(f"of {many:,} events it would be too large; take fewer steps")
        run = self._run_ids()
        if run is None:
            raise NoTrace("the ranks have not agreed on the job's id yet")
        root = os.path.abspath(settings.profile_dir or settings.log_root)
        if settings.profile_dir is None and settings.log_dir is None:
            make_private(root)
        directory = os.path.join(log_directory(root, *run), trace_file.FOLDER)
        make_directories(directory)
        rank = self._place[0]
        name = trace_file.name_of(rank, trace_file.coordinates(self._span.facts()), ended.plan.first)
        limit = int(settings.profile_max_mb * MIB)
        written = trace_file.write(
            ended.results.save, directory, name, rank, limit, lambda: not self._hurry, self._left.traces
        )
        if directory not in self._left.traces:
            self._left.traces.append(directory)
        return written

    def _around(self, plan: Plan) -> tuple[Step, Piece] | None:
        """The first of its steps, if that was told of, and the piece of the rank span that its span is below."""
        for mine, known in reversed(tuple(self._steps_of)):
            if mine.first == plan.first:
                return known.get(plan.first)
        return None

    def _tell(self, told: Told) -> None:
        failed = told.state in (window_telling.FAILED, window_telling.EMPTY)
        self._counts["failed" if failed else "windows"] += 1
        self._span.learn({f"pytorch.profile.{name}": many for name, many in self._counts.items() if many})
        step, piece = self._around(told.plan) or (None, self._span.piece)
        resource, facts = f"step {told.plan.first}", told.facts()
        made = self._span.child(
            window_telling.NAME, resource, told.start, told.duration, facts, error=failed, under=piece
        )
        if step is not None and step.sampled:
            made = replace(made, parent_id=step.span_id)
        self._exporter.put_span(made, logged=False)
        for name, start, took in told.kernels():
            kernel = self._span.child(window_telling.KERNEL, name, start, took, {}, under=piece)
            self._exporter.put_span(replace(kernel, parent_id=made.span_id), logged=False)


def _told(ended: _Ended, state: str, why: str | None = None, results: Aggregates | None = None) -> Told:
    return Told(
        ended.how,
        state,
        ended.plan,
        ended.start,
        ended.end - ended.start,
        ended.activity,
        why or ended.cut,
        results=results,
    )
