"""All that the page's pictures, and the diagnosis, take from the logs of one attempt: each log is read once.

What is kept does not go with the length of the logs: bins for steps and scalars, totals for groups, the end of each
rank's history.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddtrace_pytorch.collectives.telling import SUMMARY
from ddtrace_pytorch.page.heat import Row
from ddtrace_pytorch.page.series import AllSeries
from ddtrace_pytorch.page.traffic import RankTraffic
from ddtrace_pytorch.runlog.reader import RankLog, read
from ddtrace_pytorch.stalls import history
from ddtrace_pytorch.stalls.history import History
from ddtrace_pytorch.timeline.crew import each, workers_for

TYPES = ("step", "scalar", "summary", *history.TYPES)


@dataclass
class RankView:
    """Of one log. `history` is for the diagnosis."""

    history: History
    row: Row = field(default_factory=Row)
    traffic: RankTraffic = field(default_factory=RankTraffic)
    series: AllSeries = field(default_factory=AllSeries)

    def add(self, record: Mapping[str, Any]) -> None:
        """The next record of the log."""
        kind = record["type"]
        if kind == "step":
            self.row.add(record)
        elif kind == "scalar":
            self.series.add(record)
        elif kind == "summary":
            if record.get("name") == SUMMARY:
                self.traffic.add(record)
        else:
            self.history.add(record)


@dataclass
class View:
    """Of one attempt, by rank."""

    rows: dict[int, Row] = field(default_factory=dict)
    traffic: dict[int, RankTraffic] = field(default_factory=dict)
    series: AllSeries = field(default_factory=AllSeries)
    histories: list[History] = field(default_factory=list)

    def add(self, rank: int, one: RankView) -> None:
        """What the next log of the attempt, which is of `rank`, came to."""
        if rank in self.rows:
            self.rows[rank].bins.pour(one.row.bins)
        else:
            self.rows[rank] = one.row
        self.traffic.setdefault(rank, one.traffic)
        self.series.pour(one.series)
        self.histories.append(one.history)


def gather(logs: Sequence[RankLog]) -> View:
    """Read the `logs` of one attempt, by as many processes as is worth it."""
    view = View()

    def of_log(at: int) -> RankView:
        log = logs[at]
        one = RankView(History(log.rank, log.identity))
        # What can't be read in there has been noted when it was read for the first time.
        for record in read(replace(log, notes=[]), TYPES):
            one.add(record)
        return one

    size = sum(os.path.getsize(path) for log in logs for path in log.segments if os.path.exists(path))
    for log, one in zip(logs, each(of_log, len(logs), workers_for(size)), strict=True):
        view.add(log.rank, one)
    return view
