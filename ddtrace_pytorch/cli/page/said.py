"""What the user's code recorded. Pure."""

from __future__ import annotations

from ddtrace_pytorch.cli.page.html import Html, tag
from ddtrace_pytorch.cli.page.parts import more, section, table
from ddtrace_pytorch.cli.page.plots import plots
from ddtrace_pytorch.cli.page.series import AllSeries
from ddtrace_pytorch.cli.record_tables import KINDS, Kind
from ddtrace_pytorch.cli.records import Recorded

ROWS = 200


def scalars(recorded: Recorded, series: AllSeries) -> Html | None:
    """A plot of each name, then all of them as a table."""
    (kind,) = (kind for kind in KINDS if kind.field == "scalars")
    names = [one.name for one in recorded.scalars]
    return section(kind.title, plots(series, names), *_table(kind, recorded))


def others(recorded: Recorded) -> list[Html | None]:
    """The user's spans and events, and checkpoints."""
    return [section(kind.title, *_table(kind, recorded)) for kind in KINDS if kind.field != "scalars"]


def _table(kind: Kind, recorded: Recorded) -> list[Html | None]:
    there = getattr(recorded, kind.field)
    drawn = table(kind.columns, map(kind.cells, there[:ROWS]), kind.figures)
    said = [tag("p", one, class_="bad") for one in kind.said(there[:ROWS])]
    return [drawn, more(ROWS, len(there), kind.what), *said]
