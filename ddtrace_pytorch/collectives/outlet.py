"""The way out of what is told of collectives: spans below the rank span, and records of the run log."""

from __future__ import annotations

from typing import Any

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives import telling
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.ledger import Note, Sample
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.spans import Fact


class Outlet:
    """Makes spans and records for one session and hands them to its exporter, which never waits."""

    def __init__(self, clock: Clock, span: RankSpan, exporter: Exporter) -> None:
        self._clock = clock
        self._span = span
        self._exporter = exporter

    def sample(self, sample: Sample) -> None:
        """One call that all ranks record."""
        cell, monotonic = sample.cell, self._clock.from_monotonic
        record = {
            "type": "call",
            "ts": monotonic(sample.started + sample.took),
            "op": cell.operation,
            "group": cell.group.name,
            "key": sample.number,
            "start": monotonic(sample.started),
            "duration": sample.took,
            "bytes": sample.size,
            "source": telling.time_source(cell.how, cell.group.backend),
        }
        if sample.step is not None:
            record["step"] = sample.step
        self._exporter.put(record)

    def call(self, note: Note, slow_calls: int | None = None) -> None:
        """One call with a span of its own; with `slow_calls`, it stands for so many."""
        start = self._clock.from_monotonic(note.started)
        facts = telling.call_facts(note)
        if slow_calls is not None:
            facts["collective.slow_calls"] = slow_calls
        self._exporter.put_span(self._span.child(telling.CALL, note.cell.operation, start, note.took, facts))

    def calls_lost(self, many: int) -> None:
        """So many calls should have had a span of their own, and have none."""
        self._exporter.count_lost("too many calls", many)

    def summary(self, resource: str, began: int, ended: int, facts: dict[str, Fact], more: dict[str, Any]) -> None:
        """The totals of one operation between two moments, in ns since the epoch; the run log has `more` of it."""
        record = self._span.child(telling.SUMMARY, resource, began, ended - began, facts)
        self._exporter.put_span(record, logged=False)
        self._exporter.put(record.as_summary(**more))
