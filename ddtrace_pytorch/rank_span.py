"""The rotating `pytorch.rank` span.

It is plain state: ids, a start and tags. A ddtrace span is built from it each time something is sent (a snapshot,
a finished piece), so there is no open span for ddtrace's aggregator to hold children back for, and rotation is the
exchange of one immutable :class:`Piece`: the end of one is the start of the next.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ddtrace_pytorch.spans import End, Fact, SpanLink, SpanRecord, split

NAME = "pytorch.rank"

_random = random.SystemRandom()


@dataclass(frozen=True)
class Parent:
    """The span a rank span is a child of (Ray's task span): its ids."""

    trace_id: int
    span_id: int


@dataclass(frozen=True)
class Piece:
    """One piece of the rank span: a trace of its own, or a child in the parent's trace."""

    index: int
    trace_id: int
    span_id: int
    start: int
    previous: SpanLink | None = None


def _new_trace_id(start: int) -> int:
    """128 bits as Datadog lays them out: Unix seconds, 32 zero bits, 64 random bits."""
    return (start // 1_000_000_000) << 96 | _random.getrandbits(64)


class RankSpan:
    """The span of one rank from the start of its session to its end; safe to use from any thread."""

    def __init__(
        self,
        *,
        service: str,
        rank: int,
        start: int,
        facts: Mapping[str, Fact],
        parent: Parent | None = None,
        link: SpanLink | None = None,
    ) -> None:
        self._service = service
        self._resource = f"rank {rank}"
        self._parent = parent
        self._lock = threading.Lock()
        self._facts = dict(facts)
        self._rotated = False
        self.piece = self._new_piece(0, start, link)

    def learn(self, facts: Mapping[str, Fact]) -> bool:
        """Add what was learnt after opening, to this piece and all later ones; whether any of it was new."""
        with self._lock:
            before = dict(self._facts)
            self._facts.update(facts)
            return self._facts != before

    def facts(self) -> dict[str, Fact]:
        with self._lock:
            return dict(self._facts)

    def rotate(self, now: int) -> SpanRecord:
        """End the piece at `now` and begin the next at the same instant; gives the one that ended."""
        with self._lock:
            self._rotated = True
            ended = self._record(now)
            self._follow(now)
        return ended

    def snapshot(self, now: int) -> SpanRecord:
        """The open piece as it stands; the Agent keeps the newest version of a span."""
        with self._lock:
            return self._record(now, {"_dd.partial_version": time.time_ns()})

    def finish(self, now: int, end: End) -> SpanRecord:
        """The last piece, with why it ended."""
        with self._lock:
            return self._record(now, end.tags(), error=end.is_error)

    def reopen(self, now: int) -> None:
        """Go on in a new piece after :meth:`finish`: the process outlived what should have ended it."""
        with self._lock:
            self._rotated = True
            self._follow(now)

    def child(
        self,
        name: str,
        resource: str,
        start: int,
        duration: int,
        facts: Mapping[str, Fact],
        error: bool = False,
        span_id: int | None = None,
        under: Piece | None = None,
    ) -> SpanRecord:
        """A span of ours below `under` or the open piece; `start` in ns since the epoch, `duration` in ns."""
        piece = under or self.piece
        tags, metrics = split({"component": "pytorch", **facts})
        return SpanRecord(
            name=name,
            resource=resource,
            service=self._service,
            trace_id=piece.trace_id,
            span_id=span_id or _random.getrandbits(63) | 1,
            parent_id=piece.span_id,
            start=start,
            duration=duration,
            tags=tags,
            metrics=metrics,
            error=error,
        )

    def _follow(self, now: int) -> None:
        ended = self.piece
        self.piece = self._new_piece(ended.index + 1, now, SpanLink(ended.trace_id, ended.span_id, "previous piece"))

    def _new_piece(self, index: int, start: int, previous: SpanLink | None) -> Piece:
        trace_id = self._parent.trace_id if self._parent else _new_trace_id(start)
        return Piece(index, trace_id, _random.getrandbits(63) | 1, start, previous)

    def _record(self, now: int, more: Mapping[str, Fact] | None = None, error: bool = False) -> SpanRecord:
        piece = self.piece
        facts = {**self._facts, "pytorch.piece": piece.index, **(more or {})}
        if self._rotated:
            facts["_dd.was_long_running"] = 1
        tags, metrics = split(facts)
        return SpanRecord(
            name=NAME,
            resource=self._resource,
            service=self._service,
            trace_id=piece.trace_id,
            span_id=piece.span_id,
            parent_id=self._parent.span_id if self._parent else None,
            start=piece.start,
            duration=max(now - piece.start, 0),
            tags=tags,
            metrics=metrics,
            links=(piece.previous,) if piece.previous else (),
            error=error,
        )
