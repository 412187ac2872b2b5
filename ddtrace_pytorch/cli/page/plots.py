"""Plots of the user's numbers, which need no script. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from ddtrace_pytorch.cli.page.html import Html, tag
from ddtrace_pytorch.cli.page.parts import say
from ddtrace_pytorch.cli.page.series import AllSeries, Series

WIDTH, HEIGHT = 300.0, 100.0
MARGIN = 6.0


class Point(NamedTuple):
    x: float
    least: float
    mean: float
    most: float


def plots(series: AllSeries, names: Sequence[str]) -> Html | None:
    """One for each of the `names` that has numbers, in that order."""
    drawn = [_plot(name, series.series[name]) for name in names if name in series.series]
    if not drawn:
        return None
    left_out = say(f"Without a plot: {series.left_out:,} more names.") if series.left_out else None
    meaning = say("The line is the mean of all ranks, the band goes from the least to the most; red: not finite.")
    return tag("div", meaning, tag("div", *drawn, class_="plots"), left_out)


def _plot(name: str, one: Series) -> Html:
    # Scalars without a step are few, or all of them are.
    by_step = sum(cell.count + cell.odd for cell in one.by_step.cells.values())
    by_time = sum(cell.count + cell.odd for cell in one.by_time.cells.values())
    stepped = by_step >= by_time
    bins = one.by_step if stepped else one.by_time
    places = sorted(bins.cells)
    first, last = places[0], places[-1]
    points = [Point(at, cell.least, cell.total / cell.count, cell.most)
              for at in places if (cell := bins.cells[at]).count]  # fmt: skip
    odd = sum(cell.odd for cell in bins.cells.values())
    low, high = min((one.least for one in points), default=0.0), max((one.most for one in points), default=0.0)
    across = WIDTH / ((last - first) or 1)
    # Divided by, not multiplied with what is one by it: that is infinite where the numbers hardly differ.
    tall = (high - low) or 1.0

    def place(x: float, y: float) -> str:
        return f"{(x - first) * across:.1f},{HEIGHT - MARGIN - (y - low) / tall * (HEIGHT - 2 * MARGIN):.1f}"

    outline = [place(one.x, one.most) for one in points] + [place(one.x, one.least) for one in reversed(points)]
    shapes = [
        tag("polygon", points=" ".join(outline), class_="range") if len(points) > 1 else None,
        tag("polyline", points=" ".join(place(one.x, one.mean) for one in points), class_="mean"),
        *(_odd(x, first, across) for x in places if bins.cells[x].odd),
    ]
    if len(points) == 1:
        x, y = place(points[0].x, points[0].mean).split(",")
        shapes.append(tag("circle", cx=x, cy=y, r=3, class_="dot"))
    ends = [_end(at, stepped) for at in bins.extent or ()]
    said = f"{low:.6g} to {high:.6g}" if points else "no finite number"
    return tag(
        "figure",
        tag("figcaption", name[:200]),
        tag("svg", *shapes, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", preserveAspectRatio="none", role="img",
            aria_label=f"{name[:200]}: {said}"),
        tag("div", *(tag("span", text) for text in (ends[0], said, ends[1])), class_="ends"),
        say(f"{odd:,} not finite", "bad small") if odd else None,
        class_="plot",
    )  # fmt: skip


def _odd(x: int, first: int, across: float) -> Html:
    at = f"{(x - first) * across:.1f}"
    return tag("line", x1=at, x2=at, y1=0, y2=HEIGHT, class_="odd")


def _end(at: int, stepped: bool) -> str:
    if stepped:
        return f"step {at:,}"
    try:
        return datetime.fromtimestamp(at / 1e9).astimezone().strftime("%H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "?"
