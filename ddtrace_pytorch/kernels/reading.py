"""The events of a profiler's results, the same for all releases of torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ddtrace_pytorch.kernels.aggregates import Event

T = TypeVar("T")

# Beyond that the first ones have to do: whoever reads holds the interpreter.
MOST = 200_000
# After so many, other threads get their turn.
AT_A_TIME = 500
_CPU = 0


class Recorded:
    """What torch's profiler has recorded."""

    def __init__(self, results: Any) -> None:
        self._results = results

    def read(self, ahead: int) -> tuple[int, Iterator[Event]]:
        """How many events there are, and those that count, with times on the clock that the system's is `ahead` of."""
        found = self._results.events()  # which takes its time at each call
        return len(found), events(found, ahead)

    def missing(self) -> None:
        """torch doesn't say what it has lost."""

    def save(self, path: str) -> None:
        """Write the trace."""
        self._results.save(path)


def events(found: Sequence[Any], ahead: int = 0) -> Iterator[Event]:
    """Of what a profiler's results have, those of the GPU; where there is none, all. In the order in which they are
    given, with times in ns on the clock that the system's is `ahead` of; what has no times is left out."""
    on_gpu = [event for event in giving_way(found) if int(event.device_type()) != _CPU]
    for event in giving_way((on_gpu or found)[:MOST]):
        start, took = times(event)
        if took >= 0:
            start -= ahead
            lane = event.device_resource_id() if on_gpu else event.start_thread_id()
            yield Event(_name(event), start, start + took, lane, bool(on_gpu))


def times(event: Any) -> tuple[int, int]:
    """When it started, in ns since the epoch, and how long it took in ns."""
    if hasattr(event, "start_ns"):
        return event.start_ns(), event.duration_ns()
    return event.start_us() * 1000, event.duration_us() * 1000  # up to torch 2.3


def giving_way(found: Iterable[T]) -> Iterator[T]:
    """All of them, with turns for other threads in between."""
    for number, one in enumerate(found):
        if number % AT_A_TIME == 0:
            time.sleep(0)
        yield one


def _name(event: Any) -> str:
    try:
        return str(event.name())
    except UnicodeDecodeError:  # nobody checks what a range is called
        return "(no UTF-8)"
