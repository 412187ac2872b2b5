"""What it costs to tell the native GPU tracer of another parent, as at each rotation of the rank span.

    python benchmarks/native_parent.py

The tracer of the tests stands in for Datadog's; the call is timed alone, and beside a thread that computes all the
time. It is made on the Pulse, off the thread that trains.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from _machine import describe
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CALLS, ROUNDS = 1_000, 30


def microseconds() -> float:
    """Of one call, of the processor's time on this thread."""
    from ddtrace_pytorch.kernels.native import Context, NativeParent

    tags = (
        ("training_job_id", "night-run-17"),
        ("rank", "3"),
        ("world_size", "8"),
        ("framework", "ddp"),
        ("service", "s"),
    )
    said = iter(range(1, CALLS * ROUNDS * 10))
    parent = NativeParent(lambda: given[0])
    given = [Context(1 << 100, 0, 2, tags)]
    parent.look()
    took = []
    for _ in range(ROUNDS):
        contexts = [Context(1 << 100, next(said), 2, tags) for _ in range(CALLS)]
        started = time.thread_time_ns()
        for context in contexts:
            given[0] = context
            parent.hand_over()
        took.append((time.thread_time_ns() - started) / CALLS / 1000)
    return median(took)


def main() -> None:
    machine = describe()
    if "LD_PRELOAD" not in os.environ:
        from harness.native import built

        with tempfile.TemporaryDirectory() as folder:
            place = {"LD_PRELOAD": str(built("kernel_tracer", Path(folder), "-pthread"))}
            sys.exit(subprocess.run([sys.executable, __file__], env=os.environ | place, check=False).returncode)
    alone = microseconds()
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1_000))

    thread = threading.Thread(target=compute)
    thread.start()
    beside = microseconds()
    over.set()
    thread.join()
    publish(
        "native_parent",
        machine,
        [
            Measured("to tell of another parent", alone, "µs", 20.0, ROUNDS),
            Measured("the same beside a busy thread", beside, "µs", 20.0, ROUNDS),
        ],
    )


if __name__ == "__main__":
    main()
