"""Makes user spans children of the rank span, on every thread, without activating anything.

The provider answers with ddtrace's own active span where there is one, else with a context of the open piece. That
context has no sampling priority, and one that got a decision is not given out again: every user trace is sampled
by the user's own rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ddtrace._trace.provider import DefaultContextProvider
from ddtrace.trace import Context, Span, tracer

from ddtrace_pytorch.rank_span import Parent, RankSpan
from ddtrace_pytorch.spans import SpanLink

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

_ddtraces_active: Callable[[DefaultContextProvider], Span | Context | None] = DefaultContextProvider.active


class RankContextProvider(DefaultContextProvider):
    """ddtrace's provider with the open piece of a rank span behind it."""

    span: RankSpan
    _context: Context | None = None

    def active(self) -> Span | Context | None:
        current = _ddtraces_active(self)
        if current is not None:
            return current
        piece = self.span.piece
        context = self._context
        if context is None or context.span_id != piece.span_id or context.sampling_priority is not None:
            self._context = context = Context(trace_id=piece.trace_id, span_id=piece.span_id, is_remote=False)
        return context


def adopt(span: RankSpan) -> None:
    """From now on user spans without a parent are children of `span`. A provider of the user's own is left alone."""
    if type(tracer.context_provider) in (DefaultContextProvider, RankContextProvider):
        provider = RankContextProvider()
        provider.span = span
        tracer.context_provider = provider


def release() -> None:
    """Give ddtrace its own provider back."""
    if type(tracer.context_provider) is RankContextProvider:
        tracer.context_provider = DefaultContextProvider()


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
