"""Which of a job's processes on this host says what any of them may have reason to say, and most often all have."""

from __future__ import annotations

import errno
import hashlib
import os
import socket

from ddtrace_pytorch.descriptors import high

# What a launcher gives all ranks alike, whichever it is.
_OF_THE_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid")


def is_first(what: str) -> bool:
    """Whether no other process of the job that lives, on this host, has asked that of `what`.

    By the name of an abstract Unix socket: it goes with the process, and leaves nothing behind. Where no launcher says
    which processes are of one job, each is the first.
    """
    job = [os.environ.get(name, "") for name in _OF_THE_JOB]
    if not any(job):
        return True
    asked = hashlib.sha256(repr((os.geteuid(), job, what)).encode(errors="replace")).hexdigest()
    try:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        return True
    with held:
        try:
            held.bind(f"\0ddtrace-pytorch-first-{asked[:32]}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        # Kept until the process ends. As a number alone: user code may close it, and somebody else have it then.
        high(held.detach())
    return True
