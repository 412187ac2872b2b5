"""What the user's own records cost, and that ten thousand a second for a minute change nothing else.

    python benchmarks/records.py [--rounds 100] [--seconds 60]

Every number is of a process by itself with a session open and the run log alone. The time of a call: bursts of a
hundred calls, less the same loop without them, of each the quickest (what else the machine does can only add to it).
The minute, once with a disk that is well, once with a full one, once with one that hangs (a pipe nobody reads in
place of the file): spans at a steady rate, the longest that any took, what the process grew by after the first sixth,
and whether what is in the log and what is counted as dropped is all that was made.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _machine import describe
from _resident import resident_mib
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BURST = 100
IN_A_ROW = 5
RATE = 10_000
DISKS = ("well", "full", "hanging")


def settled_mib() -> float:
    gc.collect()
    return resident_mib()


def settings(log: str) -> None:
    os.environ |= {
        "DD_PYTORCH_EXPORT": "local",
        "DD_PYTORCH_LOG_DIR": log,
        "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    }


def costs(rounds: int) -> dict[str, float]:
    """µs that each kind of call adds."""
    import torch

    import ddtrace_pytorch
    from ddtrace_pytorch import event, scalar, span
    from ddtrace_pytorch.records import scalars

    torch.set_num_threads(1)
    tensor, matrix = torch.tensor(1.5), torch.ones(64, 64)

    def nothing() -> None:
        for _ in range(BURST):
            pass

    def spans() -> None:
        for _ in range(BURST):
            with span("work"):
                pass

    def attributes() -> None:
        for _ in range(BURST):
            with span("work", index=1, split="train"):
                pass

    def events() -> None:
        for _ in range(BURST):
            event("now")

    def numbers() -> None:
        for _ in range(BURST):
            scalar({"loss": 1.5})

    def tensors() -> None:
        for _ in range(BURST):
            scalar({"loss": tensor})

    def tensors_in_python() -> None:
        in_c, scalars._read = scalars._read, scalars.carefully
        tensors()
        scalars._read = in_c

    @span("call")
    def spanned() -> None: ...

    def bare() -> None: ...

    def calls() -> None:
        for _ in range(BURST):
            spanned()

    def bare_calls() -> None:
        for _ in range(BURST):
            bare()

    loops: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "a span": (spans, nothing),
        "a span with two attributes": (attributes, nothing),
        "a decorated function": (calls, bare_calls),
        "an event": (events, nothing),
        "a scalar that is a number": (numbers, nothing),
        "a scalar in a tensor": (tensors, nothing),
        "a scalar in a tensor, without the part in C": (tensors_in_python, nothing),
    }

    def measure() -> dict[str, float]:
        quickest = dict.fromkeys([loop for pair in loops.values() for loop in pair], float("inf"))
        for _ in range(rounds):
            for loop in [*quickest] * IN_A_ROW:
                started = time.perf_counter_ns()
                loop()
                quickest[loop] = min(quickest[loop], (time.perf_counter_ns() - started) / BURST / 1e3)
            # At a rate that leaves the threads that tell them idle most of the time; this one computes, as it would.
            until = time.perf_counter() + IN_A_ROW * len(loops) * BURST / RATE
            while time.perf_counter() < until:
                torch.mm(matrix, matrix)
        return {name: quickest[loop] - quickest[without] for name, (loop, without) in loops.items()}

    off = measure()
    ddtrace_pytorch.patch()
    spans()
    on = measure()
    ddtrace_pytorch.unpatch()
    return {**on, **{f"{name}, switched off": took for name, took in off.items()}}


def minute(disk: str, seconds: float) -> dict[str, float]:
    """Spans at a steady rate for so long, on a disk that is `well`, `full` or `hanging`."""
    import torch

    import ddtrace_pytorch
    from ddtrace_pytorch import instrumentation, span

    assert torch is not None
    ddtrace_pytorch.patch()
    with span("first"):
        pass
    lifecycle: Any = instrumentation._switched_on.lifecycle  # type: ignore[union-attr]
    exporter = lifecycle.current._exporter
    while exporter._log is None or exporter._log.file._fd is None or exporter._records._records:
        time.sleep(0.01)
    file = exporter._log.file
    reading = writing = -1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if disk == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(file._fd).st_size, hard))
    elif disk == "hanging":
        reading, writing = os.pipe()
        os.dup2(writing, file._fd)
        found = os.fstat(file._fd)
        file._inode = found.st_dev, found.st_ino

    begun = time.monotonic()
    made, longest, before = 1, 0, 0.0
    while (now := time.monotonic() - begun) < seconds:
        if not before and now > seconds / 6:
            before = settled_mib()
        for _ in range(int(now * RATE) - made):
            started = time.perf_counter_ns()
            with span("work"):
                pass
            longest = max(longest, time.perf_counter_ns() - started)
            made += 1
        time.sleep(0.0005)
    grown = settled_mib() - before

    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines: list[bytes] = []
    reader = threading.Thread(target=lambda: lines.extend(os.fdopen(reading, "rb")))
    if disk == "hanging":
        reader.start()
    ddtrace_pytorch.unpatch()
    if disk == "hanging":
        os.close(writing)
        reader.join()
    told = _told(Path(os.environ["DD_PYTORCH_LOG_DIR"]), lines)
    return {"made": made, "longest_us": longest / 1e3, "grown_mib": grown, **told}


def _told(root: Path, lines: list[bytes]) -> dict[str, float]:
    from ddtrace_pytorch.runlog.reader import read, scan
    from ddtrace_pytorch.runlog.schema import decode

    records = [record for log in scan(str(root)).logs for record in read(log, ("user_span", "drop", "beat", "summary"))]
    records += [record for line in lines if (record := decode(line)) is not None]
    return {
        "logged": sum(record["type"] == "user_span" for record in records),
        "dropped": sum(record["count"] for record in records if record["type"] == "drop"),
        "beats": max((record["seq"] for record in records if record["type"] == "beat"), default=0),
    }


def apart(*arguments: str) -> dict[str, float]:
    """What this program says in a process of its own."""
    with tempfile.TemporaryDirectory() as log:
        environment = {**os.environ, "RECORDS_LOG": log}
        said = subprocess.run(
            [sys.executable, __file__, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--costs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--disk", choices=DISKS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if "RECORDS_LOG" in os.environ:
        settings(os.environ["RECORDS_LOG"])
    if chosen.costs:
        print(json.dumps(costs(chosen.rounds)))
        return
    if chosen.disk:
        print(json.dumps(minute(chosen.disk, chosen.seconds)))
        return

    machine = describe()
    budgets = {"a span": 3.0, "a scalar that is a number": 2.0, "a scalar in a tensor": 2.0}
    took = apart("--costs", "--rounds", str(chosen.rounds))
    rows = [Measured(name, us, "µs", budgets.get(name), chosen.rounds) for name, us in took.items()]
    for disk in DISKS:
        found = apart("--disk", disk, "--seconds", str(chosen.seconds))
        print(disk, found)
        # Of the other records (a beat a second, and what ends a session) some may be among the dropped.
        unaccounted = found["made"] - found["logged"] - found["dropped"]
        missing = max(unaccounted, 0, -unaccounted - chosen.seconds - 20)
        where = f"disk that is {disk}"
        rows += [
            Measured(f"spans a second, {where}", found["made"] / chosen.seconds, "", None, 1),
            Measured(f"longest call, {where}", found["longest_us"] / 1e3, "ms", None, 1),
            Measured(f"growth, {where}", found["grown_mib"], "MiB", None if disk == "hanging" else 4.0, 1),
            Measured(f"spans neither logged nor counted, {where}", missing, "", 0.0, 1),
        ]
    publish("records", machine, rows)


if __name__ == "__main__":
    main()
