"""Where file descriptors of ours are: out of the way of code that closes or counts upwards from 3."""

from __future__ import annotations

import fcntl
import os

HIGH_DESCRIPTOR = 512


def high(descriptor: int) -> int:
    """The same open file under a high number; `descriptor` is closed."""
    limit = os.sysconf("SC_OPEN_MAX")  # -1 where there is none
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, min(HIGH_DESCRIPTOR, limit // 2)))
    finally:
        os.close(descriptor)
