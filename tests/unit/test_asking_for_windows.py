"""`ddtrace-pytorch profile` of a job that has ended, or says nothing: it is said, and nothing is asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from harness.dead import leave_last_words
from harness.story import SECOND, T0, Record, ended

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.runlog.schema import REQUEST, encode

pytestmark = pytest.mark.once


class Job:
    """Of two ranks, `ago` seconds ago."""

    def __init__(self, root: Path) -> None:
        self.logs, self.state = root / "logs", root / "state"

    def log(self, rank: int, ago: float, told: Iterable[Record], incarnation: str = "aaa", **more: object) -> None:
        later = time.time_ns() - round(ago * SECOND) - 20 * SECOND - T0
        identity = {
            "type": "identity", "ts": T0, "schema": 1, "rank": rank, "world_size": 2, "host": os.uname().nodename,
            "pid": 100 + rank, "job": {"id": "night", "incarnation": incarnation}, **more,
        }  # fmt: skip
        folder = self.logs / "night" / incarnation
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{**record, "ts": record["ts"] + later} for record in (identity, *told)]
        (folder / f"rank-{rank:05d}.jsonl").write_bytes(b"".join(map(encode, lines)))

    def asked(self, *options: str) -> Result:
        env = {"DD_PYTORCH_STATE_DIR": str(self.state)}
        return CliRunner().invoke(cli, ["profile", str(self.logs), *options], env=env)

    def requests(self) -> list[str]:
        return [path.parent.name for path in self.logs.rglob(REQUEST)]


def steps(many: int = 20) -> list[Record]:
    return [{"type": "step", "ts": T0 + number * SECOND, "step": number} for number in range(1, many + 1)]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize("options", [(), ("--at", "500")])
def test_of_one_that_has_ended_it_is_said_when_and_how(job: Job, options: tuple[str, ...]) -> None:
    job.log(0, 7200, [*steps(), ended("destroyed", 20)])
    job.log(1, 10800, [*steps(), ended("exception", 20)])
    result = job.asked(*options)
    assert (result.exit_code, job.requests()) == (2, [])
    assert f"job night in {job.logs} has ended, 2 h ago, at " in result.stderr
    assert "(rank 0 destroyed; rank 1 exception)" in result.stderr
    assert "--at" not in result.stderr


def test_one_whose_ranks_were_killed_here_has_ended(job: Job) -> None:
    job.log(0, 7200, steps())
    job.log(1, 7200, [*steps(), ended("exception", 20)])
    leave_last_words(job.state, 0, job.logs, pid=100, job="night", end=time.time_ns() - 3600 * SECOND)
    result = job.asked("--at", "500")
    assert (result.exit_code, job.requests()) == (2, [])
    assert "has ended, 60 min ago, at " in result.stderr.replace("1 h ago", "60 min ago")
    assert "(rank 0 killed; rank 1 exception)" in result.stderr


def test_one_that_went_silent_may_be_asked_all_the_same(job: Job) -> None:
    job.log(0, 7200, steps())
    result = job.asked()
    assert (result.exit_code, job.requests()) == (2, [])
    assert f"nothing was heard of job night in {job.logs} for 2 h" in result.stderr
    assert "killed" in result.stderr
    assert "--at STEP" in result.stderr
    assert job.asked("--at", "500").exit_code == 0
    assert job.requests() == ["aaa"]


def test_one_that_has_not_come_to_a_step_has_not_ended(job: Job) -> None:
    job.log(0, 1, [])
    result = job.asked()
    assert (result.exit_code, job.requests()) == (2, [])
    assert f"no rank of job night in {job.logs} has taken a step yet" in result.stderr
    assert "ended" not in result.stderr


def test_a_rank_that_runs_is_enough(job: Job) -> None:
    job.log(0, 1, steps())
    job.log(1, 10, [*steps(), ended("exception", 20)])
    assert job.asked().exit_code == 0


def test_the_training_is_asked_and_not_what_runs_beside_it(job: Job) -> None:
    job.log(0, 10, steps(), incarnation="training")
    job.log(0, 1, steps(), incarnation="beside", source="rollout")
    assert job.asked().exit_code == 0
    assert job.requests() == ["training"]
