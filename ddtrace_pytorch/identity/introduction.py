"""How the ranks of one process group come to the same job id and incarnation.

Rank 0 says both where the ranks meet; the others listen on a thread of their own, so the training thread waits for
nobody.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from ddtrace_pytorch.border import warn_once
from ddtrace_pytorch.identity.job import Job
from ddtrace_pytorch.identity.meeting import Meeting

GENERATED = "generated"

# A rank that has heard nothing by then goes on under an incarnation of its own.
PATIENCE_SECONDS = 30.0
# At the end of a session the word is worth this much waiting: rank 0 said it at its start.
LAST_LOOK_SECONDS = 0.5

WORD = "introduction"


class Introduced(NamedTuple):
    """What the ranks agreed on. `source` says where the id is from: a variable's name or :data:`GENERATED`."""

    job_id: str
    source: str
    incarnation: str


def new_incarnation() -> str:
    """A sortable id: UTC start, then random."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(4)


class Introduction:
    """Runs :meth:`agree` on the store thread."""

    def __init__(self, job: Job, rank: int, meeting: Meeting, generated_id: str | None = None) -> None:
        """`generated_id` is what an earlier session of this process was given."""
        self._job = job
        self._rank = rank
        self._meeting = meeting
        # What this rank goes under if it has to decide by itself, and what rank 0 tells the others.
        self.own = Introduced(
            job_id=job.id or generated_id or "job-" + secrets.token_hex(6),
            source=job.source or GENERATED,
            incarnation=new_incarnation(),
        )

    def agree(self, meanwhile: Callable[[], None]) -> Introduced:
        """Agree with the other ranks. `meanwhile` is done once, after rank 0 has spoken and before others listen.

        The very object :attr:`own` on rank 0, and where nothing was heard of it.
        """
        own = self.own
        if self._meeting.alone:
            meanwhile()
            return own
        try:
            if self._rank == 0:
                self._meeting.say(WORD, json.dumps(own._asdict()))
                meanwhile()
                return own
            meanwhile()
            return self._listen()
        except Exception as error:
            # Stores raise their own kinds (a vanished host, a closed client); alone is then the honest answer.
            why = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            warn_once(f"the process group's store did not let the ranks agree on an id; this rank's is its own ({why})")
            return own

    def _listen(self) -> Introduced:
        heard = self._meeting.hear(WORD, PATIENCE_SECONDS, LAST_LOOK_SECONDS)
        if heard is None:
            warn_once(f"rank 0 said no job id and no incarnation; rank {self._rank} goes on under its own")
            return self.own
        said = json.loads(heard)
        return Introduced(
            job_id=self._job.id or said["job_id"],
            source=self._job.source or said["source"],
            incarnation=said["incarnation"],
        )
