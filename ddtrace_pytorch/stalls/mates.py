"""The ranks of one incarnation of a job that are on this host, as their state files tell."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddtrace_pytorch.stalls import last_words, places, state_file
from ddtrace_pytorch.stalls.last_words import LastWords
from ddtrace_pytorch.stalls.roll import Life, RankState
from ddtrace_pytorch.stalls.state_file import LOCK, STATE

# ns without a beat after which a rank that lives is silent. A loaded machine delays beats by a second or two.
SILENT_NS = 4 * 10**9


class Mates:
    """Reads them, this rank's own among them: about 0.1 ms each."""

    def __init__(self, roots: Sequence[str], job: str, incarnation: str, host: str) -> None:
        self._folders = [places.folder(root, job, incarnation) for root in roots]
        self._host = host
        self._met: set[int] = set()

    def meet(self) -> None:
        """See who is there now. Whoever was met and has no file any more has ended."""
        self._met |= {places.rank_of(lock) for lock in self._locks()}

    def states(self) -> dict[int, RankState]:
        """Each rank's state, as alive as it was found; of one that was never met there is none."""
        there = {state.rank: state for lock in self._locks() if (state := read(lock)) is not None}
        gone = {rank: RankState(rank, self._host, life=Life.ENDED) for rank in self._met - there.keys()}
        self._met |= there.keys()
        return gone | there

    def _locks(self) -> Iterator[str]:
        for folder in self._folders:
            yield from (os.path.join(folder, file) for file in places.entries(folder) if places.is_lock(file))


def read(lock: str) -> RankState | None:
    """The state of the rank whose lock file that is, as of its last beat; None if there is none that can be read."""
    # Before the state is read: a rank that dies in between has left one that is whole.
    alive = state_file.is_alive(lock)
    left, entered = state_file.read(lock.removesuffix(LOCK) + STATE)
    try:
        words = last_words.decode(left, entered) if left is not None else None
    except ValueError:
        words = None
    return as_found(words, alive) if words is not None else None


def as_found(words: LastWords, alive: bool) -> RankState:
    """The state that a rank left, with the life that it was found in; `alive`: its process is there."""
    if words.ended:
        return words.state
    if not alive:
        return replace(words.state, life=Life.DEAD)
    return replace(words.state, life=Life.SILENT if _since_beat(words) > SILENT_NS else Life.ALIVE)


def _since_beat(words: LastWords) -> int:
    """ns, by the clock that all processes of a host share where that is known: the wall's may have been moved since the
    rank looked at it."""
    clock, beat = words.legend.clock, words.state.as_of
    return time.monotonic_ns() - (beat - clock) if clock else time.time_ns() - beat
