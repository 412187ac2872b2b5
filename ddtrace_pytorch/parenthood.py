"""Makes user spans children of the rank span, on every thread, without activating anything.

The provider answers with ddtrace's own active span where there is one, else with a context of the open piece. That
context has no sampling priority, and one that got a decision is not given out again: every user trace is sampled
by the user's own rules.
"""

from __future__ import annotations

from collections.abc import Callable

from ddtrace._trace.provider import DefaultContextProvider
from ddtrace.trace import Context, Span, tracer

from ddtrace_pytorch.rank_span import Parent, RankSpan
from ddtrace_pytorch.spans import SpanLink

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


def surroundings() -> tuple[Parent | None, SpanLink | None]:
    """What the rank span opens in: Ray's active span is its parent, any other active span is linked."""
    active = tracer.context_provider.active()
    if active is None or not active.trace_id or not active.span_id:
        return None, None
    if isinstance(active, Span) and active.get_tag("component") == "ray":
        return Parent(active.trace_id, active.span_id), None
    return None, SpanLink(active.trace_id, active.span_id, "active when the session opened")
