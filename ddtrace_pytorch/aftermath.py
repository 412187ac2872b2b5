"""Tells of a rank that could not tell it itself: sends its finished span, and adds it to its run log."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.runlog.appendix import append, find_log
from ddtrace_pytorch.runlog.reader import RankLog
from ddtrace_pytorch.runlog.writer import log_directory, private_root
from ddtrace_pytorch.settings import Settings, default_log_root
from ddtrace_pytorch.stalls.last_words import KILLED, LastWords
from ddtrace_pytorch.stalls.recovery import recover
from ddtrace_pytorch.threads import leave_signals_to_others
from ddtrace_pytorch.weakly import weakly

# What other jobs left is not this one's to tell. After that time nobody waits for it, and it is cleared away.
FORGOTTEN_NS = 7 * 24 * 3600 * 10**9


class Teller:
    """Call it with the last words of a dead rank; it gives whether anybody took them: the Agent, or the run log."""

    def __init__(self, settings: Settings, logs: str | None = None) -> None:
        """Run logs are looked for in `logs`, at any depth, or else where the rank itself had its own."""
        self._to_agent = settings.to_agent
        self._logs = logs

    def __call__(self, words: LastWords) -> bool:
        sent = self._to_agent and self._send(words)
        return bool(self._add(words)) or bool(sent)

    @safely("send the span of a rank that is gone")
    def _send(self, words: LastWords) -> bool:
        from ddtrace_pytorch import agent  # and with it ddtrace, which most commands that look for ranks don't need

        if not agent.answers():
            return False
        agent.send(words.finished_span())
        agent.flush()
        return True

    @safely("add to the run log of a rank that is gone")
    def _add(self, words: LastWords) -> bool:
        log = self._log(words)
        if log is None:
            return False
        state = {"type": "state", "ts": words.state.as_of, "why": KILLED, "state": words.state.plain()}
        append(log, [*([] if words.ended else [state]), words.finished_span().as_log_record()])
        return True

    def _log(self, words: LastWords) -> RankLog | None:
        said = words.identity
        who = (said.job, said.incarnation, said.rank, said.host, words.state.pid)
        found = find_log(self._logs, *who) if self._logs is not None else None
        if found is not None or not said.log_root:
            return found
        if said.log_root == default_log_root():
            private_root(said.log_root)
        return find_log(log_directory(said.log_root, said.job, said.incarnation), *who)


class Successor:
    """Tells, on a thread of its own, what earlier attempts of this job left on this host."""

    def __init__(self, settings: Settings, roots: Sequence[str]) -> None:
        self._roots = roots
        self._teller = Teller(settings)
        self._job = self._incarnation = ""
        self._leaving = False
        self._thread = threading.Thread(target=weakly(self._run), name="ddtrace_pytorch.recovery", daemon=True)

    def begin(self, job: str, incarnation: str) -> None:
        """The ids of the attempt that this process belongs to."""
        self._job, self._incarnation = job, incarnation
        self._thread.start()

    def leave(self, timeout: float) -> None:
        """Take up no further rank; wait at most `timeout` seconds for the one that is being told."""
        self._leaving = True
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @safely("tell of the ranks that died before")
    def _run(self) -> None:
        leave_signals_to_others()
        for _ in recover(self._roots, self._tell, self._wants):
            if self._leaving:
                return

    def _wants(self, words: LastWords) -> bool:
        if words.identity.job == self._job:
            return words.identity.incarnation != self._incarnation
        return words.state.as_of < time.time_ns() - FORGOTTEN_NS

    def _tell(self, words: LastWords) -> bool:
        return words.identity.job != self._job or self._teller(words)
