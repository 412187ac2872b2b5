"""What becomes of records that are made while there is no session: who is one opened for, and who waits."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Mapping

from ddtrace_pytorch.identity import place

# A rank that has made no process group so long after its first record may never make one.
PATIENCE_SECONDS = 30.0
TRAINER = "trainer"


class Before:
    """The time until the first session of a process."""

    def __init__(self, source: str) -> None:
        """`source`: what this process is for."""
        self._source = source
        self._since: float | None = None

    def is_over(self, environ: Mapping[str, str]) -> bool:
        """Whether a session is to be opened for the record that was made just now.

        Not at once where this process may be one of several that are about to make a process group, whose session is
        then the right one.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if self._source != TRAINER or not may_be_one_of_several(environ):
            return True
        return now - self._since > PATIENCE_SECONDS


def may_be_one_of_several(environ: Mapping[str, str]) -> bool:
    """Whether a launcher, or another process of Python's, has started this one beside others."""
    return launched_beside_others(environ) or multiprocessing.parent_process() is not None


def launched_beside_others(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has said which of its processes this is."""
    hints = (place.rank_hint(environ), place.world_size_hint(environ), place.local_rank_hint(environ))
    return any(number is not None for number, _ in hints)


def works_for_a_loader() -> bool:
    """Whether this process loads data for another."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
