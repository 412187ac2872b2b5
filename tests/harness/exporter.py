"""Keeps what a session hands to its exporter, for tests of what it hands over."""

from __future__ import annotations

import json
from typing import Any

from ddtrace_pytorch.runlog.schema import decode
from ddtrace_pytorch.spans import SpanRecord


class KeepingExporter:
    """`spans` and run-log `records` in the order they came; what is counted as dropped is a record too, as in a log."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []
        self.records: list[dict[str, Any]] = []

    def put_span(self, span: SpanRecord, logged: bool = True) -> None:
        self.spans.append(span)

    def put(self, record: Any) -> None:
        found = decode(record) if isinstance(record, bytes) else json.loads(json.dumps(record))
        assert found is not None
        self.records.append(found)

    def count_lost(self, reason: str, records: int) -> None:
        if records:
            self.records.append({"type": "drop", "reason": reason, "count": records})
