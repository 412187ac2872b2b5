"""What processes of one job on this host know of each other before they have met: who is first, and who is there.

By the names of abstract Unix sockets: these go with the process, and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
from collections.abc import Iterator

from ddtrace_pytorch.descriptors import high

# What a launcher gives all ranks alike, whichever it is.
_OF_THE_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid")

# The sockets whose names this process has, by number, and which file each was: as a number alone, for user code may
# close it, and somebody else have it then.
_held: dict[int, tuple[int, int]] = {}


def is_first(what: str) -> bool:
    """Whether no other process of the job that lives, on this host, has asked that of `what`. Which of them says what
    any may have reason to say, and most often all have.

    Where no launcher says which processes are of one job, each is the first.
    """
    if not is_of_a_job():
        return True
    try:
        _hold(f"first-{what}")  # until the process ends
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def is_of_a_job() -> bool:
    """Whether a launcher says which processes are of one job with this one."""
    return any(os.environ.get(name) for name in _OF_THE_JOB)


@contextlib.contextmanager
def present(what: str) -> Iterator[None]:
    """For as long as the block runs, the others find this process as `what`, or another one that was it before."""
    try:
        number = _hold(what)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        _let_go_of(number, _held.pop(number, None))


def is_present(what: str) -> bool:
    """Whether a process of the job is :func:`present` on this host as `what`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asks:
        return asks.connect_ex(_name(what)) == 0


def _name(what: str) -> str:
    job = [os.environ.get(name, "") for name in _OF_THE_JOB]
    asked = hashlib.sha256(repr((os.geteuid(), job, what)).encode(errors="replace")).hexdigest()
    return f"\0ddtrace-pytorch-{asked[:32]}"


def _hold(what: str) -> int:
    """Have the name of `what`; gives the number of the socket that has it.

    Raises:
        OSError: another process has it, or there are no sockets to be had.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        held.bind(_name(what))
        number = high(held.detach())
    _held[number] = _identity(number)
    return number


def _identity(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_dev, found.st_ino


def _let_go_of(number: int, identity: tuple[int, int] | None) -> None:
    try:
        if _identity(number) == identity:
            os.close(number)
    except OSError:
        pass  # closed already


def _let_go() -> None:
    """In a forked child, which may live longer than its parent: the names are the parent's."""
    while _held:
        _let_go_of(*_held.popitem())


os.register_at_fork(after_in_child=_let_go)
