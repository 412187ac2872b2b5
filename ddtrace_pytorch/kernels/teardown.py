"""Kineto's parting from CUPTI: asked for, and waited for.

Where ``TEARDOWN_CUPTI=1``, the end of a profile starts a thread of Kineto's, which lets CUPTI go at the return of the
process' next call of CUDA. Until then the next profile records nothing (*ran*, torch 2.11: every other one of ten in
a row); and a process that makes no such call any more hangs at its end, for that thread waits on a condition whose
destructor waits for it. So a call is made, and the thread is awaited: one call and 2 to 3 ms, there.
"""

from __future__ import annotations

import os
import time
from typing import Any

from packaging.version import Version

from ddtrace_pytorch.border import safely

_VARIABLE = "TEARDOWN_CUPTI"
# Before that, torch itself doesn't dare to where CUDA graphs are used.
_SAFE_SINCE = Version("12.6")
_THREADS = "/proc/self/task"
# Seconds. Whatever else begins a thread at that moment is waited for as long.
_PATIENCE, _INTERVAL = 0.25, 0.0002


def ask_for(torch: Any) -> None:
    """Have CUPTI let go at the end of each profile from now on, unless the user has said anything about it.

    To be called before the first profile in this process: after one that left CUPTI attached, the next is empty, and
    what its end starts never ends.
    """
    if torch.version.cuda is not None and Version(torch.version.cuda) >= _SAFE_SINCE:
        os.environ.setdefault(_VARIABLE, "1")


@safely("list this process' threads")
def threads(torch: Any) -> set[str] | None:
    """Before a profile ends: what :func:`wait` is to be given; None where there is nothing to wait for."""
    return set(os.listdir(_THREADS)) if torch.cuda.is_initialized() else None


@safely("wait until CUPTI is torn down")
def wait(torch: Any, before: set[str] | None) -> None:
    """Until it has let go: on whichever thread has just ended a profile."""
    if before is None:
        return
    deadline = time.monotonic() + _PATIENCE
    begun = set(os.listdir(_THREADS)) - before
    while begun and time.monotonic() < deadline:
        torch.cuda.is_current_stream_capturing()  # a call that nothing waits for, and that no capture minds
        time.sleep(_INTERVAL)
        begun.intersection_update(os.listdir(_THREADS))
