"""All that the page's pictures, and the diagnosis, take from the logs of one attempt. Pure.

What is kept does not go with the length of the logs: bins for steps and scalars, totals for groups, the end of each
rank's history.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtrace_pytorch.cli.page.heat import Row
from ddtrace_pytorch.cli.page.series import AllSeries
from ddtrace_pytorch.cli.page.traffic import RankTraffic
from ddtrace_pytorch.collectives.telling import SUMMARY
from ddtrace_pytorch.runlog.reader import RankLog
from ddtrace_pytorch.stalls import history
from ddtrace_pytorch.stalls.history import History

Take = Callable[[Mapping[str, Any]], None]


@dataclass
class RankView:
    """Of one log. `history` is for the diagnosis."""

    history: History
    row: Row = field(default_factory=Row)
    traffic: RankTraffic = field(default_factory=RankTraffic)
    series: AllSeries = field(default_factory=AllSeries)

    @classmethod
    def of(cls, log: RankLog) -> RankView:
        return cls(History(log.rank, log.identity))

    def takers(self) -> Sequence[tuple[Collection[str], Take]]:
        """Who takes the records of which types, in the order of the log."""
        return (
            (("step",), self.row.add),
            (("scalar",), self.series.add),
            (("summary",), self._summary),
            (history.TYPES, self.history.add),
        )

    def _summary(self, record: Mapping[str, Any]) -> None:
        if record.get("name") == SUMMARY:
            self.traffic.add(record)


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
            self.traffic[rank].pour(one.traffic)
        else:
            self.rows[rank], self.traffic[rank] = one.row, one.traffic
        self.series.pour(one.series)
        self.histories.append(one.history)
