"""Where the states of this user's ranks are on this host: ``<root>/<job id>/<incarnation>/rank-00003.state``.

The lock of each is beside it; the two folder names are made as the run log's are.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator

from ddtrace_pytorch.runlog.schema import safe_name
from ddtrace_pytorch.stalls.state_file import LOCK

MEMORY = "/dev/shm"
_LOCK = re.compile(r"rank-\d{1,9}" + re.escape(LOCK), re.ASCII)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


# Of the kernel that this process runs on: what another one has locked can't be seen from here.
BOOT = _boot_id()


def roots(chosen: str | None) -> tuple[str, ...]:
    """The directories to try, best first: in `chosen` alone, or else in memory and in the temporary directory.

    Not the run log's own, which may be there too: a reader of run logs would stumble over these.
    """
    places = (chosen,) if chosen else (MEMORY, *_temporary())
    return tuple(os.path.join(place, f"ddtrace-pytorch-state-{os.geteuid()}") for place in places)


def _temporary() -> tuple[str, ...]:
    try:
        return (tempfile.gettempdir(),)
    except FileNotFoundError:
        return ()


def folder(root: str, job: str, incarnation: str) -> str:
    """Where the ranks of one incarnation of a job are."""
    return os.path.join(root, safe_name(job), safe_name(incarnation))


def name(rank: int) -> str:
    """What the files of `rank` are called, without their ending."""
    return f"rank-{rank:05d}"


def rank_of(path: str) -> int:
    """The rank whose file that is, one that :func:`is_lock` or a state."""
    return int(os.path.basename(path).partition(".")[0].removeprefix("rank-"))


def is_lock(file: str) -> bool:
    """Whether a file of that name is the lock of a rank."""
    return _LOCK.fullmatch(file) is not None


def locks(root: str) -> Iterator[str]:
    """The lock files of all states below `root`, which others may be clearing away."""
    for job in entries(root):
        for incarnation in entries(os.path.join(root, job)):
            where = os.path.join(root, job, incarnation)
            yield from (os.path.join(where, file) for file in entries(where) if is_lock(file))


def entries(directory: str) -> list[str]:
    """The names in a directory, in order; none if it can't be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
