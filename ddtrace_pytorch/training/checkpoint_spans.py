"""Tells of checkpoints: of each that matters by itself, of small ones that come in crowds together.

A small operation that follows one of its kind within a second is held, and counted into the next span of its kind; what
is still held when totals are told, or the session ends, is told then. Sums over the spans' ``checkpoint.count``,
``checkpoint.bytes`` and ``checkpoint.ms`` are those over all operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddtrace_pytorch.rank_span import Piece
from ddtrace_pytorch.spans import Fact
from ddtrace_pytorch.training.checkpoint_target import Size

NAME = "pytorch.checkpoint"

# In ns. An operation that takes this long can't come in crowds.
LONG = 100_000_000
APART = 1_000_000_000


@dataclass(frozen=True)
class Checkpoint:
    """One operation that is over. `began` and `ended`: readings of time.monotonic_ns(); `step`: its number."""

    op: str
    kind: str
    path: str | None
    resource: str
    began: int
    ended: int
    under: Piece
    step: int | None = None
    size: Size | None = None
    failure: Mapping[str, str] | None = None  # ddtrace's tags for the exception; that would keep frames alive
    more: Mapping[str, Fact] = field(default_factory=dict)

    def facts(self, crowd: _Crowd) -> dict[str, Fact]:
        facts: dict[str, Fact] = {
            "checkpoint.op": self.op,
            "checkpoint.kind": self.kind,
            "checkpoint.count": crowd.count,
            "checkpoint.ms": crowd.duration / 1e6,
        }
        if self.path is not None:
            facts["checkpoint.path"] = self.path
        if self.size is not None:
            facts |= {"checkpoint.bytes": crowd.bytes, "checkpoint.bytes_of": self.size.of}
        if self.step is not None:
            facts["step"] = self.step
        return {**facts, **self.more, **(self.failure or {})}


class _Crowd:
    """Operations of one kind since the last of them was told of."""

    def __init__(self) -> None:
        self.told_at = -APART
        self.begin_anew()

    def begin_anew(self) -> None:
        self.last: Checkpoint | None = None
        self.count = 0
        self.bytes = 0
        self.duration = 0

    def add(self, one: Checkpoint) -> None:
        self.last = one
        self.count += 1
        self.duration += one.ended - one.began
        if one.size is not None:
            self.bytes += one.size.bytes


class InBackground(Protocol):
    """An operation that goes on when the function that began it has returned."""

    def session_ends(self) -> None: ...


class Checkpoints:
    """Those of one session; from any thread."""

    def __init__(self, tell: Callable[..., Any]) -> None:
        """`tell`: as :meth:`ddtrace_pytorch.session.Session.tell`."""
        self._tell = tell
        # A signal handler that saves may come in the midst of it, on the same thread.
        self._lock = threading.RLock()
        self._crowds: dict[tuple[str, bool], _Crowd] = {}
        self.in_background: list[InBackground] = []

    def ended(self, one: Checkpoint) -> None:
        """An operation is over."""
        with self._lock:
            crowd = self._crowds.setdefault((one.op, one.failure is not None), _Crowd())
            crowd.add(one)
            if one.ended - one.began >= LONG or one.ended - crowd.told_at >= APART:
                self._tell_of(crowd)

    def close(self) -> None:
        """The session ends: tell of what still goes on, and of all that is held."""
        for one in tuple(self.in_background):
            one.session_ends()
        self.settle()

    def settle(self) -> None:
        """Tell of all that is held."""
        with self._lock:
            for crowd in self._crowds.values():
                self._tell_of(crowd)

    def _tell_of(self, crowd: _Crowd) -> None:
        one = crowd.last
        if one is None:
            return
        facts = one.facts(crowd)
        crowd.told_at = one.ended
        crowd.begin_anew()
        self._tell(NAME, one.resource, one.began, one.ended - one.began, facts, one.failure is not None, one.under)
