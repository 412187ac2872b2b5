"""Which of a job's processes on this host says what any of them may have reason to say, and most often all have."""

from __future__ import annotations

import errno
import hashlib
import os
import socket

from ddtrace_pytorch.descriptors import high

# What a launcher gives all ranks alike, whichever it is.
_OF_THE_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid")

# The sockets whose names this process has, by number, and which file each was: as a number alone, for user code may
# close it, and somebody else have it then.
_held: dict[int, tuple[int, int]] = {}


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
        # Kept until the process ends.
        number = high(held.detach())
        _held[number] = _identity(number)
    return True


def _identity(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_dev, found.st_ino


def _let_go() -> None:
    """In a forked child, which may live longer than its parent: the names are the parent's."""
    while _held:
        number, identity = _held.popitem()
        try:
            if _identity(number) == identity:
                os.close(number)
        except OSError:
            pass  # closed already


os.register_at_fork(after_in_child=_let_go)
