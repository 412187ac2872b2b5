"""Makes user spans children of the rank span, on every thread, without activating anything.

A span that starts as the root of a trace is moved into the open piece's trace as it starts. It stays the root of its
own ddtrace chunk with a context of its own, so the user's sampling rules decide on each as they always did. (A context
provider that answers with the rank span does the same for four times the cost; the benchmark is `user_span.py`.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddtrace._trace.processor import SpanProcessor
from ddtrace.trace import Span, tracer

from ddtrace_pytorch.rank_span import Parent, RankSpan
from ddtrace_pytorch.spans import SpanLink

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


class RankParent(SpanProcessor):
    """Adopts the root spans that start between :meth:`register` and :meth:`unregister`; both are ddtrace's."""

    def __init__(self, rank_span: RankSpan) -> None:
        super().__init__()
        self._rank_span = rank_span

    def on_span_start(self, span: Span) -> None:
        if not span.parent_id:
            piece = self._rank_span.piece
            span.trace_id = span.context.trace_id = piece.trace_id
            span.parent_id = piece.span_id

    def on_span_finish(self, span: Span) -> None:
        """Nothing is left to do."""


def surroundings(environ: Mapping[str, str]) -> tuple[Parent | None, SpanLink | None]:
    """What the rank span opens in: Ray's span is its parent, any other active span is linked.

    ddtrace's Ray integration has the span of the task or actor method active on the thread that runs it, perhaps with
    spans of the user's inside. Ray Train trains on a thread of its own, where nothing is active; the job's span is
    then known from the W3C variables that the integration leaves in every worker's environment.
    """
    active = tracer.context_provider.active()
    link = None
    if active is not None and active.trace_id and active.span_id:
        link = SpanLink(active.trace_id, active.span_id, "active when the session opened")
    span = active if isinstance(active, Span) else None
    while span is not None:
        if span.get_tag("component") == "ray":
            return Parent(span.trace_id, span.span_id), None if span is active else link
        span = span._parent
    return _ray_job(environ), link


def _ray_job(environ: Mapping[str, str]) -> Parent | None:
    found = _TRACEPARENT.fullmatch(environ.get("traceparent", "")) if environ.get("_RAY_SUBMISSION_ID") else None
    trace_id, span_id = (int(found[1], 16), int(found[2], 16)) if found else (0, 0)
    return Parent(trace_id, span_id) if trace_id and span_id else None
