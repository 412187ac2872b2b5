"""The events of a profiler's results, the same for all releases of torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ddtrace_pytorch.kernels.aggregates import Event

# Beyond that the first ones have to do: whoever reads holds the interpreter.
MOST = 200_000
# After so many, other threads get their turn.
AT_A_TIME = 500


def many(results: Any) -> int:
    """How many events there are."""
    return len(results.events())


def events(results: Any) -> Iterator[Event]:
    """In the order in which they are given, with times in ns since the epoch; what has no times is left out."""
    for number, event in enumerate(results.events()[:MOST]):
        if number % AT_A_TIME == 0:
            time.sleep(0)
        start, took = times(event)
        if took < 0:
            continue
        on_gpu = "CPU" not in str(event.device_type())
        lane = event.device_resource_id() if on_gpu else event.start_thread_id()
        yield Event(_name(event), start, start + took, lane, on_gpu)


def times(event: Any) -> tuple[int, int]:
    """When it started, in ns since the epoch, and how long it took in ns."""
    if hasattr(event, "start_ns"):
        return event.start_ns(), event.duration_ns()
    return event.start_us() * 1000, event.duration_us() * 1000  # up to torch 2.3


def _name(event: Any) -> str:
    try:
        return str(event.name())
    except UnicodeDecodeError:  # nobody checks what a range is called
        return "(no UTF-8)"
