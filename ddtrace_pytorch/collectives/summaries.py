"""The totals that are told once a minute and at the end, with what torch's flight recorder adds to them."""

from __future__ import annotations

import threading
from typing import Any

from ddtrace_pytorch.border import safely, warn_once
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives import coverage, telling
from ddtrace_pytorch.collectives.coverage import Coverage, Unseen, Window
from ddtrace_pytorch.collectives.flight_recorder import Dump, FlightRecorder
from ddtrace_pytorch.collectives.outlet import Outlet
from ddtrace_pytorch.collectives.readings import LOOK_SECONDS, Readings
from ddtrace_pytorch.collectives.telling import Totals
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.ledger import Cell, Group, Ledger
from ddtrace_pytorch.source_lines import place
from ddtrace_pytorch.spans import Fact
from ddtrace_pytorch.threads import leave_signals_to_others

# Of groups that are gone, so many wait for the next summary; of more, all but the last ones are told at once: in these
# somebody may still be.
GONE_HELD = 128
GONE_KEPT = 16


class Summaries:
    """Knows what was told before, so that each summary is of what came since."""

    def __init__(
        self, ledger: Ledger, readings: Readings, recorder: FlightRecorder, clock: Clock, outlet: Outlet
    ) -> None:
        self._ledger = ledger
        self._readings = readings
        self._recorder = recorder
        self._clock = clock
        self._outlet = outlet
        self._told: dict[Cell, Totals] = {}
        self._told_at = clock.now()
        self._recorder_thread: threading.Thread | None = None
        self._telling = threading.Lock()

    @safely("sum up the collectives")
    def tell(self, last: Deadline | None = None) -> None:
        """Tell the totals since the last time: one summary for each cell, and what was not seen of each group.

        Where the flight recorder has something to add, a thread asks it and tells when it has answered; the `last`
        time that is waited for, until then.
        """
        patience = LOOK_SECONDS if last is None else last.left(LOOK_SECONDS)
        if not self._telling.acquire(timeout=patience):
            return
        try:
            self._readings.look(patience)
            began, self._told_at = self._told_at, self._clock.now()
            summary = _Summary(self._outlet, began, self._told_at)
            for here in tuple(self._ledger.groups):
                self._tell_group(here, summary, last is not None)
            self._complete(summary, last)
        finally:
            self._telling.release()

    @safely("sum up the collectives of groups that are gone")
    def tell_of_gone(self) -> None:
        """The same, of groups that are gone alone, where there are many of them."""
        if len(self._gone()) <= GONE_HELD or not self._telling.acquire(timeout=LOOK_SECONDS):
            return
        try:
            summary = _Summary(self._outlet, self._told_at, self._clock.now())
            for here in self._gone()[:-GONE_KEPT]:
                self._tell_group(here, summary, last=False)
            self._complete(summary, None)
        finally:
            self._telling.release()

    def _gone(self) -> list[Group]:
        return [here for here in tuple(self._ledger.groups) if here.is_gone]

    def _tell_group(self, here: Group, summary: _Summary, last: bool) -> None:
        share, history = self._readings.coverage(here), self._readings.of(here)
        for cell in tuple(here.cells.values()):
            self._tell_cell(cell, summary, share)
        gone = here.is_gone
        if history is not None:
            summary.groups.append((here, history.backend, share, history.take(last or gone)))
        if gone:
            for cell in tuple(here.cells.values()):
                self._told.pop(cell, None)
            self._readings.forget(here)
            self._ledger.forget(here)

    def _tell_cell(self, cell: Cell, summary: _Summary, share: Coverage) -> None:
        now = telling.totals(cell)
        told = telling.difference(now, self._told.get(cell, Totals()))
        if not (told.calls or told.errors or told.waits):
            return
        self._told[cell] = now
        slowest, code, instruction = cell.take_slowest()
        at = place(code, instruction) if code is not None else None
        facts = telling.summary_facts(cell, told, slowest, at) | share.facts()
        buckets = {str(bucket): many for bucket, many in enumerate(told.buckets) if many}
        more = {"how": cell.how.value, "buckets": buckets}
        if _is_timed_by_recorder(cell):
            summary.timed.append((cell, facts, more))
        else:
            self._outlet.summary(cell.operation, summary.began, summary.ended, facts, more)

    def _complete(self, summary: _Summary, last: Deadline | None) -> None:
        asked = self._recorder_thread
        if asked is not None and last is not None:
            asked.join(last.left())
        if not summary.wants_recorder() or not self._recorder.exists or (asked is not None and asked.is_alive()):
            summary.publish(None)
            return

        def ask() -> None:
            if threading.current_thread() is not threading.main_thread():
                leave_signals_to_others()
            summary.publish(safely("read torch's flight recorder")(self._recorder.dump)())

        thread = threading.Thread(target=ask, name="ddtrace_pytorch.recorder", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are no more threads to be had, as at the end of the interpreter
            if last is not None:
                ask()
            summary.publish(None)
            return
        self._recorder_thread = thread
        if last is not None:
            thread.join(last.left())
            summary.publish(None)


class _Summary:
    """What of the time from `began` to `ended` is told once it is known what the flight recorder adds: how long the
    operations of some cells really took, and what was not seen of each group."""

    def __init__(self, outlet: Outlet, began: int, ended: int) -> None:
        self.began = began
        self.ended = ended
        self.timed: list[tuple[Cell, dict[str, Fact], dict[str, Any]]] = []
        self.groups: list[tuple[Group, str, Coverage, Window]] = []
        self._outlet = outlet
        self._published = False
        self._lock = threading.Lock()

    def wants_recorder(self) -> bool:
        return bool(self.timed) or any(window.calls for *_, window in self.groups)

    @safely("tell what was not seen of the collectives")
    def publish(self, dump: Dump | None) -> None:
        """Tell it, with what `dump` adds (None: there is no recorder, or it didn't answer). Only once."""
        with self._lock:
            if self._published:
                return
            self._published = True
        for cell, facts, more in self.timed:
            completions = dump and coverage.completions(cell.group.name, dump.entries, self.began, self.ended)
            timed = completions.get(cell.operation) if completions else None
            self._put(cell.operation, facts | (timed.facts() if timed is not None else {}), more)
        for here, backend, share, window in self.groups:
            if window.calls:
                self._tell_unseen(here, share, window, dump, off=dump is not None and backend in dump.off)

    def _tell_unseen(self, here: Group, share: Coverage, window: Window, dump: Dump | None, off: bool) -> None:
        if off:
            warn_once(
                "torch's flight recorder is off, because TORCH_FR_BUFFER_SIZE (or TORCH_NCCL_TRACE_BUFFER_SIZE) is 0 "
                "or was not set before the first process group: of the collectives that torch itself launches, as "
                "DistributedDataParallel does, only the number is known"
            )
        unseen = coverage.attribute(here, window, dump) if dump is not None else [Unseen(None, window.calls, 0, 0)]
        for one in unseen:
            facts: dict[str, Fact] = {
                **telling.group_facts(here),
                **share.facts(),
                "collective.op": "unseen",
                "collective.count": one.calls,
                "collective.sized": one.sized,
            }
            if off:
                facts["collective.coverage"] = "unknown"
            if one.name is not None:
                facts["collective.recorded_as"] = one.name
            if one.sized:
                facts["collective.bytes"] = one.bytes
            self._put("unseen", facts, {})

    def _put(self, resource: str, facts: dict[str, Fact], more: dict[str, Any]) -> None:
        self._outlet.summary(resource, self.began, self.ended, facts, more)


def _is_timed_by_recorder(cell: Cell) -> bool:
    return "nccl" in cell.group.backend
