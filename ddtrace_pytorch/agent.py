"""Our way to the Datadog Agent: does one answer, and sending a finished span through ddtrace's own writer.

Our spans skip ddtrace's aggregator, which keeps a trace until all its open spans have ended: the rank span is the
parent of every user span, so a trace of its would end with the job.
"""

from __future__ import annotations

import contextlib
import http.client
import os
from dataclasses import replace
from itertools import chain
from urllib.parse import urlsplit

import ddtrace
from ddtrace.constants import ENV_KEY, MANUAL_KEEP_KEY, USER_KEEP, VERSION_KEY
from ddtrace.internal.runtime import get_runtime_id
from ddtrace.trace import Context, Span, tracer

from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.unix_http import UnixConnection

ANSWER_SECONDS = 0.2
_NO_TRACES = b"\x90"  # an empty list, as msgpack has it
_MSGPACK = {"Content-Type": "application/msgpack", "X-Datadog-Trace-Count": "0"}
# Bytes; the Agent's own has some thousand.
_LONGEST_ANSWER = 1 << 20


def url() -> str | None:
    """Where ddtrace sends traces; None when that is no Agent (agentless intake, Lambda's log)."""
    address = tracer.agent_trace_url
    return str(address) if address else None


def answers(timeout: float = ANSWER_SECONDS) -> bool:
    """Whether an Agent answers at :func:`url`, to the end of its answer, within `timeout` seconds per socket operation:
    it has ``/info``, or takes traces all the same, as older ones and what stands in for one do.

    Without an Agent in between, ddtrace's writer is taken at its word.
    """
    address = url()
    if address is None:
        return True
    try:
        status = _status(address, timeout, "GET", "/info")
        if 400 <= status < 500:
            status = _status(address, timeout, "PUT", "/v0.4/traces", _NO_TRACES)
        return status < 400
    except (OSError, http.client.HTTPException, ValueError):
        # ValueError: nobody can be asked at such an address (port 99999, a host name with an empty label).
        return False


def _status(address: str, timeout: float, method: str, path: str, body: bytes = b"") -> int:
    with contextlib.closing(_connection(address, timeout)) as connection:
        connection.request(method, path, body or None, _MSGPACK if body else {})
        answer = connection.getresponse()
        answer.read(_LONGEST_ANSWER)
        return answer.status


def _connection(address: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    if parts.scheme == "unix":
        return UnixConnection(parts.path, timeout)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "localhost", parts.port, timeout=timeout)


def as_sent(record: SpanRecord) -> SpanRecord:
    """`record` with what ddtrace says on every span of the process it comes from; what it has of that already stays."""
    named = {ENV_KEY: ddtrace.config.env, VERSION_KEY: ddtrace.config.version}
    tags = {name: value for name, value in named.items() if value}
    tags |= {**ddtrace.config.tags, "runtime-id": get_runtime_id()}
    metrics = {"process_id": os.getpid(), "_dd.top_level": 1}
    return replace(record, tags={**tags, **record.tags}, metrics={**metrics, **record.metrics})


def send(record: SpanRecord) -> None:
    """Hand one span to ddtrace's processors and writer. Keep priority; user trace filters see it."""
    _revive_after_fork()
    aggregator = tracer._span_aggregator
    spans = [_ddtrace_span(record)]
    for processor in chain(
        aggregator.dd_processors,
        aggregator.user_processors,
        (aggregator.sampling_processor, aggregator.tags_processor, aggregator.service_name_processor),
    ):
        spans = processor.process_trace(spans) or []
        if not spans:
            return
    aggregator.writer.write(spans)


def flush() -> None:
    """Make ddtrace's writer send what it holds, ours and the user's. Blocks while the Agent is slow."""
    _revive_after_fork()
    tracer.flush()


def _revive_after_fork() -> None:
    # From 4.15 a forked child's writer is made at the first span it starts; ours are not started, only sent.
    revive = getattr(tracer, "_ensure_post_fork_writer", None)
    if revive is not None:
        revive()


def _ddtrace_span(record: SpanRecord) -> Span:
    record = as_sent(record)
    span = Span(
        name=record.name,
        service=record.service,
        resource=record.resource,
        trace_id=record.trace_id,
        span_id=record.span_id,
        parent_id=record.parent_id,
        context=Context(
            trace_id=record.trace_id, span_id=record.parent_id, sampling_priority=USER_KEEP, is_remote=False
        ),
    )
    span.start_ns = record.start
    span.duration_ns = record.duration
    if record.error:
        span.error = 1
    span.set_tags(dict(record.tags))
    span.set_tag(MANUAL_KEEP_KEY)
    span.set_metrics(dict(record.metrics))
    for link in record.links:
        span.set_link(link.trace_id, link.span_id, attributes={"reason": link.why})
    return span
