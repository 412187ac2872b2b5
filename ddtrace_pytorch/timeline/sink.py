"""What a timeline is written into, whatever its format. Times are ns on the clock that all processes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ddtrace_pytorch.timeline.arrows import Point


class Line(NamedTuple):
    """One line of a process on which things are drawn; `id` is of no other process, either."""

    process: int
    id: int


class Sink(Protocol):
    written: int
    """Bytes, before they are compressed."""

    def process(self, process: int, name: str, place: int) -> None: ...

    def line(self, line: Line, name: str, place: int) -> None: ...

    def slice(
        self, line: Line, name: str, start: int, end: int, facts: Mapping[str, Any], point: Point | None
    ) -> None: ...

    def moment(self, line: Line, name: str, ts: int, facts: Mapping[str, Any], wide: bool) -> None: ...

    def count(self, process: int, name: str, ts: int, values: Mapping[str, float]) -> None: ...

    def close(self, about: Mapping[str, Any]) -> None: ...
