"""Collectives that were told of one by one: slow ones, and all that DD_PYTORCH_COLLECTIVES asked for."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtrace_pytorch.runlog.fields import mapping, number, text


@dataclass
class SingleCall:
    """One call on one rank; every rank of the group knows it by `key`, null for a transfer between two ranks.

    `time_source` says what `time_ms` is: ``completion`` of the collective or ``issue`` of the call. `at` is the
    caller's ``file:line``, null where it isn't known.
    """

    rank: int
    operation: str
    group: str
    key: int | None
    time_source: str
    time_ms: float
    bytes: int
    at: str | None


class Slowest:
    """Counts single calls and keeps the `limit` slowest of them."""

    def __init__(self, limit: int) -> None:
        self.seen = 0
        self._limit = limit
        # Negative numbers: of calls that took equally long the first stays.
        self._kept: list[tuple[float, int, SingleCall]] = []

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """One `span` record of `rank`, named ``pytorch.collective``; one without a time counts for nothing."""
        tags, metrics = mapping(record, "tags"), mapping(record, "metrics")
        ms, key = number(metrics, "collective.time_ms"), number(metrics, "collective.seq")
        if ms is None:
            return
        self.seen += 1
        call = SingleCall(
            rank=rank,
            operation=text(tags, "collective.op"),
            group=text(tags, "collective.group"),
            key=None if key is None else int(key),
            time_source=text(tags, "collective.time_source"),
            time_ms=ms,
            bytes=int(number(metrics, "collective.bytes") or 0),
            at=text(tags, "collective.at") or None,
        )
        heapq.heappush(self._kept, (ms, -self.seen, call))
        if len(self._kept) > self._limit:
            heapq.heappop(self._kept)

    def pour(self, other: Slowest) -> None:
        """Add the calls of other ranks, which come after those that are here."""
        for ms, turn, call in other._kept:
            heapq.heappush(self._kept, (ms, turn - self.seen, call))
            if len(self._kept) > self._limit:
                heapq.heappop(self._kept)
        self.seen += other.seen

    def told(self) -> list[SingleCall]:
        return [call for *_, call in sorted(self._kept, reverse=True)]
