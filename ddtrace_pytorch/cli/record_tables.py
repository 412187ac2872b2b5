"""The report's tables of what the user recorded, and of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from ddtrace_pytorch.cli.records import Checkpoints, Event, Recorded, Scalar, UserSpan
from ddtrace_pytorch.cli.tables import line, row, size, span, table
from ddtrace_pytorch.spans import Fact

T = TypeVar("T")

ROWS = 20
# Characters of a name, a place or a path.
SHOWN = 60


def render_records(recorded: Recorded, console: Console) -> None:
    """A table for each kind that there is something of."""
    figures = ("Count", "Errors", "Mean", "p95", "Max")
    spans = table("Span", *figures, "Slowest at", right=figures, yielding=("Span", "Slowest at"), gap=1)
    _render("Your spans", "names", recorded.spans, spans, _span, console)
    figures = ("Count", "First", "Last", "Min", "Max")
    scalars = table("Scalar", *figures, right=figures, yielding=("Scalar",))
    _render("Your scalars", "names", recorded.scalars, scalars, _scalar, console)
    events = table("Event", "Count", right=("Count",), yielding=("Event",))
    _render("Your events", "names", recorded.events, events, _event, console)
    figures = ("Count", "Errors", "Bytes", "Total", "Slowest")
    checkpoints = table("Operation", *figures, "Last path", right=figures, yielding=("Last path",), gap=1)
    _render("Checkpoints", "operations", recorded.checkpoints, checkpoints, _checkpoints, console)


def _render(
    title: str, what: str, all_of_them: Sequence[T], drawn: Table, cells: Callable[[T], Sequence[str]], console: Console
) -> None:
    if not all_of_them:
        return
    line(console, "")
    line(console, title, style="bold")
    for one in all_of_them[:ROWS]:
        row(drawn, *cells(one))
    console.print(drawn)
    if len(all_of_them) > ROWS:
        line(console, f"… {len(all_of_them) - ROWS:,} more {what} (--json lists all)")


def _span(one: UserSpan) -> Sequence[str]:
    times = (one.mean_ms, one.p95_ms, one.max_ms)
    where = f"rank {one.slowest_rank}" + (f", {_tail(one.slowest_at)}" if one.slowest_at else "")
    return _head(one.name), f"{one.count:,}", f"{one.errors:,}", *map(span, times), where


def _scalar(one: Scalar) -> Sequence[str]:
    return _head(one.name), f"{one.count:,}", *map(_number, (one.first, one.last, one.min, one.max))


def _event(one: Event) -> Sequence[str]:
    return _head(one.name), f"{one.count:,}"


def _checkpoints(one: Checkpoints) -> Sequence[str]:
    many = "–" if one.bytes is None else size(one.bytes)
    slowest = f"{span(one.slowest_ms)} (rank {one.slowest_rank})"
    return (
        _head(one.op),
        f"{one.count:,}",
        f"{one.errors:,}",
        many,
        span(one.total_ms),
        slowest,
        _tail(one.last_path or "–"),
    )


def _number(value: Fact | None) -> str:
    if value is None:
        return "–"
    return value[:SHOWN] if isinstance(value, str) else f"{value:.6g}"


def _head(name: str) -> str:
    return name if len(name) <= SHOWN else name[: SHOWN - 1] + "…"


def _tail(path: str) -> str:
    return path if len(path) <= SHOWN else "…" + path[1 - SHOWN :]
