"""The session: one for each life of a process group (or of a single process that trains).

It owns the identity, the rank span, the Pulse and the exporter; it opens once, closes once, and lets no error of
ours into training.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddtrace.constants import USER_KEEP

from ddtrace_pytorch import hooks, parenthood
from ddtrace_pytorch.border import call_each, safely, warn_for_host, warn_once
from ddtrace_pytorch.c_signals import die
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives.group_lives import GroupLives
from ddtrace_pytorch.collectives.markers import channels
from ddtrace_pytorch.collectives.observer import Collectives
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.identity import describe, place, runtime
from ddtrace_pytorch.identity import device as devices
from ddtrace_pytorch.identity import job as jobs
from ddtrace_pytorch.identity.describe import Member
from ddtrace_pytorch.identity.introduction import GENERATED, Introduced, Introduction
from ddtrace_pytorch.identity.meeting import Meeting
from ddtrace_pytorch.identity.topology import find_nodes, this_node
from ddtrace_pytorch.kernels.native import Context, NativeParent
from ddtrace_pytorch.kernels.no_sampler import NoSampler
from ddtrace_pytorch.kernels.profilers import Profilers
from ddtrace_pytorch.kernels.requests import Requests
from ddtrace_pytorch.kernels.windows import Windows
from ddtrace_pytorch.lookout import Lookout
from ddtrace_pytorch.pulse import Pulse, task
from ddtrace_pytorch.rank_span import Piece, RankSpan
from ddtrace_pytorch.records.observer import Records
from ddtrace_pytorch.records.recorder import Recorder
from ddtrace_pytorch.runlog.left_behind import LeftBehind
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.spans import End, Fact
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.last_words import Identity
from ddtrace_pytorch.stalls.pace import Pace
from ddtrace_pytorch.termination import Handler
from ddtrace_pytorch.threads import join, leave_signals_to_others, on_main_thread
from ddtrace_pytorch.training.checkpoint_spans import Checkpoints
from ddtrace_pytorch.training.observer import Training
from ddtrace_pytorch.training.progress import Step
from ddtrace_pytorch.training.steps import Steps
from ddtrace_pytorch.weakly import weakly
from ddtrace_pytorch.whereabouts import Whereabouts

if TYPE_CHECKING:
    from ddtrace_pytorch.kernels.sampler import Sampler

BEAT_SECONDS = 1.0
FIRST_SNAPSHOT_SECONDS = 10.0
# For all of a close, and for what is sent between a SIGTERM and its being raised again.
CLOSE_SECONDS = 2.0
FAREWELL_SECONDS = 1.8
# Of a close: for the Pulse, to hear what has come.
CATCH_UP_SECONDS = 0.2
# And for the thread that may be waiting in the store. A store whose host is frozen never answers.
STORE_SECONDS = 0.8
# And what these leave for sending and writing it all.
EXPORT_SECONDS = 0.5


class Session:
    """Everything of ours between the opening of a process group and its end."""

    def __init__(
        self,
        member: Member,
        settings: Settings,
        instrument: str,
        handler: Handler,
        lives: GroupLives,
        steps: Steps,
        profilers: Profilers,
        recorder: Recorder | None = None,
        left_behind: LeftBehind | None = None,
    ) -> None:
        """Build without side effects; :meth:`open` starts the threads. Costs the training thread about 1 ms."""
        environ = dict(os.environ)
        # Not the store: the user's group has to be the last that holds it, so that its port is free once that is gone.
        self.member = replace(member, store=None)
        self._settings = settings
        self._clock = Clock()
        self._job = jobs.identify(environ)
        store = member.store if member.world_size > 1 else None
        self._meeting = Meeting(store, member.ordinal, self._job.restart_count)
        self._introduction = Introduction(self._job, member.rank, self._meeting, member.generated_id)
        self._introduced: Introduced | None = None
        self._store_left_by: Deadline | None = None
        self._spent_going = 0.0
        self._device: devices.Device | None = None
        self._host = socket.gethostname()
        parent, link = parenthood.surroundings(environ)
        self.span = RankSpan(
            service=settings.service,
            rank=member.rank,
            start=self._clock.now(),
            facts=describe.opening_facts(member, self._job, self._host, instrument, environ, sys.modules.get("torch"))
            | describe.purpose_facts(settings.source, settings.log_metadata),
            parent=parent,
            link=link,
        )
        self.checkpoints = Checkpoints(weakly(self.tell))
        self._parent = parenthood.RankParent(self.span)
        left = (left_behind or LeftBehind()).of(settings.log_root, member.rank)
        identity, run = weakly(self._identity), weakly(self._run_ids)
        self._exporter = Exporter(settings, member.rank, self._clock, identity, run, left)
        self._collectives: Collectives | None = None
        if member.store is not None and settings.collectives != "off":
            self._collectives = safely("prepare to count collectives")(Collectives)(
                sys.modules["torch"],
                settings,
                self._clock,
                self.span,
                self._exporter,
                lives,
                wraps=instrument == "wrapt",
            )
        ledger = self._collectives.ledger if self._collectives is not None else None
        if ledger is not None:
            ledger.step = lambda: steps.progress.step.number
        self._training = Training(settings, self._clock, self.span, self._exporter, steps, ledger)
        self.windows = Windows(
            settings,
            self._clock,
            self.span,
            self._exporter,
            steps,
            profilers,
            (member.rank, member.world_size, member.backend),
            run,
            left,
        )
        self._sampler: Sampler | NoSampler = NoSampler()
        torch = sys.modules.get("torch")
        if settings.kernel_every and torch is not None:
            from ddtrace_pytorch.kernels.sampler import made

            sampler = made(torch, settings, self._clock, self.span, self._exporter, steps, profilers)
            self._sampler = sampler or self._sampler
        self._native = NativeParent(weakly(self._native_context), ours=self._sampler.tracer)
        self._training.chosen = weakly(self._is_looked_into)
        self._training.very_slow = weakly(self.windows.was_slow)
        self.windows.follow = weakly(self._follow_steps)
        self._exporter.look = Requests(member.rank, weakly(self.windows.ask), weakly(self.windows.is_over)).look
        self._records: Records | None = None
        if recorder is not None and settings.records:
            self._records = Records(recorder, self._clock, self.span, self._exporter)
            self._training.more_of = self._records.facts_of_step
            self._training.more = self._records.facts_of_summary
        seconds = settings.stall_seconds
        self._lookout = Lookout(
            settings,
            self._clock,
            self.span,
            self._exporter,
            self._collectives,
            Whereabouts(member.rank, self._host, self._clock, self._collectives, seconds, steps.progress),
            weakly(self._gpu),
            member.world_size,
        )
        self._store = store
        self._store_thread = threading.Thread(target=self._meet, name="ddtrace_pytorch.store", daemon=True)
        self._handler = handler
        keep = task("keep where this rank is", weakly(self._lookout.keep), math.inf)
        read = task("read a profiler window", weakly(self.windows.read), math.inf)
        sampled = task("take what was sampled", weakly(self._sampler.take), math.inf)
        self._pulse = Pulse(
            [
                task("beat", weakly(self._beat), BEAT_SECONDS),
                keep,
                read,
                sampled,
                task("sum up", weakly(self._summarise), settings.summary_seconds),
                task("rotate the rank span", weakly(self.rotate), settings.rotation_seconds),
                task(
                    "send a snapshot of the rank span",
                    weakly(self.snapshot),
                    settings.snapshot_seconds,
                    first=min(FIRST_SNAPSHOT_SECONDS, settings.snapshot_seconds),
                ),
            ],
            handler.pipe,
            weakly(self._on_signals),
        )
        want = weakly(self._pulse.want)
        self.windows.wake = lambda: want(read)
        self._sampler.wake = lambda: want(sampled)
        if ledger is not None:
            # A rank may die in it before the next beat, and only a beat says what its number means.
            ledger.on_new = safely("keep what is new")(lambda cell: want(keep))
        self._beats = 0
        self._signals_kept_at = 0
        self._terminated = False
        self._interrupted: Pace | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._end = End("exit")

    def open(self) -> None:
        """Start everything; where that fails (there are no more threads to be had), what was started ends again."""
        # The ranks of a host have one environment, or nearly.
        for complaint in (*self._settings.complaints, *self._job.complaints):
            warn_for_host(complaint)
        self._exporter.start(self)
        try:
            self._store_thread.start()
            self._handler.listen()
            on_main_thread(self._handler.install)  # a second time: the user may have reset the signal since the patch
            self._pulse.start()
        except BaseException:
            self._handler.rest()
            self._meeting.hurry()
            self._lookout.forget()
            self._exporter.close(CLOSE_SECONDS)
            raise
        self._parent.register()
        self._native.look()
        self._watch_collectives()
        self._training.open()
        self.windows.open()
        self._sampler.open(self._training.at_turns)
        if self._records is not None:
            self._records.open()

    def close(self, end: End) -> None:
        """End the span, send and write everything, stop all threads. Only once.

        All that is waited for shares :data:`CLOSE_SECONDS`, with what :meth:`group_going` took of them.
        """
        deadline = Deadline(CLOSE_SECONDS - self._spent_going)
        call_each(
            "close the session",
            # What ends the process may be the handler of a signal that the Pulse is about to hear.
            lambda: self._pulse.catch_up(deadline.left(CATCH_UP_SECONDS)),
            lambda: self._close_once(end, deadline),
        )

    def _close_once(self, end: End, deadline: Deadline) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._handler.hold()
        try:
            self._close(end, deadline)
        finally:
            self._handler.rest()

    def _close(self, end: End, deadline: Deadline) -> None:
        before_export = deadline.earlier(EXPORT_SECONDS)
        self._end = end
        call_each(
            "end a part of the session",
            lambda: self.windows.cut("the session ended"),
            lambda: self._lookout.say_why(before_export, badly=end.error is not None),
            lambda: self.leave_store(before_export),
            lambda: self._know(self._introduction.own),
            # Before the span ends: a rotation after that would end it a second time.
            lambda: self._pulse.stop(before_export.left()),
            self._lookout.last_look,
            self._hear_the_reason,
            lambda: self._close_collectives(before_export),
            lambda: self._gather_records(before_export),
            self._close_training,
            lambda: self.windows.close(before_export),
            lambda: self._sampler.close(before_export),
            self._close_records,
            lambda: self._finish(self._end),
            self._parent.unregister,
            lambda: self._lookout.close(deadline),
            lambda: self._close_exporter(deadline),
        )

    def _hear_the_reason(self) -> None:
        """Of an end by no error: the signal that came before it, as far as the Pulse has heard of one."""
        if self._end.error is not None:
            return
        if self._terminated:
            self._end = End("signal:SIGTERM")
        elif self._interrupted is not None and not self._pace().went_on_since(self._interrupted):
            self._end = End("signal:SIGINT")

    def _gather_records(self, deadline: Deadline) -> None:
        if self._records is not None:
            self._records.gather(deadline)

    def _close_records(self) -> None:
        if self._records is not None:
            self._records.close()

    def _close_exporter(self, deadline: Deadline) -> None:
        if self._exporter.close(max(0.1, deadline.left())):
            self._lookout.forget()

    def tell(
        self,
        name: str,
        resource: str,
        start: int,
        duration: int,
        facts: Mapping[str, Fact],
        error: bool = False,
        under: Piece | None = None,
    ) -> None:
        """Send and write a span below the rank span, from any thread.

        `start`: a reading of time.monotonic_ns(); `duration` in ns; `under`: the piece that was open when it started,
        otherwise the open one.
        """
        began = self._clock.from_monotonic(start)
        self._exporter.put_span(self.span.child(name, resource, began, duration, facts, error, under=under))

    def _follow_steps(self) -> None:
        self._training.at_turns(self.windows.turned)

    def _gpu(self) -> str | None:
        return self._device.uuid if self._device is not None else None

    def _native_context(self) -> Context:
        """What the native GPU tracer is told of this rank, by its own names."""
        facts, piece = self.span.facts(), self.span.piece
        named = {
            "training_job_id": facts.get("training_job.id"),
            "rank": self.member.rank,
            "world_size": self.member.world_size,
            "framework": facts.get("framework"),
            "service": self._settings.service,
        }
        tags = tuple((name, str(value)) for name, value in named.items() if value is not None)
        return Context(piece.trace_id, piece.span_id, USER_KEEP, tags)

    def _finish(self, end: End) -> None:
        self._native.take_back()
        self._tell_of_checkpoints(last=True)
        span = self.span.finish(self._clock.now(), end)
        call_each(
            "end the rank span",
            lambda: self._lookout.end(span, end.error),
            lambda: self._exporter.put_span(span),
        )

    @safely("tell what was recorded after the end")
    def tell_late(self) -> None:
        """What was recorded after this session was closed, and no other was opened, goes to its log all the same."""
        if self._records is not None:
            self._exporter.restart(self)
            self._gather_records(Deadline(EXPORT_SECONDS))
            self._close_records()
            self._exporter.close(CLOSE_SECONDS)

    def abandon(self) -> None:
        """In a forked child: the parent's session adopts no spans here."""
        self._parent.unregister()
        self._native.abandon()
        self._lookout.abandon()
        self._training.abandon()
        self.windows.abandon()
        self._sampler.abandon()
        if self._collectives is not None:
            self._collectives.abandon()

    def group_going(self) -> None:
        """The process group is about to be destroyed: the last time to ask it anything."""
        deadline = Deadline(CLOSE_SECONDS)
        if self._collectives is not None:
            self._collectives.look()
        self.leave_store(deadline)
        self._spent_going += CLOSE_SECONDS - deadline.left()

    def leave_store(self, deadline: Deadline) -> None:
        """Be done with the process group's store: no thread of ours may be in it when the group goes."""
        self._meeting.hurry()
        if self._store_left_by is None:
            self._store_left_by = Deadline(deadline.left(STORE_SECONDS))
        self._lookout.leave_store(self._store_left_by)
        join(self._store_thread, self._store_left_by.left())
        self._store = None

    @property
    def generated_id(self) -> str | None:
        """The job id that was made up because no launcher gave one."""
        said = self._introduced
        return said.job_id if said is not None and said.source == GENERATED else None

    def keep_signals(self) -> None:
        """Take back what asyncio's loops give up when they close, at most once a beat. Called where training steps,
        by who lets no error of ours out."""
        if self._beats != self._signals_kept_at and threading.current_thread() is threading.main_thread():
            self._signals_kept_at = self._beats
            self._handler.install()

    def learn(self, facts: Mapping[str, Fact]) -> None:
        """Add what was learnt after opening to the span and, as a further identity record, to the run log."""
        if not self.span.learn(facts):
            return
        self._native.hand_over()
        if self._introduced is not None:
            # Before the ranks have agreed, the log's first record is still to be written.
            self._exporter.put(self._identity())

    def meet_torch(self, torch: Any) -> None:
        """Torch was imported after the session was opened."""
        self.learn(runtime.torch_facts(torch))
        threading.Thread(target=self._find_device, name="ddtrace_pytorch.device", daemon=True).start()

    def _find_device(self) -> None:
        leave_signals_to_others()
        self._look_for_device()

    def learn_device(self, torch: Any) -> None:
        """What only torch knows of the GPU, read on the training thread once the user's code has initialised CUDA."""
        if not torch.cuda.is_initialized():
            return
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        # NVML takes tens of milliseconds, too long for the thread that trains.
        threading.Thread(
            target=self._know_cuda_device, args=(index, properties), name="ddtrace_pytorch.device", daemon=True
        ).start()

    @safely("name this rank's GPU")
    def _know_cuda_device(self, index: int, properties: Any) -> None:
        leave_signals_to_others()
        device = devices.find(index, os.environ.get("CUDA_VISIBLE_DEVICES")) or devices.Device("cuda", index)
        self._know_device(devices.with_torch_properties(device, properties))

    def _know_device(self, device: devices.Device) -> None:
        self._device = device
        for complaint in device.complaints:
            warn_once(complaint)
        self.learn(device.tags(self._host))

    def _meet(self) -> None:
        leave_signals_to_others()
        try:
            self._introduce()
            self._find_nodes()
        finally:
            self._meeting.leave()

    @safely("agree on ids with the other ranks")
    def _introduce(self) -> None:
        self._know(self._introduction.agree(meanwhile=self._look_for_device))
        self._exporter.wake()
        if self._introduced is not None:
            self._lookout.begin(self._whose_words(self._introduced))

    @safely("find which rank is on which node")
    def _find_nodes(self) -> None:
        member = self.member
        if member.rank and self._introduced is self._introduction.own:
            return  # rank 0, who would know, wasn't heard
        nodes = find_nodes(self._meeting, member.rank, member.world_size, this_node(self._host), os.environ)
        if nodes is None:
            return
        if self._collectives is not None:
            self._collectives.know(nodes)
        store, said = self._store, self._introduced
        if store is not None and said is not None:
            place = f"{self._job.restart_count}/{member.ordinal}/{said.incarnation}"
            self._lookout.know(nodes, store, place, member.rank)

    def _know(self, said: Introduced) -> None:
        if self._introduced is not None:
            return  # heard after the session had to go on without it
        self._introduced = said
        self.span.learn(describe.introduced_facts(said))
        self._native.hand_over()

    @safely("find this rank's device")
    def _look_for_device(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            return
        cuda_build = getattr(torch.version, "cuda", None) is not None
        local = self.member.device_index
        if local is None:
            local = place.local_rank_hint(os.environ)[0] or 0
        device = devices.find(local, os.environ.get("CUDA_VISIBLE_DEVICES")) if cuda_build else None
        self._know_device(device or devices.Device("cpu"))
        self.learn(runtime.cudnn_version(torch))

    def _run_ids(self) -> tuple[str, str] | None:
        said = self._introduced
        return None if said is None else (said.job_id, said.incarnation)

    def _whose_words(self, said: Introduced) -> Identity:
        return Identity(
            job=said.job_id,
            incarnation=said.incarnation,
            attempt=self._job.attempt,
            rank=self.member.rank,
            world_size=self.member.world_size,
            host=self._host,
            boot=places.BOOT,
            log_root=self._settings.log_root_if_any,
        )

    def _identity(self) -> dict[str, Any]:
        return describe.identity_record(
            self.member,
            self._job,
            self._introduced,
            self._device,
            self._host,
            self.span.facts(),
            self._clock,
            sys.modules.get("torch"),
            self._settings.log_ranks.text,
            self._settings.collectives,
            self._settings.source,
            dict(self._settings.log_metadata),
        )

    @safely("watch collectives")
    def _watch_collectives(self) -> None:
        if self._settings.collectives == "off" and (hooks.starts or hooks.ends or any(channels(self._settings))):
            warn_once("DD_PYTORCH_COLLECTIVES=off: collectives are neither marked nor told to hooks")
        if self._collectives is not None:
            self._collectives.open()
            self.learn({"pytorch.instrument": self._collectives.instrument.in_use})

    @safely("tell the last of the collectives")
    def _close_collectives(self, deadline: Deadline) -> None:
        if self._collectives is not None:
            self._collectives.close(deadline)
            self.span.learn({"pytorch.collective_calls": self._collectives.calls()})

    @safely("tell the last of the training")
    def _close_training(self) -> None:
        self._training.close(interrupted=self._end.is_error, over=self._end.reason != "replaced")
        self.span.learn({"pytorch.steps": self._training.count})

    def _beat(self) -> None:
        self._beats += 1
        self._handler.look()
        self._training.beat()
        self.windows.beat()
        self._sampler.beat()
        steps = self._training.count
        beat: dict[str, Any] = {"type": "beat", "ts": self._clock.now(), "seq": self._beats, "steps": steps}
        learnt: dict[str, Fact] = {"pytorch.steps": steps}
        if self._collectives is not None:
            self._collectives.beat()
            learnt["pytorch.collective_calls"] = beat["calls"] = self._collectives.calls()
        self.span.learn(learnt)
        if self._records is not None:
            self._records.beat()
        self._exporter.put(beat | self._lookout.beat())
        self._exporter.wake()

    def _is_looked_into(self, step: Step) -> bool:
        """Whether what the GPU did in a step is told, so that it gets a span. Both are to know of it."""
        profiled = self.windows.takes(step)
        sampled = self._sampler.takes(step)
        return profiled or sampled

    @safely("tell of checkpoints")
    def _tell_of_checkpoints(self, last: bool = False) -> None:
        if last:
            self.checkpoints.close()
        else:
            self.checkpoints.settle()

    def _summarise(self) -> None:
        self._tell_of_checkpoints()
        if self._collectives is not None:
            self._collectives.summarise()
        if self._records is not None:
            self._records.summarise()
        self._training.summarise()
        self._sampler.summarise()

    def rotate(self) -> None:
        ended = self.span.rotate(self._clock.now())
        # Before the piece that ended is sent: what a kernel's span is a child of is open.
        self._native.look()
        self._lookout.keep()
        self._training.rotated()
        self._exporter.put_span(ended)

    def snapshot(self) -> None:
        self._exporter.put_span(self.span.snapshot(self._clock.now()), logged=False)

    def _pace(self) -> Pace:
        return Pace(self._training.count, self._collectives.calls() if self._collectives is not None else 0)

    def _on_signals(self, heard: bytes) -> None:
        if signal.SIGTERM in heard:
            self._terminate()
        elif signal.SIGINT in heard and not self._closed:
            # Python says at its end neither what `sys.exit` was called with nor by whom.
            self._interrupted = self._pace()
            self._lookout.told_to_end(ends=False)
            self._exporter.wake()

    def _terminate(self) -> None:
        self._terminated = True
        if self._handler.nobody_else_wants_it():
            self._farewell()
        else:
            self._tell_before_the_end(interrupted=False)  # the user's handler may end the process
            self.snapshot()
            self._exporter.drain(FAREWELL_SECONDS)
        self._handler.answered()

    def _tell_before_the_end(self, interrupted: bool) -> None:
        if self._records is not None and interrupted:
            self._records.gather(Deadline(0))
        if self._collectives is not None:
            self._collectives.farewell()
        if not self._closed:  # what already ends by itself doesn't end because of the signal
            self._lookout.told_to_end(ends=interrupted)
        self._training.farewell(interrupted)
        if self._records is not None:
            self._records.summarise()
        self.span.learn({"pytorch.steps": self._training.count})

    def _farewell(self) -> None:
        with self._closing:
            if self._closed:
                self._handler.hold(signal.SIGTERM)
                return
            deadline = Deadline(FAREWELL_SECONDS)
            if self._introduced is None:
                # Nothing is written of a rank that has no job. One that lives on keeps this one for good.
                self._meeting.hurry()
                join(self._store_thread, deadline.left(STORE_SECONDS))
                self._know(self._introduction.own)
            self._tell_before_the_end(interrupted=True)
            self._finish(End("signal:SIGTERM"))
            # Still in here: a close that began meanwhile would end the exporter before the span is sent.
            if self._exporter.drain(deadline.left()):
                self._lookout.forget()
            die(signal.SIGTERM)
        # Still here: PID 1 of a container, which the kernel spares.
        self._terminated = False
        self.span.reopen(self._clock.now())
        self._native.resume()
        self._lookout.resume()
