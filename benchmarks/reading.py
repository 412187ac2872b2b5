"""Whether the run log of a large job is read in a minute, and in a GiB.

    python benchmarks/reading.py [--ranks 1024] [--steps 1000]

Writes the log (benchmarks/big_log.py), and has `ddtrace-pytorch timeline`, `report` and `report --html` read it: the
time and the memory of each command and all its processes. And logs of an eighth of the ranks, one of them with half as
many steps: how much longer the processors work on the whole than on the half. The memory is of all processes at a time,
looked at every tenth of a second; pages that they share count once for each, so that it is rather less.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import big_log
from _machine import describe
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent
MIB = 1024 * 1024

SECONDS = 60.0
PEAK_MIB = 1024.0
LINEAR = 2.3

# What each of them writes, if that is not standard output.
COMMANDS = {"timeline": ("-o", "trace.json.gz"), "report": (), "report --html": ("page.html",)}


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu: float
    peak_mib: float


def resident(leader: int) -> int:
    """Bytes that the processes of the group have in memory."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold anything: state, parent, group.
            if int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[2]) == leader:
                total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue  # it has ended meanwhile
    return total


def cost(command: str, log: str, scratch: str) -> Cost:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "TMPDIR": scratch}
    name, *options = command.split()
    began, before = time.perf_counter(), os.times()
    process = subprocess.Popen(
        [sys.executable, "-m", "ddtrace_pytorch.cli.main", name, log, *options, *COMMANDS[command]],
        cwd=scratch, env=env, stdout=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.1)
    took, after = time.perf_counter() - began, os.times()
    assert process.stdout is not None
    print(process.stdout.read())
    assert process.returncode == 0, process.returncode
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"{command}: {took:.1f} s, {cpu:.1f} s of processors, {peak / MIB:.0f} MiB\n", flush=True)
    return Cost(took, cpu, peak / MIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    asked = parser.parse_args()
    machine = describe()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        half, double, whole = f"{scratch}/half", f"{scratch}/double", f"{scratch}/whole"
        big_log.write(half, max(asked.ranks // 8, 1), asked.steps // 2)
        big_log.write(double, max(asked.ranks // 8, 1), asked.steps)
        records, size = big_log.write(whole, asked.ranks, asked.steps)
        share = asked.ranks * asked.steps
        machine["log"] = f"{asked.ranks:,} ranks, {asked.steps:,} steps, {records:,} records, {size / 1e6:,.0f} MB: "
        machine["log"] += f"{records / share:.1f} records and {size / share:,.0f} bytes a step and rank"
        for command in COMMANDS:
            less, more, all_of_it = (cost(command, log, scratch) for log in (half, double, whole))
            rows += [
                Measured(f"{command}", all_of_it.seconds, "s", SECONDS, 1),
                Measured(f"{command}: its processes' own time", all_of_it.cpu, "s", None, 1),
                Measured(f"{command}: memory at most", all_of_it.peak_mib, "MiB", PEAK_MIB, 1),
                Measured(f"{command}: own time, twice as many steps", more.cpu / less.cpu, "times", LINEAR, 1),
            ]
    publish("reading", machine, rows)


if __name__ == "__main__":
    main()
