"""Which logs of a job belong to the same attempt.

The ranks of one attempt of the training share an incarnation. Processes of another source (rollout, reward) have their
own: they belong to each attempt in whose time they were there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtrace_pytorch.runlog.reader import RankLog, read

# What says that a process was there, about as long as it was.
SIGNS = ("identity", "beat", "span")


@dataclass(frozen=True)
class Attempt:
    """`number` counts from 1 in order of time."""

    number: int
    incarnation: str
    logs: Sequence[RankLog]


def attempts_of(logs: Sequence[RankLog]) -> list[Attempt]:
    """The attempts of one job, in order of time."""
    trainers = [log for log in logs if log.trains] or logs
    ranks: dict[str, list[RankLog]] = {}
    for log in trainers:
        ranks.setdefault(log.incarnation, []).append(log)
    in_time = sorted(ranks.values(), key=lambda those: min(log.began for log in those))
    begun = [min(log.began for log in those) for those in in_time]

    inside = {id(log) for log in trainers}
    others = [log for log in logs if id(log) not in inside]
    for log in others:
        first, last = log.began, max((record["ts"] for record in read(log, SIGNS)), default=0)
        for at, those in enumerate(in_time):
            since = begun[at] if at else min(first, begun[0])
            until = begun[at + 1] if at + 1 < len(begun) else max(first, last)
            same = log.incarnation == those[0].incarnation
            if same or (first <= until and last >= since):
                those.append(log)
    return [Attempt(number, those[0].incarnation, those) for number, those in enumerate(in_time, 1)]
