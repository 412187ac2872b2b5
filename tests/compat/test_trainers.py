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
    package: str
    script: tuple[str, ...]
    framework: str
    parallelism: str
    trainer: str | None
    steps: int
    # Without us, too, now and then: "terminate called without an active exception", when all is done.
    aborts_at_exit: bool = False


TRAININGS = {
    "lightning": Training("lightning", ("lightning_trainer.py", "ddp"), "ddp", "ddp", "lightning", 8),
    "lightning-fsdp": Training("lightning", ("lightning_trainer.py", "fsdp"), "fsdp", "fsdp", "lightning", 8),
    "lightning-fsdp2": Training("lightning", ("lightning_trainer.py", "fsdp2"), "fsdp", "fsdp", "lightning", 8),
    "accelerate": Training("accelerate", ("accelerate_ddp.py",), "ddp", "ddp", "accelerate", 8),
    "transformers": Training("transformers", ("transformers_trainer.py",), "ddp", "ddp", "transformers+accelerate", 8),
    "deepspeed": Training("deepspeed", ("deepspeed_zero.py",), "deepspeed", "ddp+zero", None, 32, aborts_at_exit=True),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_it_is_told_and_the_same_without_us(jobs: Jobs, tmp_path: Path, name: str) -> None:
    training, log = TRAININGS[name], tmp_path / "log"
    needs(training.package)
    # One after the other: what DeepSpeed compiles for the first is there for the second.
    plain = start(jobs, *training.script, said=tmp_path / "plain").wait(200)
    ours = start(jobs, *training.script, said=tmp_path / "ours", **on(log)).wait(200)
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


def test_torchft_with_a_replica_that_dies_and_comes_back(jobs: Jobs, tmp_path: Path) -> None:
    needs("torchft")
    log = tmp_path / "log"
    for name, settings in (("plain", {}), ("ours", on(log))):
        replicas(jobs, tmp_path / name, **settings)
    assert losses(tmp_path / "plain") == losses(tmp_path / "ours")

    # Each life of a replica is a process group of one rank; what torchft makes between them is none of torch's.
    spans = rank_spans(log)
    lives = {span["tags"]["pytorch.metadata.life"]: span for span in spans}
    assert len(lives) == len(spans) == 3
    assert [lives[life]["metrics"]["pytorch.steps"] for life in ("staying", "back")] == [12, 6]
    ends = {life: span["tags"]["pytorch.end_reason"] for life, span in lives.items()}
    assert ends == {"staying": "destroyed", "dying": "killed", "back": "destroyed"}
    assert {span["metrics"]["world_size"] for span in spans} == {1}
    # The one that dies does so before its first beat, so that is all that is known of it.
    assert {lives[life]["tags"].get("pytorch.trainer") for life in ("staying", "back")} == {"torchft"}
    assert sorted(one["step"] for one in of_type(log, "step")) == sorted([*range(1, 13), *range(1, 7)])


def replicas(jobs: Jobs, said: Path, **settings: str) -> None:
    port = free_port()
    lighthouse = [str(BIN / "torchft_lighthouse"), f"--bind=127.0.0.1:{port}", "--min_replicas=2"]
    light = jobs.start([*lighthouse, "--join_timeout_ms=1000"], environment(None))
    settings |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "DD_PYTORCH_JOB_ID": "night-17"}

    def replica(number: int, life: str) -> Job:
        told = {"REPLICA": str(number), "LIFE": life, "DD_PYTORCH_LOG_METADATA": f"life:{life}"}
        return start(jobs, "replicas_that_come_and_go.py", said=said, ranks=1, **settings, **told)

    staying = replica(0, "staying")
    assert replica(1, "dying").wait().returncode != 0
    for one in (replica(1, "back"), staying):
        assert "ddtrace_pytorch" not in one.wait().ok().stderr
    light.kill()


def on(log: Path) -> dict[str, str]:
    return {"DD_PATCH_MODULES": "pytorch:true", "DD_PYTORCH_EXPORT": "local", "DD_PYTORCH_LOG_DIR": str(log)}


def start(jobs: Jobs, script: str, *args: str, said: Path, ranks: int = 2, **settings: str) -> Job:
    """With us, if the settings switch us on."""
    said.mkdir(exist_ok=True)
    env = environment(None, SAID=str(said), DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", **settings)
    ours = DDTRACE_RUN if "DD_PATCH_MODULES" in settings else ()
    return jobs.start([*ours, *torchrun(ranks), str(SCRIPTS / script), *args], env)


def test_restarted_in_process(jobs: Jobs, tmp_path: Path) -> None:
    needs("nvidia_resiliency_ext")
    log, script, results = tmp_path / "log", "restarted_in_process.py", []
    for name, settings in (("plain", {}), ("ours", on(log))):
        results.append(
            start(jobs, script, said=tmp_path / name, STORE_PORT=str(free_port()), **settings).wait(100).ok()
        )
    assert losses(tmp_path / "plain") == losses(tmp_path / "ours")
    assert "ddtrace_pytorch" not in results[0].stderr + results[1].stderr
    for rank in (0, 1):
        # The life that broke, and the one that went through; each is a session, and an attempt of the job.
        spans = [span for span in rank_spans(log) if span["metrics"]["rank"] == rank]
        assert [span["metrics"]["pytorch.steps"] for span in spans] == [5, 12]
        assert [span["metrics"]["pytorch.collective_calls"] for span in spans] == [5 * 4, 12 * 4]
        assert {(span["tags"]["pytorch.end_reason"], span["error"]) for span in spans} == {("destroyed", 0)}
        assert len({span["tags"]["pytorch.incarnation"] for span in spans}) == 2
    assert len({span["tags"]["pytorch.incarnation"] for span in rank_spans(log)}) == 2
    totals = [one["metrics"] for one in of_type(log, "summary") if one["name"] == "pytorch.collectives"]
    assert {one["collective.group_coverage"] for one in totals} == {1.0}


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
