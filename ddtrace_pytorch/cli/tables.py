"""What a report is drawn with: lines and tables that read well at 80 columns, and numbers at a glance."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from ddtrace_pytorch.visible import visible

NOTES = 20
# Columns that a yielding one keeps, if there is as much in it.
NARROWEST = 10
ENDLESS = 1_000_000


def line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text), style=style), soft_wrap=True)


def paragraph(console: Console, text: str, style: str = "") -> None:
    """Several sentences, folded between words: a path stays whole, however long."""
    for part in textwrap.wrap(visible(text), console.width, break_long_words=False, break_on_hyphens=False):
        line(console, part, style)


def notes(console: Console, told: Sequence[str], rest: str = "") -> None:
    """What could not be read, or was not used; `rest` says where there is more than so many."""
    for note in told[:NOTES]:
        line(console, f"note: {note}", style="yellow")
    if len(told) > NOTES:
        line(console, f"note: … {len(told) - NOTES} more{rest}", style="yellow")


def table(*columns: str, right: tuple[str, ...] = (), yielding: tuple[str, ...] = (), gap: int = 2) -> Table:
    """A table whose columns keep their width, but for those in `yielding`, which fold over more lines."""
    made = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1), collapse_padding=True, show_edge=False
    )  # the box is one column wide
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in yielding,
            overflow="fold",
        )
    return made


class _Whole:
    """A table that takes more room than there is rather than cut what it says."""

    def __init__(self, drawn: Table) -> None:
        self._drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        saved = 0
        for column in self._drawn.columns:
            longest = _longest(column)
            column.min_width = longest if column.no_wrap else min(longest, NARROWEST)
            saved += longest - column.min_width
        unfolded = Measurement.get(console, options.update(width=ENDLESS), self._drawn).maximum
        width = max(options.max_width, unfolded - saved)
        yield from self._drawn.__rich_console__(console, options.update(width=width))


def _longest(column: Column) -> int:
    return max(cell_len(str(cell)) for cell in (column.header, *column.cells))


def show(console: Console, drawn: Table) -> None:
    """Print a table, all of it: where even its folded columns don't fit, it goes over the edge."""
    console.print(_Whole(drawn), crop=False)


def row(into: Table, *cells: str, style: str = "") -> None:
    into.add_row(*(Text(visible(cell)) for cell in cells), style=style)


def known(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def span(ms: float | None) -> str:
    """A time that may be of microseconds or of hours: ``412µs``, ``1.93s``."""
    if ms is None:
        return "–"
    if not ms:
        return "0s"
    if ms >= 60_000:
        return duration(ms / 1e3)
    return _three_digits(ms * 1e3, ("µs", "ms", "s"))


def size(many: float) -> str:
    """Bytes, decimal: ``1.05MB``."""
    return _three_digits(many, ("B", "kB", "MB", "GB", "TB", "PB"))


def speed(gbps: float | None) -> str:
    """GB/s, without the unit."""
    if gbps is None:
        return "–"
    if 0 <= gbps < 0.01:
        return "<0.01"
    places = 0 if gbps >= 9.95 else 1 if gbps >= 0.995 else 2
    return f"{gbps:.{places}f}"


def _three_digits(number: float, units: tuple[str, ...]) -> str:
    unit, *larger = units
    # 999.5 would be written as 1000.
    while number >= 999.5 and larger:
        number /= 1000
        unit, *larger = larger
    places = 0 if number >= 99.95 or number == round(number) else 1 if number >= 9.995 else 2
    return f"{number:.{places}f}{unit}"
