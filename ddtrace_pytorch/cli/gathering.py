"""All that a report takes from the logs of one attempt: each log is read once, by as many processes as is worth it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from ddtrace_pytorch.cli import collectives, records, stalls, steps, windows
from ddtrace_pytorch.cli.page.gathering import RankView, Take, View
from ddtrace_pytorch.cli.progress import Progress
from ddtrace_pytorch.cli.stalls import Stalls
from ddtrace_pytorch.runlog.reader import RankLog, read, size_of
from ddtrace_pytorch.timeline.crew import each, workers_for

T = TypeVar("T")


@dataclass
class _OfLog:
    steps: steps.OfRank
    collectives: collectives.Gathering
    records: records.Gathering = field(default_factory=records.Gathering)
    stalls: Stalls = field(default_factory=Stalls)
    kernels: windows.Gathering = field(default_factory=partial(windows.Gathering, each_step=True))
    windows: windows.Gathering = field(default_factory=windows.Gathering)
    view: RankView | None = None

    def takers(self, rank: int) -> Mapping[str, Sequence[Take]]:
        """By type of record, who takes it."""
        all_of_them: list[tuple[Collection[str], Take]] = [
            (("step",), self.steps.add),
            (collectives.TYPES, partial(self.collectives.add, rank)),
            (records.TYPES, partial(self.records.add, rank)),
            (stalls.TYPES, partial(self.stalls.add, rank)),
            (windows.PROFILED, partial(self.windows.add, rank)),
            (windows.COUNTED, partial(self.kernels.add, rank)),
            *(() if self.view is None else self.view.takers()),
        ]
        found: defaultdict[str, list[Take]] = defaultdict(list)
        for types, take in all_of_them:
            for kind in types:
                found[kind].append(take)
        return found


@dataclass
class Gathered:
    """Of all ranks of an attempt."""

    steps: steps.Steps
    collectives: collectives.Collectives
    records: records.Recorded
    stalls: Stalls
    kernels: windows.Windows
    windows: windows.Windows


def gather(logs: Sequence[RankLog], calls: int, progress: Progress, view: View | None = None) -> Gathered:
    """Of single calls the `calls` slowest are listed. What there is for pictures and the diagnosis is put into `view`,
    if that is wanted."""
    of_ranks = []
    talked, recorded, stalled = collectives.Gathering(calls), records.Gathering(), Stalls()
    profiled, counted = windows.Gathering(), windows.Gathering(each_step=True)

    def of_log(log: RankLog) -> _OfLog:
        one = _OfLog(
            steps.OfRank(log.rank), collectives.Gathering(calls), view=None if view is None else RankView.of(log)
        )
        # What can't be read in there has been noted when it was read for the first time.
        takers = one.takers(log.rank)
        for record in read(replace(log, notes=[]), takers, one.collectives.sift(log.rank)):
            for take in takers[record["type"]]:
                take(record)
        if one.steps.began_with is not None:
            one.collectives.began_with(one.steps.began_with)
        return one

    for done, (log, one) in enumerate(zip(logs, of_each(of_log, logs), strict=True), 1):
        of_ranks.append(one.steps)
        talked.pour(one.collectives)
        recorded.pour(one.records)
        stalled.pour(one.stalls)
        profiled.pour(one.windows)
        counted.pour(one.kernels)
        if view is not None and one.view is not None:
            view.add(log.rank, one.view)
        progress("reading", done, len(logs))
    return Gathered(steps.told(of_ranks), talked.told(), recorded.told(), stalled, counted.told(), profiled.told())


def of_each(task: Callable[[RankLog], T], logs: Sequence[RankLog]) -> Iterator[T]:
    """What `task` gives for each of the `logs`."""
    return each(lambda at: task(logs[at]), len(logs), workers_for(size_of(logs)))
