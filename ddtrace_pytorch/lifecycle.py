"""When sessions open and close: process groups made, failed and destroyed, a first optimizer step, exit, fork."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.collectives.group_lives import GroupLives
from ddtrace_pytorch.compiler import leave_package_uncompiled
from ddtrace_pytorch.identity import mesh
from ddtrace_pytorch.kernels.profilers import Profilers
from ddtrace_pytorch.records import switch
from ddtrace_pytorch.runlog.left_behind import LeftBehind
from ddtrace_pytorch.spans import End
from ddtrace_pytorch.termination import Handler
from ddtrace_pytorch.threads import on_main_thread
from ddtrace_pytorch.training.checkpoint import is_savers_process
from ddtrace_pytorch.training.dataloader import Loaders
from ddtrace_pytorch.training.frameworks import Makeup, Use
from ddtrace_pytorch.training.progress import Progress
from ddtrace_pytorch.training.steps import Steps

if TYPE_CHECKING:
    from ddtrace_pytorch.identity.describe import Member
    from ddtrace_pytorch.records.before import Before
    from ddtrace_pytorch.records.recorder import Recorder
    from ddtrace_pytorch.session import Session


class Lifecycle:
    """The session of this process, if there is one; every method may be called from user code and never raises."""

    def __init__(self) -> None:
        self.current: Session | None = None
        self.instrument = "in_place"
        self.lives = GroupLives()
        self.progress = Progress()
        self.steps = Steps(self.progress, self._first_stepped, self._stepped)
        self.loaders = Loaders()
        self.profilers = Profilers()
        self._left_behind = LeftBehind()
        # Of the session that is open, or of the next: a trainer, for one, is made before its process group.
        self._makeup = Makeup()
        self._learning = threading.RLock()
        # Made when they are first needed: most processes record nothing, and all of them are patched.
        self._before: Before | None = None
        self._recorder: Recorder | None = None
        self._ended: Session | None = None
        self._of_parent: tuple[Session | None, ...] = ()
        self._groups = 0
        self._generated_id: str | None = None
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._last_error = getattr(sys, "last_value", None)
        self._hears_multiprocessing = False
        self._attending = threading.Lock()
        self._forking = threading.local()
        self._handler = Handler()
        on_main_thread(self._handler.install)

    def rendezvous(self) -> contextlib.AbstractContextManager[None]:
        """Around the making of a process group, which may wait for its peers for minutes."""
        return self._handler.stand_aside()

    @safely("open a session for the process group")
    def group_made(self, distributed: Any) -> None:
        """A default process group is up."""
        from ddtrace_pytorch import opening

        member = opening.member_of_group(distributed, self._groups, self._generated_id)
        self._groups += 1
        self._open(member)
        self.used(Use(places=tuple(mesh.of_groups(distributed))))

    @safely("record the failed process group")
    def group_failed(self, distributed: Any, error: BaseException, arguments: Mapping[str, Any]) -> None:
        """`init_process_group` raised: a span with the error, as much of this rank's place as is known, and the end."""
        if distributed.is_initialized():
            return  # a second init over a living group: that group's session goes on
        from ddtrace_pytorch import opening

        session = self._open(opening.member_of_failed_group(arguments, self._groups, self._generated_id))
        if session is not None:
            session.learn(opening.rendezvous_facts(arguments))
            self.close(End("exception", error))

    @safely("prepare for the end of the process group")
    def group_going(self) -> None:
        """The default group is about to be destroyed, and its store with it."""
        if self.current is not None:
            self.current.group_going()

    @safely("close the session")
    def close(self, end: End) -> None:
        with self._lock:
            session, self.current = self.current, None
        if session is not None:
            self._makeup = Makeup()
            session.close(end)
            self._generated_id = session.generated_id
            self.loaders.begin_anew()
            self._ended = session

    @safely("follow the first optimizer step")
    def _first_stepped(self) -> None:
        if self.current is None and self._groups == 0:
            self._open()
        if self.current is not None:
            self.current.learn_device(sys.modules["torch"])

    def _stepped(self) -> None:
        if self.current is not None:
            self.current.keep_signals()
        if switch.recorder is not None:
            switch.recorder.on_gpu.look(switch.recorder)

    @safely("tag what the training is parallelised with")
    def used(self, use: Use) -> None:
        """A framework was put to use, or a mesh made."""
        with self._learning:
            if self._makeup.add(use):
                self._tell_makeup()

    def _tell_makeup(self) -> None:
        if self.current is not None:
            self.current.learn(self._makeup.facts())

    @safely("tag the data loader's workers")
    def loader_starts(self, loader: Any) -> None:
        """`loader`, a DataLoader, is about to be iterated."""
        if self.loaders.iterates(loader) and self.current is not None:
            self.current.learn(self.loaders.facts)

    def at_exit(self) -> None:
        """The interpreter (or a multiprocessing child) ends: by itself, by SystemExit or by an exception."""
        self._tell_what_waits()
        self.close(_how_it_ends(self._last_error))

    def end(self) -> None:
        """Close the session and give everything back."""
        self._tell_what_waits()
        self.close(End("unpatched"))
        switch.recorder, switch.wake = None, switch.nobody
        on_main_thread(self._handler.remove)

    def before_fork(self) -> None:
        """No SIGTERM between the fork and :meth:`after_fork_in_child`: the child would write it into the pipe that it
        still shares with its parent, and the parent would die of it."""
        if self.current is not None:
            self.current.windows.cut("the process forked")
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork(self) -> None:
        mask = self._forking.__dict__.pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def after_fork_in_child(self) -> None:
        """The child has no session, whatever its parent has; it may open one of its own."""
        session, self.current = self.current, None
        heard = session is None and self._ended is None
        # Kept: what they have open, a store's connection or what waits to be written, is not the child's to close.
        self._of_parent += (session, self._ended)
        self._ended = None
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._learning = threading.RLock()
        self._attending = threading.Lock()
        self._groups = 0
        self._hears_multiprocessing = False
        self.steps.begin_anew()
        self.loaders.begin_anew()
        safely("record nothing of the parent's")(self._record_anew)(heard)
        if session is not None:
            self._makeup = Makeup()
            safely("leave the parent's session")(session.abandon)()
        safely("hear signals")(self._handler.renew)()
        self.after_fork()

    def _open(self, member: Member | None = None) -> Session | None:
        from ddtrace_pytorch import opening

        if is_savers_process():
            return None
        # Ranks may be threads of one process: each session takes the place of the one before, and none is forgotten.
        with self._opening:
            self.close(End("replaced"))
            # Only a group's ranks are known to train before they do.
            self.steps.begin_anew(1 if member is not None and member.store is not None else None)
            recorder = self._recorder = self._recorder or self._new_recorder()
            session = self.current = opening.open_session(
                member,
                self.instrument,
                self._handler,
                self.lives,
                self.steps,
                self.profilers,
                recorder,
                self._left_behind,
            )
        # A process whose records weren't heard, because it was forked from one with a session, has one of its own now.
        switch.recorder = recorder if session is not None else None
        if session is None and self._ended is not None:
            opening.say_if_ddtrace_is_off()
        if session is not None:
            session.learn(self.loaders.facts)
            with self._learning:
                self._tell_makeup()
            self._ended = None
            self._hear_multiprocessing()
        return session

    def record(self) -> None:
        """The user's records are taken from now on, with a session or without."""
        switch.find_compiler()
        switch.wake = self._wake
        if "ddtrace_pytorch.api" in sys.modules:
            self._wake()

    @safely("go on with torch")
    def meet_torch(self, torch: Any) -> None:
        """Torch was imported after :meth:`record`."""
        switch.find_compiler()
        leave_package_uncompiled()
        if self.current is not None:
            self.current.meet_torch(torch)

    @safely("take the user's records")
    def _wake(self) -> None:
        """The functions that record are there, and perhaps about to be called."""
        leave_package_uncompiled()
        switch.recorder = self._recorder = self._recorder or self._new_recorder()

    def _new_recorder(self) -> Recorder | None:
        from ddtrace_pytorch.settings import load

        settings = load()
        if not (settings.records and settings.trace_enabled and settings.export != "none"):
            return None
        from ddtrace_pytorch.records.recorder import Recorder

        return Recorder(self.progress, settings.step_sample, self.steps.set, self._recorded)

    def _record_anew(self, heard: bool) -> None:
        """In a forked child: what the parent recorded is the parent's. Unless they are `heard`, the child's records are
        nobody's, until it opens a session of its own."""
        user_span = sys.modules.get("ddtrace_pytorch.records.user_span")
        if user_span is not None:
            user_span.leave_all()
        self._before = self._recorder = switch.recorder = None
        switch.wake = self._wake if heard else switch.nobody
        if heard and user_span is not None:
            self._wake()

    @safely("open a session for what is recorded")
    def _recorded(self) -> None:
        """The user has recorded something, and there is no session."""
        from ddtrace_pytorch.records import before
        from ddtrace_pytorch.settings import load

        if self.current is not None or self._ended is not None or self._attending.locked():
            return
        # By `with`: a signal's handler that raises between a lock's taking and a `try` would leave it locked.
        with self._attending:
            if self.current is not None:
                return
            if before.works_for_a_loader():
                switch.recorder = None
                return
            self._hear_multiprocessing()
            self._before = self._before or before.Before(load().source)
            if self._before.is_over(os.environ):
                self._open_alone()

    @safely("tell what was recorded without a session")
    def _tell_what_waits(self) -> None:
        recorder = self._recorder
        if self.current is not None or recorder is None or switch.recorder is None:
            return
        from ddtrace_pytorch.records import before

        if before.works_for_a_loader():
            return
        recorder.on_gpu.look(recorder)
        if recorder.waiting and self._ended is not None:
            self._ended.tell_late()
        elif recorder.waiting:
            self._open_alone()

    def _open_alone(self) -> None:
        from ddtrace_pytorch import opening
        from ddtrace_pytorch.records import before

        several = before.launched_beside_others(os.environ)
        self._open(opening.member_by_environment(self._groups, self._generated_id) if several else None)

    def _hear_multiprocessing(self) -> None:
        # A child that multiprocessing forked ends in os._exit: atexit never runs there, its finalizers do.
        if not self._hears_multiprocessing and multiprocessing.parent_process() is not None:
            self._hears_multiprocessing = True
            multiprocessing.util.Finalize(None, self.at_exit, exitpriority=100)


def _how_it_ends(seen_before: BaseException | None) -> End:
    # The interpreter keeps the exception that ended the main thread; in a multiprocessing child it is still on its
    # way when the exit functions run.
    uncaught = getattr(sys, "last_value", None)
    if uncaught is None or uncaught is seen_before:
        uncaught = sys.exc_info()[1]
    if isinstance(uncaught, SystemExit):
        # multiprocessing reports a child's exception and then leaves by sys.exit(1).
        uncaught = uncaught.__context__ if uncaught.code not in (None, 0) else None
    return End("exit") if uncaught is None else End("exception", uncaught)
