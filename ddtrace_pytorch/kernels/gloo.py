"""Whether gloo's threads are done with what was issued while a profiler was on.

Each of them ends a range of the profiler's behind the collective that it ran, and whoever waited for that may be woken
before. A profiler that is switched off meanwhile has given away the memory which is written to then: torch 2.13 with
gloo dies of that, once in some hundred windows on a busy machine (*ran*, with a core).
"""

from __future__ import annotations

import time
from typing import Any

from ddtrace_pytorch.collectives.flight_recorder import FlightRecorder

_INTERVAL = 0.002


def is_done(torch: Any, since: int, patience: float) -> bool:
    """Whether all that was issued since then (ns since the epoch) is done with, within some `patience` seconds. True
    also where torch has no recorder of gloo's, or it is off: nobody can tell there."""
    recorder = FlightRecorder(getattr(torch._C, "_distributed_c10d", None))
    deadline = time.monotonic() + patience
    while recorder.gloo_is_busy(since):
        if time.monotonic() > deadline:
            return False
        time.sleep(_INTERVAL)
    return True
