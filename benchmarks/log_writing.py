"""What writing the run log asks of the file system: system calls of 64 processes with 1,000 events each.

    python benchmarks/log_writing.py [--processes 64] [--events 1000] [--seconds 20]

Needs strace, and may trace its own processes. They are forked from one that has imported all they need, without torch;
each has a session of its own with default settings, and spreads its events over some seconds, in which the next are
started: so all are there at once, but don't all end at once. Counted is what names the log's directory or is done to a
file in it, by process; the most of any is told.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from _machine import describe
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent

JOB = """
import os, sys, time
import ddtrace.auto
import ddtrace_pytorch
processes, events, seconds = map(int, sys.argv[1:])
children = []
for rank in range(processes):
    pid = os.fork()
    if not pid:
        # Of one job, each would look for those that have ended before.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "DD_PYTORCH_JOB_ID": f"bench-{rank}"}
        for number in range(events):
            ddtrace_pytorch.event("now", number=number)
            time.sleep(seconds / events)
        sys.exit()
    children.append(pid)
    time.sleep(seconds / processes)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
"""

# What is counted, by what it is to a file system; with what each process may have of it, by the seconds it lasts.
KINDS = {
    "opens": ("open", "openat", "openat2", "creat"),
    "fsyncs": ("fsync", "fdatasync", "sync_file_range"),
    "stats": ("stat", "lstat", "fstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink"),
    "writes": ("write", "pwrite64", "writev"),
    "changes of directories": ("mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "chmod",
                               "fchmod", "fchmodat"),
}  # fmt: skip
CALL = re.compile(r"^(\d+) +(\w+)\(")
# One that others come between is told in two parts: "clone3(… <unfinished ...>" and "<... clone3 resumed>… = 7".
FORK = re.compile(r"^(\d+) +(?:<\.\.\. )?(?:clone3?|v?fork)\b")
BORN = re.compile(r"= (\d+)$")


def trace(scratch: str, processes: int, events: int, seconds: int) -> str:
    """What strace saw of them."""
    calls = [name for names in KINDS.values() for name in names]
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "DD_PATCH_MODULES": "pytorch:true", "DD_PYTORCH_EXPORT": "local",
        "DD_PYTORCH_SOURCE": "rollout", "DD_PYTORCH_LOG_DIR": f"{scratch}/log",
        "DD_PYTORCH_STATE_DIR": f"{scratch}/state",
        "DD_TRACE_AGENT_URL": "http://127.0.0.1:9", "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    }  # fmt: skip
    command = [
        "strace", "--follow-forks", "--seccomp-bpf", "--decode-fds=path", "--quiet=all", "-o", f"{scratch}/trace",
        "-e", "trace=" + ",".join(f"?{name}" for name in (*calls, "clone", "clone3", "fork", "vfork")),
        sys.executable, "-c", JOB, str(processes), str(events), str(seconds),
    ]  # fmt: skip
    subprocess.run(command, env=env, check=True)
    return Path(f"{scratch}/trace").read_text(errors="replace")


def by_process(traced: str, log: str) -> dict[str, Counter[str]]:
    """Of each process, how many calls of which kind there were on the log."""
    kind_of = {call: kind for kind, calls in KINDS.items() for call in calls}
    leader: dict[str, str] = {}
    found: dict[str, Counter[str]] = {}
    makes_thread: dict[str, bool] = {}
    for line in traced.splitlines():
        fork = FORK.match(line)
        if fork is not None:
            maker = fork[1]
            if "resumed>" not in line:
                makes_thread[maker] = "CLONE_THREAD" in line
            born = BORN.search(line)
            if born is not None:
                # A thread's calls are those of its process.
                leader[born[1]] = leader.get(maker, maker) if makes_thread[maker] else born[1]
            continue
        call = CALL.match(line)
        if call is not None and call[2] in kind_of and log in line:
            process = leader.get(call[1], call[1])
            found.setdefault(process, Counter())[kind_of[call[2]]] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=20)
    asked = parser.parse_args()
    machine = describe()
    with tempfile.TemporaryDirectory() as scratch:
        traced = trace(scratch, asked.processes, asked.events, asked.seconds)
        counts = by_process(traced, f"{scratch}/log")
        files = [path.read_bytes() for path in Path(scratch, "log").rglob("rank-*.jsonl")]
    told = [data.count(b'"type":"event"') for data in files]
    beats = max(data.count(b'"type":"beat"') for data in files)
    assert told == [asked.events] * asked.processes, sorted(told)
    assert len(counts) == asked.processes, len(counts)
    machine["job"] = f"{asked.processes} processes, {asked.events:,} events each, {beats} beats at most"
    # One part of the log; and what is written, once a beat and as the session opens and ends.
    budgets = {"opens": 4, "fsyncs": 0, "stats": 2 * beats + 16, "writes": beats + 6, "changes of directories": 8}
    rows = [
        Measured(f"{kind} of one process at most", max(one[kind] for one in counts.values()), "calls", budget, 1)
        for kind, budget in budgets.items()
    ]
    publish("log_writing", machine, rows)


if __name__ == "__main__":
    main()
