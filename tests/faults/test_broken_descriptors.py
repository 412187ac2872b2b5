"""User code that closes descriptors wholesale, runs out of them, or has no stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, environment
from harness.log import of_type, records

pytestmark = pytest.mark.faults

# Only the pipe and the handler, so that an interpreter is up in no time.
PIPE = """
import os, signal, sys
from ddtrace_pytorch.termination import Handler
handler = Handler()
handler.install()
inherited = os.get_inheritable(signal.set_wakeup_fd(-1)) or handler.pipe.attach()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PIPE + script], capture_output=True, text=True, timeout=30)


def test_the_pipe_is_out_of_the_way_of_small_numbers_and_closed_on_exec() -> None:
    result = run(
        """
lowest = os.open("/dev/null", os.O_RDONLY)
os.closerange(3, 256)
print(lowest, inherited, handler.pipe.attach())
"""
    )
    assert result.stdout == "3 False True\n", result.stderr


def test_numbers_that_became_the_users_files_are_neither_written_read_nor_closed() -> None:
    result = run(
        """
pipe = handler.pipe
numbers = pipe._read, pipe._write
os.closerange(3, 4096)
users = os.memfd_create("users")
for number in numbers:
    os.dup2(users, number)
os.write(users, b"data")
os.lseek(users, 0, os.SEEK_SET)
print(pipe.wait(0.0), os.lseek(users, 0, os.SEEK_CUR))
pipe.poke(b"x")
print(os.fstat(users).st_size)
print(pipe.attach(), pipe.attach(), numbers == (pipe._read, pipe._write))
pipe.poke(b"x")
print(pipe.wait(1.0))
handler.remove()
print([os.fstat(number).st_size for number in numbers])
"""
    )
    assert result.stdout.splitlines() == ["b'' 0", "4", "False True False", "b'x'", "[4, 4]"], result.stderr


def test_a_lower_limit_of_descriptors_is_enough() -> None:
    result = run(
        """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
print(Handler().pipe.attach())
"""
    )
    assert result.stdout == "False\n", result.stderr


TRAINING = """
import os, sys, time
import ddtrace_pytorch
ddtrace_pytorch.patch()
import torch
from harness.waiting import until
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
def step():
    weight.grad = torch.ones(1)
    optimizer.step()
step()
"""

GOES_ON = {
    # The wakeup descriptor is looked after at a step once a beat: that step must not fail.
    "descriptors": """
from ddtrace_pytorch.instrumentation import _switched_on
os.closerange(500, 1024)
session = _switched_on.lifecycle.current
beats = session._beats
until(lambda: session._beats > beats, 30, "a beat")
step()
beats = session._beats
until(lambda: session._beats > beats, 30, "a beat of a Pulse that outlived it")
""",
    "stderr": """
sys.stderr = None
from ddtrace_pytorch.instrumentation import _switched_on
session = _switched_on.lifecycle.current
until(lambda: session._beats > 2, 30, "a few beats")
""",
}


def test_training_goes_on_and_the_log_is_whole(jobs: Jobs, tmp_path: Path) -> None:
    started = {}
    for name, script in GOES_ON.items():
        (tmp_path / name).mkdir()
        env = environment(
            None, TMPDIR=str(tmp_path / name), PYTHONPATH=str(Path(__file__).parents[1]), DD_TRACE_AGENT_URL=URLS[name]
        )
        path = jobs.script(TRAINING + script + 'print("TRAINED")', f"{name}.py")
        started[name] = jobs.start([*PYTHON, path], env)
    for name, job in started.items():
        result = job.wait().ok()
        assert "TRAINED" in result.stdout, result.describe()
        assert "Traceback" not in result.stderr, result.describe()
        assert {Path(record["_file"]).name for record in records(tmp_path / name)} == {"rank-00000.jsonl"}, name
        [span] = of_type(tmp_path / name, "span")
        assert span["tags"]["pytorch.end_reason"] == "exit", name


# Addresses that no Agent can be asked at must not keep the run log from being written.
URLS = {"descriptors": "http://127.0.0.1:99999", "stderr": "http://.agent:8126"}
