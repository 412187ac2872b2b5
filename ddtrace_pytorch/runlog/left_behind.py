"""What earlier sessions of this process have left on disk: it counts against the caps of those that follow.

A process may make its process group anew as often as it likes, and each life has a log, and traces, of its own. Without
this a rank would have a cap for each, and no cap in all. What other processes have written, such as an earlier start of
the job, is never touched.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Left:
    """By one rank below one root, the oldest first: `segments` of run logs, and `traces`, the directories that have
    some."""

    segments: deque[Any] = field(default_factory=deque)
    traces: list[str] = field(default_factory=list)


class LeftBehind:
    """Of this process; a forked child has left nothing behind yet."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, str, int], Left] = {}

    def of(self, root: str, rank: int) -> Left:
        return self._left.setdefault((os.getpid(), os.path.abspath(root), rank), Left())
