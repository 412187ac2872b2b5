"""What one thread leaves for another, where at the end a second one may come for it: no lock is waited for."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def all_of(held: deque[T]) -> list[T]:
    """Takes what there is now; where another thread takes too, each is given once."""
    taken: list[T] = []
    with suppress(IndexError):
        for _ in range(len(held)):
            taken.append(held.popleft())  # noqa: PERF401
    return taken
