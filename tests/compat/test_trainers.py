"""Trainings with the libraries people train with, as they start them: told for what they are, and the same without us.

Each is skipped where its library isn't installed; CI's row `trainers` has them all.
"""

from __future__ import annotations

import contextlib
import os
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.agent import Agent, free_port
from harness.installed import needs
from harness.job import BIN, DDTRACE_RUN, Job, Jobs, environment, torchrun
from harness.log import of_type, rank_spans
from harness.waiting import until

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).parent / "trainers"


@dataclass(frozen=True)
class Training:
    script: str
    framework: str
    parallelism: str
    trainer: str | None
    steps: int
    # Without us, too, now and then: "terminate called without an active exception", when all is done.
    aborts_at_exit: bool = False


# By the package that it needs.
TRAININGS = {
    "lightning": Training("lightning_ddp.py", "ddp", "ddp", "lightning", 8),
    "accelerate": Training("accelerate_ddp.py", "ddp", "ddp", "accelerate", 8),
    "transformers": Training("transformers_trainer.py", "ddp", "ddp", "transformers+accelerate", 8),
    "deepspeed": Training("deepspeed_zero.py", "deepspeed", "ddp+zero", None, 32, aborts_at_exit=True),
}


@pytest.mark.parametrize("package", TRAININGS)
def test_it_is_told_and_the_same_without_us(jobs: Jobs, tmp_path: Path, package: str) -> None:
    needs(package)
    training, log = TRAININGS[package], tmp_path / "log"
    switched_on = {
        "DD_PATCH_MODULES": "pytorch:true",
        "DD_PYTORCH_EXPORT": "local",
        "DD_PYTORCH_LOG_DIR": str(log),
    }
    # One after the other: what DeepSpeed compiles for the first is there for the second.
    plain = start(jobs, training.script, tmp_path / "plain").wait(200)
    ours = start(jobs, training.script, tmp_path / "ours", **switched_on).wait(200)
    for result in (plain, ours):
        if not (training.aborts_at_exit and "terminate called without an active exception" in result.stderr):
            result.ok()
    assert losses(tmp_path / "plain") == losses(tmp_path / "ours")
    assert "ddtrace_pytorch" not in plain.stderr + ours.stderr

    spans = rank_spans(log)
    assert [span["metrics"]["rank"] for span in spans] == [0, 1]
    for span in spans:
        tags = span["tags"]
        said = tags["framework"], tags.get("pytorch.parallelism"), tags.get("pytorch.trainer")
        assert said == (training.framework, training.parallelism, training.trainer)
        assert (span["metrics"]["pytorch.steps"], span["error"]) == (training.steps, 0)
    assert sorted(one["step"] for one in of_type(log, "step")) == sorted([*range(1, training.steps + 1)] * 2)


def start(jobs: Jobs, script: str, said: Path, **settings: str) -> Job:
    said.mkdir()
    env = environment(None, SAID=str(said), DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", **settings)
    return jobs.start([*(DDTRACE_RUN if settings else ()), *torchrun(2), str(SCRIPTS / script)], env)


def losses(said: Path) -> dict[str, list[str]]:
    """By rank, to the bit; each has some, and they are numbers that change."""
    found = {path.name: path.read_text().split() for path in sorted(said.iterdir())}
    assert found
    assert all(len(set(numbers)) > 4 for numbers in found.values())
    return found


def test_ray_train_has_its_ranks_below_its_actors(jobs: Jobs, tmp_path: Path, agent: Agent) -> None:
    needs("ray")
    env = environment(
        agent.url,
        DD_PATCH_MODULES="pytorch:true,ray:true,aiohttp:false,grpc:false,requests:false",
        DD_PYTORCH_LOG_DIR=str(tmp_path / "log"),
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}",
    )
    with cluster(jobs, env) as address:
        submit = [str(BIN / "ray"), "job", "submit", "--submission-id", "night-17", "--working-dir", str(SCRIPTS), "--"]
        jobs.run([*submit, sys.executable, "ray_train.py"], env | {"RAY_ADDRESS": address}, timeout=200).ok()
        ranks = agent.ranks()
    assert sorted(rank["metrics"]["rank"] for rank in ranks) == [0, 1]
    actors = {
        (span["trace_id"], span["span_id"])
        for span in agent.spans("actor_method.execute")
        if span["resource"] == "RayTrainWorker.execute"
    }
    for rank in ranks:
        assert (rank["trace_id"], rank["parent_id"]) in actors
        told = rank["meta"]
        assert (told["training_job.id"], told["ray.submission_id"], told["launcher"]) == ("night-17", "night-17", "ray")
        assert (told["framework"], told["pytorch.end_reason"]) == ("ddp", "destroyed")
        assert rank["metrics"]["pytorch.steps"] == 8
    assert len(rank_spans(tmp_path / "log")) == 2


@contextlib.contextmanager
def cluster(jobs: Jobs, env: dict[str, str]) -> Iterator[str]:
    """One of Ray's, of this host alone; gives where jobs are submitted."""
    port, dashboard = free_port(), free_port()
    head = jobs.start(
        [*DDTRACE_RUN, str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
         "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--num-cpus=3"],
        env,
    )  # fmt: skip
    address = f"http://127.0.0.1:{dashboard}"

    def is_there() -> bool:
        assert head.process.poll() is None, head.wait().describe()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api/version", timeout=5):
            return True
        return False

    until(is_there, 90, "the cluster")
    yield address
    head.kill()
