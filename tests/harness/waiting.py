"""Waiting for a condition with a deadline, the only kind of waiting the tests do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], timeout: float, what: str) -> T:
    """The first truthy value of `condition`; AssertionError naming `what` if there is none in `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.02)


def blocked_in_cpp(pid: int) -> bool:
    """Whether the main thread of process `pid` has used no processor time for a while: it waits, and not in Python."""

    def used() -> int:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = used()
    time.sleep(0.5)
    return used() == before
