"""The writer thread: everything of a session that leaves the process goes through here.

It asks whether an Agent answers, hands spans to ddtrace, and appends to the run log. Producers only put into two
bounded queues; what does not fit is counted.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch import agent
from ddtrace_pytorch.border import log, safely, warn_once
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.handlers import Handlers
from ddtrace_pytorch.runlog.left_behind import Left
from ddtrace_pytorch.runlog.writer import MIB, LogUnusable, Record, RunLogFile, RunLogQueue, RunLogWriter, log_directory
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.threads import join, leave_signals_to_others

ASK_AGAIN_SECONDS = 60.0
FRESH_SECONDS = 1.0
# ddtrace's writer sends once a second, and tries some times.
ON_THEIR_WAY_SECONDS = 5.0
SPANS_HELD = 1_000
# On their way to an Agent that answers; more than that only while the writer is held up.
SPANS_QUEUED = 16_384

# One span that a user's trace filter chokes on must not keep the others.
_send = safely("send a span to the Agent")(agent.send)


class Exporter:
    """Owns the writer thread, the run log and our side of ddtrace's writer, for one session."""

    def __init__(
        self,
        settings: Settings,
        rank: int,
        clock: Clock,
        identity: Callable[[], dict[str, Any]],
        run: Callable[[], tuple[str, str] | None],
        left: Left | None = None,
    ) -> None:
        """`identity` gives the run log's first record; `run` the job id and incarnation that name its directory,
        None while the ranks have not agreed on them. `look` is called with that directory each time the log is
        written; a session sets it. `left`: what earlier ones of this process have left."""
        self.look: Callable[[str], object] = lambda directory: None
        self._settings = settings
        self._rank = rank
        self._clock = clock
        self._identity = identity
        self._run_ids = run
        self._left = left or Left()
        self._records = RunLogQueue()
        self._spans: deque[SpanRecord] = deque()
        self._spans_lost = 0
        # When each was handed over, of the last ones; and how many were on their way as no Agent answered any more.
        self._handed_over: deque[float] = deque(maxlen=SPANS_QUEUED)
        self._spans_in_doubt = 0
        self._agent_answers: bool | None = None
        self._asked_at = 0.0
        self._refusals = 0
        self._log: RunLogWriter | None = None
        self._log_refused = False
        self._directory = ""
        self._wake = threading.Event()
        self._drains: deque[threading.Event] = deque()
        self._closing = False
        self._ended = False
        self._handlers: Handlers | None = None
        if settings.log_handlers:
            self._handlers = Handlers(settings.log_handlers, clock, identity, lambda: run() is not None)
        self._thread: threading.Thread | None = None

    def start(self, whose: object = None) -> None:
        """`whose`: of what `identity` and `run` are. They may not keep it, but the thread does, to its end: an Agent or
        a disk may hold that up until long after :meth:`close`."""
        thread = threading.Thread(target=self._run, args=(whose,), name="ddtrace_pytorch.writer", daemon=True)
        thread.start()
        self._thread = thread
        if self._handlers is not None:
            self._handlers.start(whose)

    def restart(self, whose: object = None) -> None:
        """After :meth:`close`: take more of the same session. Where the thread has not ended yet, this does nothing."""
        if not self._is_running():
            self._closing = self._ended = False
            self._spans_lost = self._spans_in_doubt = 0
            self.start(whose)

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def put(self, record: Record) -> None:
        """Queue one run-log record, or the line that it is there; never blocks, never raises."""
        self._records.put(record)
        if self._handlers is not None:
            self._handlers.put(record)

    def count_lost(self, reason: str, records: int) -> None:
        """Have `records` told as dropped, in the run log and to the handlers; never blocks, never raises."""
        self._records.count_lost(reason, records)
        if self._handlers is not None:
            self._handlers.count_lost(reason, records)

    def put_span(self, span: SpanRecord, logged: bool = True) -> None:
        """Queue one span for the Agent and, unless it is told there otherwise or not at all, for the run log."""
        if self._settings.to_agent:
            if len(self._spans) < SPANS_QUEUED:
                self._spans.append(span)
            else:
                self._spans_lost += 1
        if logged:
            self.put(span.as_log_record())
        self.wake()

    def wake(self) -> None:
        self._wake.set()
        if self._handlers is not None:
            self._handlers.wake()

    def drain(self, timeout: float) -> bool:
        """Send and write all that is queued, flush ddtrace's writer; whether it was done within `timeout` seconds."""
        done = threading.Event()
        self._drains.append(done)
        if self._ended:
            done.set()
        self.wake()
        deadline = Deadline(timeout)
        in_time = done.wait(timeout)
        if self._handlers is not None:
            self._handlers.drain(deadline.left())
        return in_time

    def close(self, timeout: float) -> bool:
        """Drain and end the thread; whether it ended within `timeout` seconds."""
        deadline = Deadline(timeout)
        self._closing = True
        if self._handlers is not None:
            self._handlers.stop()
        self.wake()
        if self._thread is not None:
            join(self._thread, deadline.left())
        if self._handlers is not None:
            self._handlers.join(deadline)
        return not self._is_running()

    def _run(self, _whose: object) -> None:
        leave_signals_to_others()
        last = False
        while not last:
            self._wake.wait()
            self._wake.clear()
            # Before the queues are looked into: what was put before `close` is in this look.
            last = self._closing
            waiting = len(self._drains)
            self._work(thoroughly=last or waiting > 0)
            self._release(waiting)
        self._finish()
        # Before the last are released: a drain that comes after that finds it set.
        self._ended = True
        self._release(len(self._drains))

    def _release(self, drains: int) -> None:
        for _ in range(drains):
            self._drains.popleft().set()

    @safely("export what was recorded")
    def _work(self, thoroughly: bool) -> None:
        self._ask(FRESH_SECONDS if thoroughly else ASK_AGAIN_SECONDS)
        while self._agent_answers and self._spans:
            _send(self._spans.popleft())
            self._handed_over.append(time.monotonic())
        while len(self._spans) > SPANS_HELD:
            self._spans.popleft()
            self._spans_lost += 1
        # Before the log: a full or frozen disk must not keep the Agent waiting.
        if thoroughly and self._agent_answers:
            agent.flush()
        self._write_log()

    @safely("end the export")
    def _finish(self) -> None:
        """Nobody looks into the queues any more: what came during the last look is written, or else counted."""
        lost = self._spans_lost + len(self._spans)
        if self._log is not None:
            self._log.close()
        elif lost:
            why = "the session was ending" if self._agent_answers else f"no Agent answers at {agent.url()}"
            warn_once(f"{lost:,} {'span was' if lost == 1 else 'spans were'} not sent: {why}")
        if self._spans_in_doubt:
            warn_once(
                f"of spans for the Agent, {self._spans_in_doubt:,} may be lost: they were on their way as it failed"
            )

    def _ask(self, older_than: float) -> None:
        if not self._settings.to_agent:
            return
        # One that was only slow to answer is asked again soon.
        if self._agent_answers is False:
            older_than = min(older_than, FRESH_SECONDS * 2 ** min(self._refusals - 1, 10))
        if self._agent_answers is None or time.monotonic() - self._asked_at >= older_than:
            self._agent_answers = agent.answers()
            self._asked_at = now = time.monotonic()
            self._refusals = 0 if self._agent_answers else self._refusals + 1
            if not self._agent_answers:
                self._spans_in_doubt += sum(then > now - ON_THEIR_WAY_SECONDS for then in self._handed_over)
                self._handed_over.clear()

    def _write_log(self) -> None:
        if self._log is None and self._log_wanted():
            self._log = self._open_log()
            if self._log is None and not self._log_refused:
                return  # the ranks have not agreed yet: what was recorded stays in the queue
        if self._log is None:
            self._records.take()
            self._records.take_drops()
        else:
            self._log.flush()
            self.look(self._directory)

    def _log_wanted(self) -> bool:
        if self._log_refused or self._rank not in self._settings.log_ranks:
            return False
        return self._settings.to_log(bool(self._agent_answers))

    def _open_log(self) -> RunLogWriter | None:
        run = self._run_ids()
        if run is None:
            return None
        settings = self._settings
        # In full: whoever reads it where it is announced may be in another directory than the job.
        directory = os.path.abspath(log_directory(settings.log_root, *run))
        file = RunLogFile(
            directory,
            self._rank,
            self._identity,
            int(settings.log_max_mb * MIB),
            guarded=None if settings.log_dir else settings.log_root,
            clock=self._clock.now,
            left=self._left.segments,
        )
        try:
            file.open()
        except LogUnusable as reason:
            self._log_refused = True
            warn_once(f"no run log: {reason}")
            return None
        if settings.export == "auto" and not self._agent_answers and self._rank == settings.log_ranks.first:
            self._announce(directory)
        self._directory = directory
        return RunLogWriter(file, self._records)

    @safely("say where the run log is")
    def _announce(self, directory: str) -> None:
        line = f"no Datadog Agent answers at {agent.url()}; to read the run log: ddtrace-pytorch report {directory}"
        if log.isEnabledFor(logging.INFO):
            log.info(line)
        else:
            # Where logging is not set up nobody would ever learn of the directory: one line, from one rank.
            sys.stderr.write(f"INFO ddtrace_pytorch: {line}\n")
