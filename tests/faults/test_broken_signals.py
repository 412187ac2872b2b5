"""Handlers and masks of the user's that make it hard to tell whose SIGTERM is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, alone
from harness.log import rank_spans

pytestmark = pytest.mark.faults


def test_a_handler_that_faulthandler_registered_stays() -> None:
    script = """
import faulthandler, os, signal
faulthandler.register(signal.SIGTERM)
from ddtrace_pytorch.termination import Handler
handler = Handler()
handler.install()
os.kill(os.getpid(), signal.SIGTERM)
handler.remove()
os.kill(os.getpid(), signal.SIGTERM)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("most recent call first") == 2


BEGIN = """
import os, signal, subprocess, sys, threading, time
import ddtrace_pytorch
ddtrace_pytorch.patch()
import torch.distributed as dist
from ddtrace_pytorch.instrumentation import _switched_on

def session():
    return _switched_on.lifecycle.current

def a_beat():
    beats, deadline = session()._beats, time.monotonic() + 30
    while session()._beats < beats + 1 and time.monotonic() < deadline:
        time.sleep(0.01)

def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

# The farewell takes long, and in its midst comes what `meanwhile` is.
SLOWLY = """
def slowly(meanwhile):
    drain = session()._exporter.drain
    def slow(timeout):
        work(0.2)
        meanwhile()
        work(0.8)
        return drain(timeout)
    session()._exporter.drain = slow

class Died(Exception):
    pass

def raises(number, frame):
    print("RAISED", flush=True)
    raise Died
"""

LATE = """
write = session()._exporter._write_log
def late():
    time.sleep(0.3)
    write()
session()._exporter._write_log = late
"""

TERMINATED = (-signal.SIGTERM, "signal:SIGTERM")

# How the script goes on -> the exit status and the reasons in the log.
HARD = {
    # Both put something else back as the first thing they do; the Pulse, asking a little later, sees only that.
    "reset": (
        """
