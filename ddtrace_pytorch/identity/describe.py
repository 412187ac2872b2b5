"""What a rank says of itself: the facts its span opens with, and the run log's identity record.

Pure: all that is needed is handed in.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ddtrace

from ddtrace_pytorch._version import __version__
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.identity import runtime
from ddtrace_pytorch.identity.device import Device
from ddtrace_pytorch.identity.introduction import Introduced
from ddtrace_pytorch.identity.job import Job
from ddtrace_pytorch.identity.values import clean
from ddtrace_pytorch.runlog.schema import SCHEMA_VERSION
from ddtrace_pytorch.spans import Fact


@dataclass(frozen=True)
class Member:
    """This process' place in a process group. A single process is rank 0 of 1 without backend and store."""

    rank: int
    world_size: int
    backend: str | None = None
    store: Any | None = None
    # How many groups this process had before, and the job id that was made up for them, if one was.
    ordinal: int = 0
    generated_id: str | None = None
    # False where a rendezvous failed before this process knew which rank of how many it is.
    place_known: bool = True
    # torch's device index, where the user's code has already chosen one.
    device_index: int | None = None


def opening_facts(
    member: Member, job: Job, host: str, instrument: str, environ: Mapping[str, str], torch: Any | None
) -> dict[str, Fact]:
    """Everything the rank span can say of this rank at once; `torch` is the imported module, if it is."""
    facts: dict[str, Fact] = {
        "component": "pytorch",
        "framework": "none",
        "host": host,
        "pytorch.node": host,
        "pytorch.instrument": instrument,
        **job.ids,
        **job.tags,
        **runtime.environment_facts(environ),
    }
    if torch is not None:
        facts |= runtime.torch_facts(torch)
    optional = {
        "launcher": job.launcher,
        "pytorch.attempt": None if job.attempt is None else str(job.attempt),
        "torch.distributed.backend": member.backend,
    }
    facts |= {name: value for name, value in optional.items() if value is not None}
    if member.place_known:
        facts |= {"rank": member.rank, "world_size": member.world_size}
    if job.id is not None:
        facts |= job_facts(job.id, job.source or "")
    return facts


def purpose_facts(source: str, metadata: Iterable[tuple[str, str]]) -> dict[str, Fact]:
    """What the user says that this process is for, and by what else to know it."""
    facts: dict[str, Fact] = {"pytorch.source": clean(source)}
    return facts | {f"pytorch.metadata.{clean(key)}": clean(value) for key, value in metadata}


def introduced_facts(said: Introduced) -> dict[str, Fact]:
    """What the ranks agreed on."""
    return {**job_facts(said.job_id, said.source), "pytorch.incarnation": said.incarnation}


def job_facts(job_id: str, source: str) -> dict[str, Fact]:
    return {"training_job.id": job_id, "job_id": job_id, "training_job.id.source": source}


def identity_record(
    member: Member,
    job: Job,
    said: Introduced | None,
    device: Device | None,
    host: str,
    facts: Mapping[str, Fact],
    clock: Clock,
    torch: Any | None,
    log_ranks: str,
    collectives: str,
    source: str,
    metadata: Mapping[str, str],
) -> dict[str, Any]:
    """The run log's record of type ``identity``, as things stand; `said` is None until the ranks have agreed.

    `log_ranks` is the text that chose this rank, and perhaps not others, to write a log; `collectives` the word that
    says how much is told of them; `source` what this process is for; `metadata` the user's own.
    """
    now = clock.now()
    return {
        "type": "identity",
        "schema": SCHEMA_VERSION,
        "ts": now,
        "mono": clock.monotonic(now),
        "rank": member.rank,
        "world_size": member.world_size,
        "host": host,
        "node": host,
        "pid": os.getpid(),
        "source": source,
        "metadata": dict(metadata),
        "log_ranks": log_ranks,
        "collectives": collectives,
        "job": {
            "id": said.job_id if said else job.id,
            "source": said.source if said else job.source,
            "attempt": job.attempt,
            "incarnation": said.incarnation if said else None,
            "launcher": job.launcher,
            "ids": job.ids,
        },
        "device": None if device is None else device.tags(host),
        "tags": dict(facts),
        "versions": {
            "ddtrace_pytorch": __version__,
            "ddtrace": ddtrace.__version__,
            "torch": str(getattr(torch, "__version__", "")),
            "python": platform.python_version(),
        },
    }
