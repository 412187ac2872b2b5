"""Starts the ranks of a job, one way or another, and ends them whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.agent import free_port
from harness.hosts import NAMES, two_hosts
from harness.job import PYTHON, Job, environment, jobs_in, torchrun
from harness.stalls.plan import Plan
from harness.stalls.table import Launch, Row

TESTS = Path(__file__).resolve().parents[2]
TRAIN = str(Path(__file__).with_name("train.py"))

_GLOO_ASIDE = re.compile(r"\[(enforce fail at )?/\S+\.cc:\d+\] | (This is typically|Received data) .*")

# However we end. What a launcher starts has to see to that itself, and so does train.py.
WITH_US = ("setpriv", "--pdeathsig", "KILL")

STORE, DATA = ("store0", "10.9.1"), ("data0", "10.9.2")


@dataclass(frozen=True)
class Running:
    """`jobs`: one for each rank, or one for all; `strike`: does what the ranks can't do to themselves."""

    jobs: list[Job]
    strike: Callable[[], None]

    def over(self) -> list[bool]:
        """Which of them have ended."""
        return [one.process.poll() is not None for one in self.jobs]


def stderr_of(job: Job) -> str:
    return (job.directory / "stderr").read_text(errors="replace")


def last_words(stderr: str) -> str:
    """The last line that tells of an error, or else the last one; without gloo's source files and advice."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in ("Error:", "what():", "OutOfData:"))]
    last = [*lines[-1:], *telling][-1] if lines else ""
    return _GLOO_ASIDE.sub("", last)


@contextlib.contextmanager
def running(row: Row, plan: Plan, directory: Path, **settings: str) -> Iterator[Running]:
    """The job of `row`, with its files below `directory`, until the end of the block."""
    env = environment(
        None,
        PYTHONPATH=os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(directory / "log"),
        GLOO_SOCKET_IFNAME="lo",
        **plan.at(directory).as_environment(),
        **settings,
    )
    if row.launch is Launch.HOSTS:
        with _on_two_hosts(row, plan, directory, env) as there:
            yield there
        return
    with jobs_in(directory) as jobs:
        if row.launch is Launch.TORCHRUN:
            started = [jobs.start([*WITH_US, *torchrun(plan.ranks), TRAIN], env)]
        else:
            port = free_port()
            places = [_place(rank, plan.ranks, "127.0.0.1", port) for rank in range(plan.ranks)]
            started = [jobs.start([*WITH_US, *PYTHON, TRAIN], env | place) for place in places]
        yield Running(started, lambda: None)


@contextlib.contextmanager
def _on_two_hosts(row: Row, plan: Plan, directory: Path, env: dict[str, str]) -> Iterator[Running]:
    with two_hosts(directory, apart=True) as (a, b):
        for cable in (STORE, DATA):
            a.lay_cable(b, *cable)

        def cut() -> None:
            for cable in (DATA,) if row.name == "data-cut" else (STORE, DATA):
                a.cut_cable(b, *cable)

        port = free_port()
        yield Running(
            [
                host.start([*PYTHON, TRAIN], env | _place(rank, plan.ranks, f"{STORE[1]}.1", port, hosts=len(NAMES)))
                for host, ranks in ((a, (0, 1)), (b, (2, 3)))
                for rank in ranks
            ],
            cut,
        )


def _place(rank: int, ranks: int, address: str, port: int, hosts: int = 1) -> dict[str, str]:
    """What a launcher tells a rank."""
    each = ranks // hosts
    interface = {"GLOO_SOCKET_IFNAME": DATA[0]} if hosts > 1 else {}
    return interface | {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % each),
        "LOCAL_WORLD_SIZE": str(each),
        "GROUP_RANK": str(rank // each),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