def save(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    work(2.5)
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
terminate()
work(5)
""",
        (7, "signal:SIGTERM"),
    ),
    "restored": (
        """
def save(number, frame):
    signal.signal(signal.SIGTERM, before)
    work(2.5)
    sys.exit(7)
before = signal.signal(signal.SIGTERM, save)
a_beat()
terminate()
work(5)
""",
        (7, "signal:SIGTERM"),
    ),
    "restored, then raised again": (
        """
def save(number, frame):
    signal.signal(signal.SIGTERM, before)
    terminate()
before = signal.signal(signal.SIGTERM, save)
a_beat()
terminate()
work(10)
""",
        TERMINATED,
    ),
    "gone before the signal came": (
        """
before = signal.signal(signal.SIGTERM, lambda *_: None)
a_beat()
signal.signal(signal.SIGTERM, before)
terminate()
work(10)
""",
        TERMINATED,
    ),
    "blocked": (
        """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
terminate()
work(3)
print("SAVED", flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
work(10)
""",
        TERMINATED,
    ),
    # The writer is slow here, so that the signal finds the session closing.
    "while closing": (
        """
exporter, close = session()._exporter, session()._exporter.close
def slow(timeout):
    terminate()
    work(0.5)
    return close(timeout)
exporter.close = slow
dist.destroy_process_group()
work(10)
""",
        (-signal.SIGTERM, "destroyed"),
    ),
    # The writer is late: what the handler raises must not leave the span with it.
    "while closing, and a handler raises": (
        SLOWLY
        + LATE
        + """
writer = session()._exporter._thread
join = writer.join
def cut_short(timeout):
    writer.join = join
    terminate()
    os.kill(os.getpid(), signal.SIGUSR1)
    work(10)
writer.join = cut_short
signal.signal(signal.SIGUSR1, raises)
dist.destroy_process_group()
work(10)
""",
        (-signal.SIGTERM, "destroyed"),
    ),
    # The Pulse is in the midst of a rotation, which must not come behind the span's end.
    "as closing begins, and a handler raises": (
        SLOWLY
        + LATE
        + """
closing, pulse = session(), session()._pulse
rotates, join = threading.Event(), pulse._thread.join
def rotate():
    rotates.set()
    time.sleep(0.5)
    closing.rotate()
def cut_short(timeout):
    pulse._thread.join = join
    os.kill(os.getpid(), signal.SIGUSR1)
    work(10)
pulse._thread.join = cut_short
pulse._tasks[0].run = rotate
pulse.want(pulse._tasks[0])
rotates.wait(10)
signal.signal(signal.SIGUSR1, raises)
try:
    dist.destroy_process_group()
except Died:
    sys.exit(7)
""",
        (7, "destroyed"),
    ),
    "a thousand": (
        """
exporter, drain = session()._exporter, session()._exporter.drain
def slow(timeout):
    work(1.5)
    return drain(timeout)
exporter.drain = slow
storm = f"import os\\nfor _ in range(1000): os.kill({os.getpid()}, 15)"
subprocess.Popen([sys.executable, "-S", "-c", storm], stderr=subprocess.DEVNULL)
work(10)
""",
        TERMINATED,
    ),
    "asyncio took the handler away": (
        """
import asyncio, torch
async def serve():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
asyncio.run(serve())
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
a_beat()
optimizer.step()
terminate()
work(10)
""",
        TERMINATED,
    ),
    "a handler raises meanwhile": (
        SLOWLY
        + """
def meanwhile():
    for child in children:
        child.terminate()
        work(0.1)
signal.signal(signal.SIGCHLD, raises)
children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
slowly(meanwhile)
terminate()
work(10)
""",
        TERMINATED,
    ),
    # torch has a handler that raises when one of them dies.
    "a loader's workers die of it too": (
        SLOWLY
        + """
import torch.utils.data
def meanwhile():
    subprocess.run(["kill", *(str(worker.pid) for worker in batches._workers)])  # from its parent none minds it
numbers = torch.utils.data.DataLoader(range(1000), num_workers=2)
batches = iter(numbers)
next(batches)
slowly(meanwhile)
terminate()
work(10)
""",
        TERMINATED,
    ),
    "Ctrl-C meanwhile": (
        SLOWLY
        + """
slowly(lambda: os.kill(os.getpid(), signal.SIGINT))
terminate()
work(10)
""",
        TERMINATED,
    ),
    "a handler raises while the user's calls ours": (
        SLOWLY
        + """
def save(number, frame):
    try:
        before(number, frame)
    except Died:
        sys.exit(7)
before = signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, raises)
a_beat()
slowly(lambda: os.kill(os.getpid(), signal.SIGUSR1))
terminate()
work(10)
""",
        (7, "signal:SIGTERM"),
    ),
    # As PID 1 it does; here the default action is none.
    "a handler raises meanwhile, and it lives on": (
        SLOWLY
        + """
from ddtrace_pytorch import c_signals
import ddtrace_pytorch.session
c_signals.die = ddtrace_pytorch.session.die = lambda number: None
signal.signal(signal.SIGUSR1, raises)
slowly(lambda: os.kill(os.getpid(), signal.SIGUSR1))
try:
    terminate()
    work(10)
except Died:
    pass
dist.destroy_process_group()
sys.exit(7)
""",
        (7, "destroyed"),
    ),
}


def test_the_process_does_what_it_would_without_us_and_its_span_gets_out(jobs: Jobs, tmp_path: Path) -> None:
    started = {}
    for number, (name, (script, _)) in enumerate(HARD.items()):
        path = jobs.script(BEGIN + script, f"hard-{number}.py")
        started[name] = jobs.start([*PYTHON, path], alone(tmp_path / name))
    for name, job in started.items():
        status, reason = HARD[name][1]
        result = job.wait()
        assert result.returncode == status, f"{name}: {result.describe()}"
        assert "Traceback" not in result.stderr, f"{name}: {result.describe()}"
        reasons = [span["tags"].get("pytorch.end_reason") for span in rank_spans(tmp_path / name)]
        assert reasons[-1:] == [reason], f"{name}: {result.describe()}"
        assert name != "blocked" or "SAVED" in result.stdout
        assert ", raises)" not in HARD[name][0] or "RAISED" in result.stdout, f"{name}: {result.describe()}"
