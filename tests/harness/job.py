"""Runs a training script the ways users do, in a clean environment, and keeps what it said."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent
DDTRACE_RUN = (str(BIN / "ddtrace-run"),)
PYTHON = (sys.executable,)

# Long enough for a loaded 2-core machine, short enough that a hang is told from work.
DEADLINE = 90.0

_OURS = ("DD_", "TORCH", "MASTER_", "PYTORCH_", "SLURM_", "PYTEST_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_")


def torchrun(nproc: int = 2, *options: str) -> tuple[str, ...]:
    return (str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={nproc}", *options)


def environment(agent_url: str | None, **settings: str) -> dict[str, str]:
    """The process environment without what belongs to this test run, plus `settings`. No Agent: a closed port."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {
        **clean,
        "DD_TRACE_AGENT_URL": agent_url or "http://127.0.0.1:9",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **settings,
    }


def alone(log: Path, **settings: str) -> dict[str, str]:
    """The environment of a process that is a process group by itself and writes a run log in `log`, with no Agent."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    return environment(None, **place, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log), **settings)


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def ok(self) -> Result:
        assert self.returncode == 0, self.describe()
        return self

    def describe(self) -> str:
        return f"exit status {self.returncode}\n--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-8000:]}"


@dataclass
class Job:
    """A running job: a process group of its own, so that nothing outlives the test."""

    process: subprocess.Popen[str]
    directory: Path
    started: float = field(default_factory=time.monotonic)

    def wait(self, timeout: float = DEADLINE) -> Result:
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the job hung for {timeout:g} s\n" + self._result().describe()) from None
        return self._result()

    def _result(self) -> Result:
        return Result(
            self.process.returncode,
            (self.directory / "stdout").read_text(errors="replace"),
            (self.directory / "stderr").read_text(errors="replace"),
            time.monotonic() - self.started,
        )

    def stdout(self) -> str:
        return (self.directory / "stdout").read_text(errors="replace")

    def kill(self) -> None:
        """End the job and all it started: torchrun gives each worker a process group of its own."""
        for pid in (*_descendants(self.process.pid), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # After the name, which may hold anything: state, parent.
            parent = int(status.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found, unseen = [], [pid]
    while unseen:
        born = children.get(unseen.pop(), [])
        found += born
        unseen += born
    return found


class Jobs:
    """Starts jobs in one test's directory and ends those still running at its end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._jobs: list[Job] = []
        self._numbers = itertools.count()

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.directory / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def start(self, command: Sequence[str], env: dict[str, str]) -> Job:
        directory = self.directory / f"job-{next(self._numbers)}"
        directory.mkdir()
        # What the killed ranks of one test leave behind is not for another's to tell.
        env = {"DD_PYTORCH_STATE_DIR": str(self.directory / "state"), **env}
        with open(directory / "stdout", "wb") as stdout, open(directory / "stderr", "wb") as stderr:
            process = subprocess.Popen(
                list(command), env=env, cwd=directory, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL,
                text=True, start_new_session=True,
            )  # fmt: skip
        job = Job(process, directory)
        self._jobs.append(job)
        return job

    def run(self, command: Sequence[str], env: dict[str, str], timeout: float = DEADLINE) -> Result:
        return self.start(command, env).wait(timeout)

    def end(self) -> None:
        for job in self._jobs:
            job.kill()


@contextlib.contextmanager
def jobs_in(directory: Path) -> Iterator[Jobs]:
    jobs = Jobs(directory)
    try:
        yield jobs
    finally:
        jobs.end()
