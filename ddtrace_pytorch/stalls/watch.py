"""Notices what has been under way for too long, and when it ends after all. Pure: it is told the time.

All times are nanoseconds on the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

SECOND = 1_000_000_000
# Of an operation's own 99th percentile on its group.
PATIENCE = 8

# Of a call that is under way: what stays as it is meanwhile.
Identity = tuple[str, str, int]


class Pending(NamedTuple):
    """A collective that this rank is in or waits for. `group` is torch's name, `key` the collective's number there (0:
    it has none), `limit` how long it may take. `unseen`: torch issued it itself, and nobody of ours sees
    it raise; `step`: the one that was under way."""

    group: str
    label: str
    operation: str
    key: int
    since: int
    limit: int
    unseen: bool = False
    step: int | None = None

    @property
    def identity(self) -> Identity:
        """Without the number, which may become known better, and the limit, which goes with other calls."""
        return self.group, self.operation, self.since


class Stalled(NamedTuple):
    """`pending` has `waited` so long: the `times`-th time that this is said of it."""

    pending: Pending
    waited: int
    times: int


class Over(NamedTuple):
    """`pending`, of which it was said that it stalled, came to its end; it `took` so long."""

    pending: Pending
    took: int


class Outcome(Enum):
    """How a call that took too long came to its end, as far as its rank knows."""

    WENT_ON = "went on"
    RAISED = "raised"
    UNKNOWN = "unknown"


def outcome(pending: Pending, raised: bool, ends: bool, step: int | None) -> Outcome:
    """`raised`: the rank saw that; `ends`: it ends by an exception; `step`: the one that it is in by now."""
    if raised:
        return Outcome.RAISED
    doubtful = ends or (pending.unseen and step == pending.step)
    return Outcome.UNKNOWN if doubtful else Outcome.WENT_ON


def limit(seconds: float, p99: int, timeout: int | None) -> int:
    """How long an operation may take: `seconds`, or more where it often takes long; never more than half of its
    group's own `timeout`, after which torch ends the job itself, unless half of that is less than a beat: nothing newer
    is known."""
    patience = max(round(seconds * SECOND), PATIENCE * p99)
    return patience if timeout is None else min(patience, max(SECOND, timeout // 2))


class Watch:
    """Says of each stall that it is there, again whenever it has doubled, and that it is over."""

    def __init__(self) -> None:
        # By identity: as it was last said, how often, and from what wait on again.
        self._said: dict[Identity, tuple[Pending, int, int]] = {}

    def look(self, pending: Iterable[Pending], now: int) -> tuple[list[Stalled], list[Over]]:
        """What stalls and is to be said at `now`, longest first, and what of the stalls that were said is over."""
        known, self._said = self._said, {}
        stalled = []
        for one in pending:
            waited = now - one.since
            said, times, due = known.pop(one.identity, (one, 0, one.limit))
            if waited >= due:
                said, times, due = one, times + 1, 2 * waited
                stalled.append(Stalled(one, waited, times))
            if times:
                self._said[one.identity] = said, times, due
        stalled.sort(key=lambda one: -one.waited)
        return stalled, [Over(one, now - one.since) for one, _, _ in known.values()]
