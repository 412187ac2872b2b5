"""Collectives of one session: the ledger, the instrumented functions, and what is told of them and when.

The training threads only add to the ledger. What is here runs on the Pulse, while the session opens and closes (also
on the thread that destroys a group, which is the last that can ask it anything), and, for what the flight recorder
adds, on a thread of its own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.border import safely, warn_once
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives import coverage, telling
from ddtrace_pytorch.collectives.callbacks import Callbacks
from ddtrace_pytorch.collectives.composites import Composite
from ddtrace_pytorch.collectives.coverage import Coverage, History, Reading, Unseen, Window
from ddtrace_pytorch.collectives.flight_recorder import Dump, FlightRecorder
from ddtrace_pytorch.collectives.groups import TorchGroups, launched
from ddtrace_pytorch.collectives.instrument import Instrument
from ddtrace_pytorch.collectives.markers import markers
from ddtrace_pytorch.collectives.telling import Totals
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.identity.topology import Nodes
from ddtrace_pytorch.ledger import Cell, Group, Ledger
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.spans import Fact, SpanRecord, split
from ddtrace_pytorch.threads import leave_signals_to_others

MILLISECOND = 1_000_000
# In between, a thread that was about to count a call does so.
MOMENT_SECONDS = 0.001
# How long a look waits for another one to end.
LOOK_SECONDS = 0.5
# At the end of a session: for what the flight recorder has to say.
LAST_DUMP_SECONDS = 0.8
# The same, between a SIGTERM and its being raised again.
FAREWELL_SECONDS = 0.3


class Collectives:
    """What this rank says to the others, from :meth:`open` to :meth:`close`."""

    def __init__(
        self, torch: Any, settings: Settings, clock: Clock, span: RankSpan, exporter: Exporter, wraps: bool
    ) -> None:
        self._clock = clock
        self._span = span
        self._exporter = exporter
        self._service = settings.service
        self._groups = TorchGroups(torch.distributed)
        self.ledger = Ledger(self._groups, round(settings.slow_ms * MILLISECOND), _each(settings.collectives))
        self.instrument = Instrument(torch, self.ledger, self._groups, settings.instrument, wraps)
        self._markers = safely("mark collectives")(markers)(settings, torch, self._node_of)
        placeholder = getattr(torch.distributed.distributed_c10d, "_IllegalWork", ())
        self._callbacks = Callbacks(self.instrument, clock, placeholder)
        self._told: dict[Cell, Totals] = {}
        self._told_at = clock.now()
        self._recorder = FlightRecorder(torch._C._distributed_c10d)
        self._recorder_thread: threading.Thread | None = None
        self._histories: dict[Group, History] = {}
        self._looking = threading.Lock()
        self._telling = threading.Lock()
        self._random = random.SystemRandom()

    def open(self) -> None:
        self.instrument.install()
        if self._markers is not None:
            self.instrument.listen(self._markers)
        safely("call the hooks of collectives")(self._callbacks.open)()

    def calls(self) -> int:
        """Collectives that were seen so far, over all groups."""
        return self.ledger.calls()

    def know(self, nodes: Nodes) -> None:
        """Which rank is on which node, of the default group's."""
        self._groups.nodes = nodes
        self._place_groups()

    def _place_groups(self) -> None:
        for here in tuple(self.ledger.groups):
            if here.crosses_nodes is not None:
                continue
            alive = here.process_group and here.process_group()
            if alive is not None:
                here.crosses_nodes = self._groups.crosses_nodes(alive)
                # In the mode that asks for them, its calls are told of from now on.
                for cell in tuple(here.cells.values()):
                    cell.find_slow()

    def beat(self) -> None:
        """Once a second: tell of the calls that are told of one by one."""
        # Again, for a group that was met in the very moment in which the nodes became known.
        self._place_groups()
        self.look()
        self.ledger.beat()
        monotonic = self._clock.from_monotonic
        for cell, key, started, took, size in self.ledger.take_samples():
            self._exporter.put(
                {
                    "type": "call",
                    "ts": monotonic(started + took),
                    "op": cell.operation,
                    "group": cell.group.name,
                    "key": key,
                    "start": monotonic(started),
                    "duration": took,
                    "bytes": size,
                    "source": telling.time_source(cell.how, cell.group.backend),
                }
            )
        notes, lost = self.ledger.take_notes()
        for note in notes:
            start = monotonic(note.started)
            facts = telling.call_facts(note)
            self._exporter.put_span(self._record(telling.CALL, note.cell.operation, start, note.took, facts))
        if lost:
            self._exporter.put(
                {"type": "drop", "ts": self._clock.now(), "reason": "too many calls", "count": lost, "bytes": 0}
            )

    @safely("look at the process groups")
    def look(self) -> None:
        """Read torch's own counts, while the groups are still there."""
        # Not for long: a signal handler may come here while its own thread is here already.
        if not self._looking.acquire(timeout=LOOK_SECONDS):
            return
        try:
            self._meet_groups()
            first = self._readings()
            time.sleep(MOMENT_SECONDS)
            for here, second in self._readings().items():
                self._histories[here].add(first.get(here, second), second)
        finally:
            self._looking.release()

    def _meet_groups(self) -> None:
        # A method of its own, so that no local variable keeps a group alive that is being destroyed.
        for process_group in self._groups.all():
            self.ledger.group(process_group)

    def _readings(self) -> dict[Group, Reading]:
        found = {}
        for here in tuple(self.ledger.groups):
            alive = here.process_group() if here.process_group is not None else None
            if alive is None:
                continue
            history = self._histories.get(here)
            if history is None:
                # Not what the user called it: where no backend was named torch says "undefined".
                history = self._histories[here] = History(str(alive.name()).lower(), here.launched_before)
            # The number first, and what is under way before what was counted: so no call is taken for an unseen one.
            number = launched(alive)
            del alive
            under_way = self._under_way(here, history.backend)
            found[here] = coverage.reading(here, history.backend, number, history.before, under_way)
        return found

    def _under_way(self, here: Group, backend: str) -> int:
        many = 0
        for slot in self.instrument.in_flight.taken():
            call = slot.call
            if isinstance(call, Composite):
                # Of a coalescing block the group isn't known yet, nor whether it is counted as one; a transfer of
                # objects is two.
                many += max(2, call.many) if call.cell is None or call.cell.group is here else 0
            elif call is not None and call.group is here:
                many += coverage.under_way(call.operation, here, backend)
        return many

    @safely("sum up the collectives")
    def summarise(self, last: bool = False, patience: float = LAST_DUMP_SECONDS) -> None:
        """Tell the totals since the last time: one summary for each cell, and what was not seen of each group.

        Where the flight recorder has something to add, a thread asks it and tells when it has answered; the `last`
        time that is waited for, for about `patience` seconds.
        """
        if not self._telling.acquire(timeout=LOOK_SECONDS):
            return
        try:
            self.look()
            began, self._told_at = self._told_at, self._clock.now()
            summary = _Summary(self, began, self._told_at)
            for here in tuple(self.ledger.groups):
                history = self._histories.get(here)
                read = history.latest if history is not None else None
                share = read.coverage() if read is not None else Coverage(None, here.calls)
                for cell in tuple(here.cells.values()):
                    self._tell(cell, summary, share)
                gone = here.process_group is not None and here.process_group() is None
                if history is not None:
                    summary.groups.append((here, history.backend, share, history.take(last or gone)))
                if gone:
                    self.ledger.forget(here)
                    for cell in tuple(here.cells.values()):
                        self._told.pop(cell, None)
                    self._histories.pop(here, None)
            self._complete(summary, last, patience)
        finally:
            self._telling.release()

    def _complete(self, summary: _Summary, last: bool, patience: float) -> None:
        asked = self._recorder_thread
        if asked is not None and last:
            asked.join(patience)
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
            if last:
                ask()
            summary.publish(None)
            return
        self._recorder_thread = thread
        if last:
            thread.join(patience)
            summary.publish(None)

    @safely("tell of the collectives before the end")
    def farewell(self) -> None:
        """The process may be about to die: tell what there is. Nobody is asked anything that may take long."""
        self.beat()
        self.summarise(last=True, patience=FAREWELL_SECONDS)

    def close(self) -> None:
        """Give torch its functions back and tell what is left."""
        self._callbacks.close()
        self.instrument.remove()
        self.ledger.close()
        self.beat()
        self.summarise(last=True)

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's is counted here."""
        self._callbacks.abandon()
        self.instrument.remove()
        self.ledger.close()

    def _node_of(self, rank: int) -> str | None:
        nodes = self._groups.nodes
        return None if nodes is None else nodes.of(rank)

    def _tell(self, cell: Cell, summary: _Summary, share: Coverage) -> None:
        now = telling.totals(cell)
        told = telling.difference(now, self._told.get(cell, Totals()))
        if not (told.calls or told.errors or told.waits):
            return
        self._told[cell] = now
        slowest, code, instruction = cell.take_slowest()
        at = telling.place(code, instruction) if code is not None else None
        facts = telling.summary_facts(cell, told, slowest, at) | share.facts()
        buckets = {str(bucket): many for bucket, many in enumerate(told.buckets) if many}
        more = {"how": cell.how.value, "buckets": buckets}
        if _is_timed_by_recorder(cell):
            summary.timed.append((cell, facts, more))
        else:
            self.publish(cell.operation, summary.began, summary.ended, facts, more)

    def publish(self, resource: str, began: int, ended: int, facts: dict[str, Fact], more: dict[str, Any]) -> None:
        """One summary, to the Agent and into the run log."""
        record = self._record(telling.SUMMARY, resource, began, ended - began, facts)
        self._exporter.put_span(record, logged=False)
        self._exporter.put(
            {
                "type": "summary",
                "ts": ended,
                "name": telling.SUMMARY,
                "resource": resource,
                "start": began,
                "tags": dict(record.tags),
                "metrics": dict(record.metrics),
                **more,
            }
        )

    def _record(self, name: str, resource: str, start: int, duration: int, facts: dict[str, Fact]) -> SpanRecord:
        piece = self._span.piece
        tags, metrics = split({"component": "pytorch", **facts})
        return SpanRecord(
            name=name,
            resource=resource,
            service=self._service,
            trace_id=piece.trace_id,
            span_id=self._random.getrandbits(63) | 1,
            parent_id=piece.span_id,
            start=start,
            duration=duration,
            tags=tags,
            metrics=metrics,
        )


class _Summary:
    """What of the time from `began` to `ended` is told once it is known what the flight recorder adds: how long the
    operations of some cells really took, and what was not seen of each group."""

    def __init__(self, owner: Collectives, began: int, ended: int) -> None:
        self.began = began
        self.ended = ended
        self.timed: list[tuple[Cell, dict[str, Fact], dict[str, Any]]] = []
        self.groups: list[tuple[Group, str, Coverage, Window]] = []
        self._owner = owner
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
        self._owner.publish(resource, self.began, self.ended, facts, more)


def _is_timed_by_recorder(cell: Cell) -> bool:
    return "nccl" in cell.group.backend


def _each(mode: str) -> Callable[[Group], bool]:
    """Which groups' calls are told of one by one in a mode of ``DD_PYTORCH_COLLECTIVES``."""
    if mode == "all":
        return lambda here: True
    return lambda here: mode == "crossnode" and bool(here.crosses_nodes)
