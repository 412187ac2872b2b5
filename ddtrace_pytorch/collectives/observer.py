"""Collectives of one session: the ledger, the instrumented functions, and what is told of them and when.

The training threads only add to the ledger; everything here runs on the Pulse, or while the session opens and closes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives import telling
from ddtrace_pytorch.collectives.callbacks import Callbacks
from ddtrace_pytorch.collectives.groups import TorchGroups, launched
from ddtrace_pytorch.collectives.instrument import Instrument
from ddtrace_pytorch.collectives.markers import markers
from ddtrace_pytorch.collectives.telling import Coverage, Totals
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.identity.topology import Nodes
from ddtrace_pytorch.ledger import Cell, Group, Ledger
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.spans import Fact, SpanRecord

MILLISECOND = 1_000_000


class Collectives:
    """What this rank says to the others, from :meth:`open` to :meth:`close`."""

    def __init__(self, torch: Any, settings: Settings, clock: Clock, span: RankSpan, exporter: Exporter) -> None:
        self._clock = clock
        self._span = span
        self._exporter = exporter
        self._service = settings.service
        self._groups = TorchGroups(torch.distributed)
        self.ledger = Ledger(self._groups, round(settings.slow_ms * MILLISECOND), _each(settings.collectives))
        self.instrument = Instrument(torch, self.ledger, self._groups, settings.instrument)
        self._markers = safely("mark collectives")(markers)(settings, torch, self._node_of)
        placeholder = getattr(torch.distributed.distributed_c10d, "_IllegalWork", ())
        self._callbacks = Callbacks(self.instrument, clock, placeholder)
        self._told: dict[Cell, Totals] = {}
        self._told_at = clock.now()
        self._launched: dict[Group, int | None] = {}
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
            alive = here.process_group and here.process_group()
            if here.crosses_nodes is None and alive is not None:
                here.crosses_nodes = self._groups.crosses_nodes(alive)
                # In the mode that asks for them, its calls are told of from now on.
                for cell in tuple(here.cells.values()):
                    cell.slow = self.ledger.slow_for(cell)
                    cell.notable = min(cell.slow, cell.slowest)

    def beat(self) -> None:
        """Once a second: tell of the calls that are told of one by one."""
        # Again, for a group that was met in the very moment in which the nodes became known.
        self._place_groups()
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
        for process_group in self._groups.all():
            self.ledger.group(process_group)
        for here in tuple(self.ledger.groups):
            alive = here.process_group and here.process_group()
            if alive is not None:
                self._launched[here] = launched(alive)

    @safely("sum up the collectives")
    def summarise(self) -> None:
        """Tell the totals since the last time: one summary for each cell, and one for what was not seen of a group."""
        with self._telling:
            self.look()
            began, self._told_at = self._told_at, self._clock.now()
            for here in tuple(self.ledger.groups):
                coverage = self._coverage(here)
                for cell in tuple(here.cells.values()):
                    self._tell(cell, began, coverage)
                self._tell_unseen(here, began, coverage)
                if here.process_group is not None and here.process_group() is None:
                    self.ledger.forget(here)
                    self._launched.pop(here, None)

    def close(self) -> None:
        """Give torch its functions back and tell what is left."""
        self._callbacks.close()
        self.instrument.remove()
        self.ledger.close()
        self.beat()
        self.summarise()

    def abandon(self) -> None:
        """In a forked child: nothing of the parent's is counted here."""
        self._callbacks.abandon()
        self.instrument.remove()
        self.ledger.close()

    def _node_of(self, rank: int) -> str | None:
        nodes = self._groups.nodes
        return None if nodes is None else nodes.of(rank)

    def _coverage(self, here: Group) -> Coverage:
        now, before = self._launched.get(here), here.launched_before
        return Coverage(None if now is None or before is None else now - before, here.calls)

    def _tell(self, cell: Cell, began: int, coverage: Coverage) -> None:
        now = telling.totals(cell)
        told = telling.difference(now, self._told.get(cell, Totals()))
        if not (told.calls or told.errors or told.waits):
            return
        self._told[cell] = now
        slowest, code, instruction = cell.slowest, cell.slowest_code, cell.slowest_at
        cell.slowest = -1
        at = telling.place(code, instruction) if code is not None else None
        facts = telling.summary_facts(cell, told, max(slowest, 0), at) | coverage.facts()
        buckets = {str(bucket): many for bucket, many in enumerate(told.buckets) if many}
        self._publish(cell.operation, began, facts, {"how": cell.how.value, "buckets": buckets})

    def _tell_unseen(self, here: Group, began: int, coverage: Coverage) -> None:
        if coverage.launched is None or coverage.launched <= coverage.seen:
            return
        facts: dict[str, Fact] = {
            **telling.group_facts(here),
            **coverage.facts(),
            "collective.op": "unseen",
            "collective.count": coverage.launched - coverage.seen,
        }
        self._publish("unseen", began, facts, {})

    def _publish(self, resource: str, began: int, facts: dict[str, Fact], more: dict[str, Any]) -> None:
        took = self._told_at - began
        record = self._record(telling.SUMMARY, resource, began, took, facts)
        self._exporter.put_span(record, logged=False)
        self._exporter.put(
            {
                "type": "summary",
                "ts": self._told_at,
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
        tags, metrics = telling.split({"component": "pytorch", **facts})
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


def _each(mode: str) -> Callable[[Group], bool]:
    """Which groups' calls are told of one by one in a mode of ``DD_PYTORCH_COLLECTIVES``."""
    if mode == "all":
        return lambda here: True
    return lambda here: mode == "crossnode" and bool(here.crosses_nodes)
