"""What a timeline is written into, whatever its format. Times are ns on the clock that all processes share.

A file is what a :class:`Format` begins it with, then the parts that a :class:`Sink` each writes, and the end. Formats
have microseconds as floats, in which those since the epoch have no nanoseconds: so they count from `zero`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ddtrace_pytorch.timeline.arrows import Point


class Line(NamedTuple):
    """One line of a process on which things are drawn; `id` is of no other process, either. Lines are shown in its
    order, as processes are in that of their numbers."""

    process: int
    id: int


class Sink(Protocol):
    """Takes one process: first itself, then its lines, each before what is on it."""

    def process(self, process: int, name: str) -> None: ...

    def line(self, line: Line, name: str) -> None: ...

    def slice(
        self, line: Line, name: str, start: int, end: int, facts: Mapping[str, Any], point: Point | None
    ) -> None: ...

    def moment(self, line: Line, name: str, ts: int, facts: Mapping[str, Any], wide: bool) -> None: ...

    def count(self, process: int, name: str, ts: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Out(Protocol):
    def write(self, data: bytes, /) -> int: ...


class Format(Protocol):
    def begin(self, zero: int) -> bytes: ...

    @property
    def between(self) -> bytes: ...

    def end(self, about: Mapping[str, Any]) -> bytes: ...

    def sink(self, file: Out, zero: int) -> Sink: ...
