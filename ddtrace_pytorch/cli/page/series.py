"""The numbers that were recorded by name, step by step: bins for a plot of each. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtrace_pytorch.cli.page.bins import Bins
from ddtrace_pytorch.runlog.fields import integer, mapping

# Names that get a plot; of more, those that are there first.
MOST_NAMES = 64


@dataclass(slots=True)
class Numbers:
    """`odd`: how many weren't finite."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    odd: int = 0

    def add(self, value: float) -> None:
        # Larger ones can't be summed up.
        if not -1e300 < value < 1e300:
            self.odd += 1
            return
        self.count += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value

    def join(self, other: Numbers) -> None:
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)
        self.odd += other.odd


@dataclass
class Series:
    """One name's, over the steps, and over the time (ns) where there were none."""

    by_step: Bins[Numbers] = field(default_factory=lambda: Bins(Numbers))
    by_time: Bins[Numbers] = field(default_factory=lambda: Bins(Numbers, 20))

    def pour(self, other: Series) -> None:
        self.by_step.pour(other.by_step)
        self.by_time.pour(other.by_time)


class AllSeries:
    """`left_out` counts the names that have no plot."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self._left_out: set[str] = set()

    @property
    def left_out(self) -> int:
        return len(self._left_out)

    def add(self, record: Mapping[str, Any]) -> None:
        """One `scalar` record."""
        step = integer(record, "step")
        known = self.series
        for name, value in mapping(record, "metrics").items():
            if type(value) is not float and type(value) is not int:
                continue
            series = known.get(name) or self._of(name)
            if series is not None:
                cell = series.by_time.at(record["ts"]) if step is None else series.by_step.at(step)
                cell.add(value)

    def pour(self, other: AllSeries) -> None:
        """Add what another rank recorded."""
        for name, series in other.series.items():
            mine = self._of(name)
            if mine is not None:
                mine.pour(series)
        for name in other._left_out:
            self._leave_out(name)

    def _of(self, name: str) -> Series | None:
        found = self.series.get(name)
        if found is None:
            if len(self.series) >= MOST_NAMES:
                self._leave_out(name)
                return None
            found = self.series[name] = Series()
        return found

    def _leave_out(self, name: str) -> None:
        if len(self._left_out) < 1000 and name not in self.series:
            self._left_out.add(name)
