"""Which logs are of one start of a job, and in which order its starts come. Pure, but that :func:`join` changes logs.

Ranks learn their incarnation from rank 0, in the process group's store. Where a group never came to be, as where a
start can't connect, each has made one of its own. The launcher has counted them alike, though: such a rank, alone in
its incarnation, belongs to those of the same count, if it isn't among them, and began at about the same time. Others
may be of a job that was started anew under the same names.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from ddtrace_pytorch.runlog.fields import integer, mapping, text
from ddtrace_pytorch.runlog.reader import RankLog
from ddtrace_pytorch.stalls.telling import in_words

# As long as torch itself waits for a group at most, by default.
NEAR_NS = 30 * 60 * 10**9


class Start(NamedTuple):
    incarnation: str
    logs: list[RankLog]


class InOrder(NamedTuple):
    """The starts of one job, in order of time: the attempts of the `training`, and what ran `beside` it, which is
    numbered behind all of them."""

    training: list[Start]
    beside: list[Start]

    @property
    def all(self) -> list[Start]:
        return self.training + self.beside


def in_order(logs: Iterable[RankLog]) -> InOrder:
    """The starts that the `logs` of one job are of."""
    found: dict[str, list[RankLog]] = {}
    for log in logs:
        found.setdefault(log.incarnation, []).append(log)
    starts = [Start(*one) for one in found.items()]
    starts.sort(key=lambda start: (min(log.began for log in start.logs), start.incarnation))
    trains = [any(log.trains for log in start.logs) for start in starts]
    return InOrder(
        [start for start, those in zip(starts, trains, strict=True) if those],
        [start for start, those in zip(starts, trains, strict=True) if not those],
    )


def join(logs: Iterable[RankLog]) -> list[str]:
    """Give those their incarnation that belong to another one's start; says of which that is so."""
    starts: dict[Hashable, dict[str, list[RankLog]]] = {}
    for log in logs:
        count = _counted(log)
        if count is not None:
            starts.setdefault(count, {}).setdefault(log.incarnation, []).append(log)
    notes = []
    for alike in starts.values():
        for incarnation, ranks in _joined(list(alike.values())).items():
            notes.append(
                f"{in_words(sorted(ranks))} had no group with the others of {incarnation}: taken to be of one attempt "
                "with them, for the launcher counted them alike"
            )
    return notes


def _counted(log: RankLog) -> Hashable | None:
    """What all ranks of one start have in common; None where the launcher doesn't count, or there is one rank."""
    job = mapping(log.identity, "job")
    attempt, size = integer(job, "attempt"), integer(log.identity, "world_size")
    if attempt is None or size is None or size < 2:
        return None
    ids = json.dumps(mapping(job, "ids"), sort_keys=True)
    return log.job, attempt, size, text(log.identity, "source"), text(job, "launcher"), ids


def _joined(starts: Sequence[list[RankLog]]) -> dict[str, list[int]]:
    """By incarnation, the ranks that have been joined to it. The largest of the `starts` come first."""
    found: dict[str, list[int]] = {}
    kept: list[list[RankLog]] = []
    for logs in sorted(starts, key=lambda logs: (-len(logs), min(log.began for log in logs))):
        near = [one for one in kept if len(logs) == 1 and _may_be_of(logs[0], one)]
        if not near:
            kept.append(logs)
            continue
        (alone,) = logs
        nearest = min(near, key=lambda one: _apart(alone, one))
        alone.incarnation = nearest[0].incarnation
        nearest.append(alone)
        found.setdefault(alone.incarnation, []).append(alone.rank)
    return found


def _may_be_of(alone: RankLog, start: Sequence[RankLog]) -> bool:
    return _apart(alone, start) <= NEAR_NS and all(one.rank != alone.rank for one in start)


def _apart(alone: RankLog, start: Sequence[RankLog]) -> int:
    return min(abs(alone.began - one.began) for one in start)
