"""How long the steps of each rank took over the time: rows of bins, and the picture's numbers out of them. Pure.

What a bin says is the length of the step that one is in at a moment of it that is picked at random: each step counts as
much as it has of the bin. A step longer than a bin fills all bins that it lasts over; where no step was, there is none.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtrace_pytorch.cli.page.bins import Bins
from ddtrace_pytorch.runlog.fields import integer, mapping, number

# Rows of a picture: one rank each, or several that are next to each other.
MOST_ROWS = 1024

# About four milliseconds.
NARROWEST = 22

LEVELS = 254
# Between the smallest and the largest number of a picture.
WIDEST = 1e6


@dataclass(slots=True)
class Stay:
    """In ns: how much of the bin lies in steps, and sums of what these steps took, weighted by it: all in all, without
    collectives, and waiting for data."""

    inside: float = 0.0
    step: float = 0.0
    own: float = 0.0
    data: float = 0.0

    def join(self, other: Stay) -> None:
        self.inside += other.inside
        self.step += other.step
        self.own += other.own
        self.data += other.data


class Row:
    """The steps of one rank."""

    def __init__(self) -> None:
        self.bins: Bins[Stay] = Bins(Stay, NARROWEST)

    def add(self, record: Mapping[str, Any]) -> None:
        """One `step` record."""
        took, began = integer(record, "duration"), integer(record, "start")
        if took is None or began is None or took <= 0 or began < 0 or record.get("unfinished"):
            return
        metrics = mapping(record, "metrics")
        own = took - (number(metrics, "collective_ns") or 0.0)
        data = number(metrics, "data_ns") or 0.0
        if own < 0.0:
            own = 0.0
        if data < 0.0:
            data = 0.0
        end = began + took
        bins = self.bins
        bins.reach(began, end - 1)
        shift, cells = bins.shift, bins.cells
        at, last = began >> shift, (end - 1) >> shift
        while True:
            until = end if at == last else (at + 1) << shift
            stay = cells.get(at)
            if stay is None:
                cells[at] = stay = Stay()
            inside = until - began
            stay.inside += inside
            stay.step += inside * took
            stay.own += inside * own
            stay.data += inside * data
            if at == last:
                return
            began, at = until, at + 1


@dataclass
class Layer:
    """One number of every bin, in ms, on a scale of one byte: 0 is none, 1 to 255 go from `least` to `most` evenly on a
    logarithmic scale. Nineteen of twenty lie between `low` and `high`."""

    name: str
    least: float
    most: float
    low: float
    high: float
    levels: str


@dataclass
class HeatMap:
    """`columns` bins of `width_ns`, the first of which begins at `start_ns`; `rows` are the ranks of each, from top to
    bottom. `layers` in base64, row by row."""

    start_ns: int
    width_ns: int
    columns: int
    rows: list[list[int]]
    layers: list[Layer]


STEP, OWN, DATA = "Step time", "Without collectives", "Waiting for data"
_LAYERS = ((STEP, "step"), (OWN, "own"), (DATA, "data"))


def draw(rows: Mapping[int, Row]) -> HeatMap | None:
    """The picture of `rows`, by rank, which are spent afterwards; None where nobody stepped."""
    ranks = sorted(rank for rank, row in rows.items() if row.bins.cells)
    if not ranks:
        return None
    many = -(-len(ranks) // MOST_ROWS)
    together = [ranks[at : at + many] for at in range(0, len(ranks), many)]
    frame: Bins[Stay] = Bins(Stay, NARROWEST)
    for rank in ranks:
        frame.cover(rows[rank].bins)
    assert frame.extent is not None
    first, last = (place >> frame.shift for place in frame.extent)
    for rank in ranks:
        rows[rank].bins.widen(frame.shift)
    layers = []
    for name, of in _LAYERS:
        grid = [_values(those, rows, range(first, last + 1), of) for those in together]
        layers.append(_layer(name, grid))
    return HeatMap(first << frame.shift, 1 << frame.shift, last - first + 1, together, layers)


def _values(ranks: Sequence[int], rows: Mapping[int, Row], places: range, of: str) -> list[float]:
    """In ms, of the slowest of `ranks` in each bin; -1 where none was in a step."""
    found = [-1.0] * len(places)
    for rank in ranks:
        for at, stay in rows[rank].bins.cells.items():
            if stay.inside > 0:
                place = at - places.start
                found[place] = max(found[place], getattr(stay, of) / stay.inside / 1e6)
    return found


def _layer(name: str, grid: Iterable[list[float]]) -> Layer:
    grid = list(grid)
    there = sorted(value for row in grid for value in row if value > 0)
    most = there[-1] if there else 1.0
    least = max(there[0], most / WIDEST) if there else 1.0
    steps = LEVELS / math.log(most / least) if most > least else 0.0
    levels = bytearray()
    for row in grid:
        for value in row:
            up = round(steps * math.log(value / least)) if value > least else 0
            levels.append(0 if value < 0 else 1 + min(up, LEVELS))
    low, high = (there[int(share * (len(there) - 1))] if there else 1.0 for share in (0.025, 0.975))
    return Layer(name, least, most, low, high, base64.b64encode(levels).decode())
