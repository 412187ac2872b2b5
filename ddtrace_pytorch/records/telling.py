"""What is told of the user's records: in the run log of each, in Datadog of some spans. Pure."""

from __future__ import annotations

from typing import Any

from ddtrace_pytorch.records.attributes import Plain
from ddtrace_pytorch.records.recorder import SCALAR, SPAN, Failure, Row
from ddtrace_pytorch.records.totals import fact
from ddtrace_pytorch.spans import STACK_LIMIT, Fact

# Names of spans.
NAME = "pytorch.span"
SUMMARY = "pytorch.spans"

# What ddtrace, Datadog or we mean something else by; attributes of these names are called `attributes.<name>`.
RESERVED = frozenset(
    "component env error framework host job_id language name parent rank relative_step resource service source step "
    "type version world_size".split()
)  # fmt: skip


def log_record(row: Row, offset: int, at: str) -> dict[str, Any]:
    """The run log's record of `row`; `offset`: from the monotonic clock to that of the run log, in ns."""
    kind = row.kind
    when = row.at + offset
    said: dict[str, Any] = {"type": kind, "ts": when}
    if kind == SCALAR:
        said["seq"] = row.number
        said["metrics"] = row.values
        if row.types:
            said["types"] = row.types
    else:
        said["name"] = row.name
        said["seq"] = row.number
        if row.values:
            said["attributes"] = row.values
    number, relative = row.of_step or (row.step.number, row.step.relative)
    if number is not None:
        said["step"] = number
    if relative is not None:
        said["relative_step"] = relative
    if row.tags:
        said["step_tags"] = row.tags
    said["at"] = at
    said["thread"] = row.thread
    if row.task is not None:
        said["task"] = row.task
    if row.parent is not None:
        said["parent"] = str(row.parent.id)
    if kind == SPAN:
        said["id"] = str(row.id)
        said["start"] = row.started + offset
        said["duration"] = row.at - row.started
        if row.failed is not None:
            said["error"] = {"type": row.failed.type, "message": row.failed.message, "stack": stack(row.failed)}
    return said


def stack(failed: Failure) -> str:
    """As Python writes it, but for the lines of the source: nobody opens a file for this."""
    lines = [f'  File "{file}", line {line}, in {function}\n' for file, line, function in failed.stack]
    return ("Traceback (most recent call last):\n" + "".join(lines) + f"{failed.type}: {failed.message}")[-STACK_LIMIT:]


def span_facts(row: Row, at: str) -> dict[str, Fact]:
    """The tags and metrics of a user's span."""
    facts: dict[str, Fact] = {}
    for name, value in row.values.items():
        found = _fact(value)
        if found is not None:
            plain = name.isidentifier() and not name.startswith("_") and name not in RESERVED
            facts[name if plain else f"attributes.{name}"] = found
    facts["span.at"] = at
    step = row.step
    if step.number is not None:
        facts["step"] = fact(step.number)
    if step.relative is not None:
        facts["relative_step"] = fact(step.relative)
    if row.tags:
        facts["pytorch.step_tags"] = ",".join(row.tags)
    facts["pytorch.thread"] = row.thread
    if row.failed is not None:
        facts["error.type"] = row.failed.type
        facts["error.message"] = row.failed.message
        facts["error.stack"] = stack(row.failed)
    return facts


def _fact(value: Plain) -> Fact | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return fact(value)
