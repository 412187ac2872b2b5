"""The report's tables of what the user recorded, and of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from ddtrace_pytorch.cli.records import Checkpoints, Event, Recorded, Scalar, UserSpan
from ddtrace_pytorch.cli.tables import line, row, show, size, span, table
from ddtrace_pytorch.spans import Fact

ROWS = 20
# Characters of a name, a place or a path.
SHOWN = 60


def render_records(recorded: Recorded, console: Console) -> None:
    """A table for each kind that there is something of."""
    for kind in KINDS:
        _render(kind, getattr(recorded, kind.field), console)


def _render(kind: Kind, all_of_them: Sequence[Any], console: Console) -> None:
    if not all_of_them:
        return
    line(console, "")
    line(console, kind.title, style="bold")
    drawn = table(*kind.columns, right=kind.figures, yielding=kind.yielding, gap=kind.gap)
    for one in all_of_them[:ROWS]:
        row(drawn, *kind.cells(one))
    show(console, drawn)
    if len(all_of_them) > ROWS:
        line(console, f"… {len(all_of_them) - ROWS:,} more {kind.what} (--json lists all)")
    for said in kind.said(all_of_them[:ROWS]):
        line(console, said, style="red")


def _span(one: UserSpan) -> Sequence[str]:
    times = (one.mean_ms, one.p95_ms, one.max_ms)
    where = f"rank {one.slowest_rank}" + (f", {_tail(one.slowest_at)}" if one.slowest_at else "")
    return _head(one.name), f"{one.count:,}", f"{one.errors:,}", *map(span, times), where


def _scalar(one: Scalar) -> Sequence[str]:
    return _head(one.name), f"{one.count:,}", *map(_number, (one.first, one.last, one.min, one.max))


def _not_finite(scalars: Iterable[Scalar]) -> Iterator[str]:
    for one in scalars:
        if one.not_finite:
            step = "" if one.first_not_finite_step is None else f" in step {one.first_not_finite_step}"
            first = f"{'the first of them' if one.not_finite > 1 else 'that'}{step} on rank {one.first_not_finite_rank}"
            yield f"{_head(one.name)}: {one.not_finite:,} of {one.count:,} not finite, {first}"


def _nothing(those: Iterable[Any]) -> Iterator[str]:
    yield from ()


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


class Kind(NamedTuple):
    """What is drawn of one of :class:`Recorded`'s fields: `columns`, of which the `figures` stand to the right, and the
    `cells` of one row. `what`: many of them, in words. `said`: what there is to say below a table of them."""

    field: str
    title: str
    what: str
    columns: tuple[str, ...]
    figures: tuple[str, ...]
    yielding: tuple[str, ...]
    gap: int
    cells: Callable[[Any], Sequence[str]]
    said: Callable[[Iterable[Any]], Iterator[str]] = _nothing


_TIMES = ("Count", "Errors", "Mean", "p95", "Max")
_VALUES = ("Count", "First", "Last", "Min", "Max")
_SIZES = ("Count", "Errors", "Bytes", "Total", "Slowest")
KINDS = (
    Kind("spans", "Your spans", "names", ("Span", *_TIMES, "Slowest at"), _TIMES, ("Span", "Slowest at"), 1, _span),
    Kind("scalars", "Your scalars", "names", ("Scalar", *_VALUES), _VALUES, ("Scalar",), 2, _scalar, _not_finite),
    Kind("events", "Your events", "names", ("Event", "Count"), ("Count",), ("Event",), 2, _event),
    Kind(
        "checkpoints",
        "Checkpoints",
        "operations",
        ("Operation", *_SIZES, "Last path"),
        _SIZES,
        ("Last path",),
        1,
        _checkpoints,
    ),
)
