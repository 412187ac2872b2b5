"""The user's code near the interpreter's recursion limit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


def rooms() -> range:
    """How many calls may be left, from one on; or a few more."""
    return range(1, 60)


def with_room_for(calls: int, run: Callable[[], R]) -> R:
    """What `run` gives where it, and what it calls, may be that many calls deep, or a few more."""
    return _deeper(_left() - calls - 1, run)


def _deeper(more: int, run: Callable[[], R]) -> R:
    return _deeper(more - 1, run) if more else run()


def _left() -> int:
    """How many more calls the caller's caller may be deep."""
    low, high = 0, sys.getrecursionlimit()
    while low < high:
        middle = (low + high + 1) // 2
        try:
            _deeper(middle, int)
            low = middle
        except RecursionError:
            high = middle - 1
    return low
