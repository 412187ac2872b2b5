"""Users' records on a bad day: a full disk, one that hangs, no Agent, many processes, and the ends of a process."""

from __future__ import annotations

import json
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
from harness.agent import free_port
from harness.job import PYTHON, Jobs, Result, environment
from harness.log import of_type, rank_spans
from harness.log import records as log_records

from ddtrace_pytorch.runlog import reader

pytestmark = pytest.mark.faults

PATCHED = """
import os, resource, signal, sys, threading, time
import torch
import ddtrace_pytorch
from ddtrace_pytorch import event, instrumentation, scalar, span
from ddtrace_pytorch.runlog.writer import RunLogQueue
ddtrace_pytorch.patch()

# What is handed to the run log.
handed = 0
put = RunLogQueue.put

def counting(queue, record):
    global handed
    handed += 1
    put(queue, record)

RunLogQueue.put = counting

def resident_mib():
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def log_file():
    # The writer's, once it has one.
    while True:
        log = instrumentation._switched_on.lifecycle.current._exporter._log
        if log is not None and log.file._fd is not None:
            return log.file
        time.sleep(0.01)

def written():
    while instrumentation._switched_on.lifecycle.current._exporter._records._records:
        time.sleep(0.01)
"""


def run(jobs: Jobs, script: str, log: Path, **settings: str) -> Result:
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log)) | settings
    return jobs.run([*PYTHON, jobs.script(PATCHED + textwrap.dedent(script))], env)


def dropped(log: Path) -> int:
    return sum(record["count"] for record in of_type(log, "drop"))


