"""How the ranks of one process group come to the same job id and incarnation.

Rank 0 writes both into the process group's own store; the others look for the key from a thread of their own, so
the training thread waits for nobody. The key carries the number of this init in the process and the restart count:
what an earlier session left in the store must not be taken for this one's.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ddtrace_pytorch.border import warn_once
from ddtrace_pytorch.identity.job import Job

GENERATED = "generated"

# A rank that has heard nothing by then goes on under an incarnation of its own.
PATIENCE_SECONDS = 30.0
# At the end of a session the key is worth this much waiting: rank 0 wrote it at its start.
LAST_LOOK_SECONDS = 0.5


class Introduced(NamedTuple):
    """What the ranks agreed on. `source` says where the id is from: a variable's name or :data:`GENERATED`."""

    job_id: str
    source: str
    incarnation: str


def key(ordinal: int, restart_count: str) -> str:
    """The store key of one session: `ordinal` counts the inits of this process."""
    return f"ddtrace_pytorch/introduction/{restart_count}/{ordinal}"


def new_incarnation() -> str:
    """A sortable id: UTC start, then random."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(4)


class Introduction:
    """Runs :meth:`agree` on the store thread; :meth:`hurry` makes it come to an end."""

    def __init__(
        self, job: Job, rank: int, world_size: int, store: Any | None, ordinal: int, generated_id: str | None = None
    ) -> None:
        """`ordinal` counts the inits of this process; `generated_id` is what an earlier session of it was given."""
        self._job = job
        self._rank = rank
        self._alone = world_size == 1 or store is None
        self._store: Any = None if self._alone else store
        self._key = key(ordinal, job.restart_count)
        self._said_key = self._key + "/said"
        self._hurry = threading.Event()
        # What this rank goes under if it has to decide by itself, and what rank 0 tells the others.
        self.own = Introduced(
            job_id=job.id or generated_id or "job-" + secrets.token_hex(6),
            source=job.source or GENERATED,
            incarnation=new_incarnation(),
        )

    def hurry(self) -> None:
        self._hurry.set()

    def agree(self, meanwhile: Callable[[], None]) -> Introduced:
        """Agree with the other ranks. `meanwhile` is done once, after rank 0 has spoken and before others listen."""
        own = self.own
        if self._alone:
            meanwhile()
            return own
        try:
            if self._rank == 0:
                message = {"job_id": own.job_id, "source": own.source, "incarnation": own.incarnation}
                self._store.set(self._key, json.dumps(message))
                if not hasattr(self._store, "check"):
                    self._store.add(self._said_key, 1)
                meanwhile()
                return own
            meanwhile()
            return self._listen(own)
        except Exception as error:
            # Stores raise their own kinds (a vanished host, a closed client); alone is then the honest answer.
            why = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            warn_once(f"the process group's store did not let the ranks agree on an id; this rank's is its own ({why})")
            return own
        finally:
            self._store = None

    def _said(self, store: Any) -> bool:
        # Before 2.2 a PrefixStore cannot be asked for a key without waiting for it, but a counter can be read.
        return bool(store.check([self._key]) if hasattr(store, "check") else store.add(self._said_key, 0))

    def _listen(self, own: Introduced) -> Introduced:
        # A connection of our own where there is one, so that a look never queues behind the user's own waiting.
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        deadline = time.monotonic() + PATIENCE_SECONDS
        pause = 0.01
        while not self._said(store):
            if self._hurry.is_set():
                deadline = min(deadline, time.monotonic() + LAST_LOOK_SECONDS)
            if time.monotonic() >= deadline:
                warn_once(f"rank 0 said no job id and no incarnation; rank {self._rank} goes on under its own")
                return own
            self._hurry.wait(pause)
            if self._hurry.is_set():
                time.sleep(0.01)
            pause = min(pause * 1.5, 0.5)
        said = json.loads(store.get(self._key))
        return Introduced(
            job_id=self._job.id or said["job_id"],
            source=self._job.source or said["source"],
            incarnation=said["incarnation"],
        )
