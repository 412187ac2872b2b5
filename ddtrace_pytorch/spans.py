"""A finished (or snapshotted) span of ours as plain data, on its way to the Agent and the run log."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtrace_pytorch.border import pass_on
from ddtrace_pytorch.classes import module_of, qualified_name_of

# What a span says of itself: text becomes a tag, a number a metric.
Fact = str | int | float

STACK_FRAMES = 30
# Characters.
MESSAGE_LIMIT = 2_000
STACK_LIMIT = 16_000


def split(facts: Mapping[str, Fact]) -> tuple[dict[str, str], dict[str, float]]:
    """`facts` as tags and metrics."""
    return (
        {name: value for name, value in facts.items() if isinstance(value, str)},
        {name: value for name, value in facts.items() if not isinstance(value, str)},
    )


@dataclass(frozen=True)
class SpanLink:
    trace_id: int
    span_id: int
    why: str


@dataclass(frozen=True)
class SpanRecord:
    """One span; `start` and `duration` in nanoseconds, `start` since the epoch."""

    name: str
    resource: str
    service: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start: int
    duration: int
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    links: tuple[SpanLink, ...] = ()
    error: bool = False

    def as_log_record(self) -> dict[str, Any]:
        """The record of type ``span`` of the run log."""
        return {
            "type": "span",
            "ts": self.start + self.duration,
            "name": self.name,
            "resource": self.resource,
            "service": self.service,
            "trace_id": f"{self.trace_id:032x}",
            "span_id": str(self.span_id),
            "parent_id": str(self.parent_id) if self.parent_id else None,
            "start": self.start,
            "duration": self.duration,
            "error": int(self.error),
            "tags": dict(self.tags),
            "metrics": dict(self.metrics),
            "links": [
                {"trace_id": f"{link.trace_id:032x}", "span_id": str(link.span_id), "why": link.why}
                for link in self.links
            ],
        }

    def as_summary(self, **more: Any) -> dict[str, Any]:
        """The record of type ``summary`` of the run log, with `more` of it."""
        return {
            "type": "summary",
            "ts": self.start + self.duration,
            "name": self.name,
            "resource": self.resource,
            "start": self.start,
            "tags": dict(self.tags),
            "metrics": dict(self.metrics),
            **more,
        }

    @classmethod
    def from_log_record(cls, record: Mapping[str, Any]) -> SpanRecord:
        """The span that :meth:`as_log_record` gave.

        Raises:
            ValueError: `record` is none.
        """
        try:
            return cls(
                name=record["name"],
                resource=record["resource"],
                service=record["service"],
                trace_id=int(record["trace_id"], 16),
                span_id=int(record["span_id"]),
                parent_id=int(record["parent_id"]) if record["parent_id"] else None,
                start=int(record["start"]),
                duration=int(record["duration"]),
                tags=dict(record["tags"]),
                metrics=dict(record["metrics"]),
                links=tuple(
                    SpanLink(int(link["trace_id"], 16), int(link["span_id"]), link["why"]) for link in record["links"]
                ),
                error=bool(record["error"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no span: {error!r}") from error


@dataclass(frozen=True)
class End:
    """Why a rank span ended: `reason` is the tag ``pytorch.end_reason``."""

    reason: str
    error: BaseException | None = field(default=None, compare=False)

    @property
    def is_error(self) -> bool:
        return self.error is not None or self.reason.startswith("signal:")

    def tags(self) -> dict[str, str]:
        tags = {"pytorch.end_reason": self.reason}
        if self.error is not None:
            tags |= describe_error(self.error)
        elif self.is_error:
            tags["error.message"] = f"ended by {self.reason.removeprefix('signal:')}"
            tags["error.type"] = self.reason
        return tags


def describe_error(error: BaseException) -> dict[str, str]:
    """ddtrace's error tags for `error`; never raises, whatever its ``__str__`` does."""
    try:
        message = str(error)
        stack = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-STACK_FRAMES))
    except Exception as broken:
        pass_on(broken)
        message, stack = f"(its text raised {type(broken).__name__})", ""
    tags = {"error.type": type_name(error), "error.message": message[:MESSAGE_LIMIT]}
    return tags | {"error.stack": stack[-STACK_LIMIT:]}


def type_name(error: BaseException) -> str:
    """What ddtrace calls the type of `error`."""
    kind = type(error)
    module, name = module_of(kind), qualified_name_of(kind)
    return name if module == "builtins" else f"{module}.{name}"