def test_on_a_full_disk_records_are_counted_and_nothing_else_happens(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = run(
        jobs,
        """
        event("first")
        file = log_file()
        size = os.fstat(file._fd).st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3_000, hard))
        for number in range(2_000):
            with span("work", number=number):
                pass
            if number % 500 == 0:
                time.sleep(1.1)  # more than a beat: some of it is tried while the disk is full
        while not file._losses:
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        ddtrace_pytorch.unpatch()
        print("HANDED", handed)
        """,
        log,
    ).ok()
    # As users read it: the line that didn't fit is no record.
    (found,) = reader.scan(str(log)).logs
    records: dict[str, list[dict[str, Any]]] = {}
    for record in reader.read(found):
        records.setdefault(record["type"], []).append(record)
    assert 0 < len(records["user_span"]) < 2_000
    assert {drop["reason"] for drop in records["drop"]} == {"disk"}
    check(result, [record for some in records.values() for record in some], 2_001)


def check(result: Result, found: list[dict[str, Any]], made: int) -> None:
    """Of what was handed to the run log each is there, or counted; so is each of the user's, of which so many were
    `made`."""
    drops = [one for one in found if one["type"] == "drop"]
    lost = sum(one["count"] for one in drops if one["reason"] in ("disk", "queue full"))
    refused = sum(one["count"] for one in drops if one["reason"] == "user records")
    assert lost + refused > 0
    mine = sum("seq" in one and one["type"] != "beat" for one in found)
    assert mine + refused <= made <= mine + refused + lost
    # The first identity line is the writer's own, and so are all that count.
    (handed,) = [int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("HANDED")]
    assert len(found) - 1 - len(drops) + lost == handed


def test_a_disk_that_hangs_holds_up_nobody_and_what_it_missed_is_counted(jobs: Jobs, tmp_path: Path) -> None:
    result = run(
        jobs,
        """
        event("first")
        file = log_file()
        written()
        # In the place of the file, a pipe that nobody reads.
        reading, writing = os.pipe()
        os.dup2(writing, file._fd)
        found = os.fstat(file._fd)
        file._inode = found.st_dev, found.st_ino
        for number in range(200_000):
            with span("work"):
                pass
        exporter = instrumentation._switched_on.lifecycle.current._exporter
        while len(exporter._records._records) < 1_000:
            time.sleep(0.01)
        print("HELD UP", exporter._wake.is_set() or len(exporter._records._records) > 0)
        lines = []
        def read():
            with os.fdopen(reading, "rb") as pipe:
                lines.extend(pipe)
        reader = threading.Thread(target=read)
        reader.start()
        ddtrace_pytorch.unpatch()
        os.close(writing)
        reader.join()
        print("HANDED", handed, flush=True)
        sys.stdout.buffer.write(b"".join(lines))
        """,
        tmp_path / "log",
    ).ok()
    assert "HELD UP True" in result.stdout
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    check(result, [*log_records(tmp_path / "log"), *records], 200_001)


def test_without_an_agent_unfinished_spans_cost_no_memory_and_the_end_comes(jobs: Jobs, tmp_path: Path) -> None:
    script = """
        def work(many):
            for number in range(many):
                with span("finished", number=number):
                    pass
                span("unfinished", number=number).__enter__()
        work(5_000)
        time.sleep(1.5)
        before = resident_mib()
        for _ in range(9):
            work(5_000)
            time.sleep(0.2)
        time.sleep(1.5)
        print(resident_mib() - before)
    """
    result = run(
        jobs,
        script,
        tmp_path / "log",
        DD_PYTORCH_EXPORT="agent",
        DD_TRACE_AGENT_URL=f"http://127.0.0.1:{free_port()}",
    ).ok()
    assert float(result.stdout) < 30


PROCESSES = 8


def test_many_processes_with_many_events_do_little_to_the_disk(jobs: Jobs, tmp_path: Path) -> None:
    script = """
        from collections import Counter
        counts = Counter()
        def counted(name, original):
            def call(*args, **kwargs):
                if threading.current_thread().name == "ddtrace_pytorch.writer":
                    counts[name] += 1
                return original(*args, **kwargs)
            return call
        for name in ("open", "write", "fsync", "fdatasync", "stat", "lstat", "fstat", "listdir", "mkdir", "rename"):
            setattr(os, name, counted(name, getattr(os, name)))
        for number in range(1_000):
            event("event", number=number)
            time.sleep(0.001)
        ddtrace_pytorch.unpatch()
        import json
        print(json.dumps(counts))
    """
    log = tmp_path / "log"
    script = jobs.script(PATCHED + textwrap.dedent(script))
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log), DD_PYTORCH_JOB_ID="one")
    running = [jobs.start([*PYTHON, script], env) for _ in range(PROCESSES)]
    for job in running:
        result = job.wait().ok()
        counts = json.loads(result.stdout)
        beats = result.seconds + 2
        assert counts["open"] <= 3
        assert counts["write"] <= beats
        assert counts["fstat"] <= beats + 2
        assert counts.get("fsync", 0) == counts.get("fdatasync", 0) == counts.get("rename", 0) == 0
        assert counts.get("stat", 0) + counts.get("lstat", 0) + counts.get("listdir", 0) <= 30
    assert len(of_type(log, "event")) == PROCESSES * 1_000
    assert dropped(log) == 0


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("1 / 0", 1),
    ],
)
def test_what_was_recorded_last_is_told(jobs: Jobs, tmp_path: Path, end: str, status: int) -> None:
    log = tmp_path / "log"
    result = run(
        jobs,
        f"""
        with span("outer"):
            for number in range(100):
                event("last", number=number)
            {end}
        """,
        log,
    )
    assert result.returncode in (status, 128 - status), result.describe()
    assert len(of_type(log, "event")) == 100
    assert len(rank_spans(log)) == 1
    spans = of_type(log, "user_span")
    if end == "1 / 0":
        assert [one["error"]["type"] for one in spans] == ["ZeroDivisionError"]


def test_a_rank_that_is_killed_misses_a_beat_at_most(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = run(
        jobs,
        """
        event("first")
        file = log_file()
        for number in range(100):
            event("early")
        def size():
            return os.fstat(file._fd).st_size
        before = size()
        while size() < before + 100 * 50:
            time.sleep(0.01)
        for number in range(50):
            event("late")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        log,
    )
    assert result.returncode == -signal.SIGKILL
    assert sum(record["name"] == "early" for record in of_type(log, "event")) == 100
