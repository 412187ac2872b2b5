"""Adds to the run log of a rank that is gone: a further segment, and not a byte to a file that the rank wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ddtrace_pytorch.runlog.fields import integer
from ddtrace_pytorch.runlog.reader import RankLog, scan
from ddtrace_pytorch.runlog.schema import encode, parse_name


def find_log(directory: str, job: str, incarnation: str, rank: int, host: str, pid: int) -> RankLog | None:
    """The log that this very process wrote, at or below `directory`; None if there is none."""
    try:
        logs = scan(directory).logs
    except OSError:
        return None
    who = (job, incarnation, rank, host, pid)
    for log in logs:
        if (log.job, log.incarnation, log.rank, log.host, integer(log.identity, "pid")) == who and not log.damaged:
            return log
    return None


def append(log: RankLog, records: Iterable[Mapping[str, Any]]) -> str:
    """Write `records` as the next segment of `log`; gives its path.

    Raises:
        OSError: it can't be written, or is there already.
    """
    last = log.segments[-1]
    name = parse_name(os.path.basename(last))
    assert name is not None, last
    name = name._replace(segment=name.segment + 1, compressed=False)
    lines = [encode({**log.identity, "segment": name.segment}), *map(encode, records)]
    path = os.path.join(os.path.dirname(last), str(name))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(b"".join(lines))
    except BaseException:
        os.unlink(path)
        raise
    return path
