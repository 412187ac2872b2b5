"""Collectives that no function of ours issued and that have not come to their end, by torch's flight recorder.

A look at its status costs some microseconds, and only hints: a group of gloo that is idle may seem to be behind. What
is really under way the recorder's entries tell, which are read only where a group has seemed so for long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ddtrace_pytorch.collectives.flight_recorder import Entry, FlightRecorder, Status


class Lag(NamedTuple):
    """A group of the recorder's that has not got beyond `completed` since then, in ns on the monotonic clock."""

    completed: int
    since: int


class Unfinished:
    """Looked at once a beat, by one thread; asked by any."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._lags: dict[str, Lag] = {}
        self._seen: dict[str, Lag] = {}
        self._entries: dict[str, tuple[Entry, ...]] = {}
        # Whether the recorder has told of nothing yet, as it does of everything once it has a buffer.
        self.blind = True

    def beat(self, now: int) -> None:
        """Look how far the groups have come."""
        lags, told = {}, self._recorder.status()
        self.blind = not told
        for recorded, status in told.items():
            if _is_behind(status):
                known = self._lags.get(recorded)
                lags[recorded] = known if known and known.completed == status.completed else Lag(status.completed, now)
        self._lags = lags
        self._forget()

    def suspicious(self, now: int, patience: int) -> bool:
        """Whether a group has been behind for `patience` ns, and its entries haven't been read since."""
        return any(now - lag.since >= patience and self._seen.get(name) != lag for name, lag in self._lags.items())

    def read(self) -> Mapping[str, tuple[Entry, ...]]:
        """Read the entries, and give them by group, in order: takes tens of milliseconds, not for a thread that trains
        nor the Pulse."""
        self._seen = dict(self._lags)
        entries: dict[str, list[Entry]] = {}
        for entry in self._recorder.dump().entries:
            entries.setdefault(entry.group, []).append(entry)
        found = {name: tuple(sorted(some, key=lambda one: one.number)) for name, some in entries.items()}
        self._entries = found
        return found

    def of(self, group: str) -> tuple[Entry, int] | None:
        """Of the group of that name: the first collective that hasn't ended, and how many were issued after it; None
        where all have, as far as was read."""
        entries = [entry for entry in self._entries.get(group, ()) if not entry.p2p]
        for at, entry in enumerate(entries):
            if not entry.retired and str(entry.recorded) in self._lags:
                return entry, len(entries) - at - 1
        return None

    def _forget(self) -> None:
        """Entries of groups that have got on since they were read."""
        if self._entries and any(self._lags.get(name) != lag for name, lag in self._seen.items()):
            self._seen = {name: lag for name, lag in self._seen.items() if self._lags.get(name) == lag}
            self._entries = {
                name: some for name, some in self._entries.items() if some and str(some[0].recorded) in self._seen
            }


def _is_behind(status: Status) -> bool:
    return status.enqueued > status.completed
