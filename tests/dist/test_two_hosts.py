"""What only shows on more than one host: whose host a rank is on, and files and pids that must not be mixed up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.agent import Agent, Span, free_port
from harness.hosts import NAMES, torchrun_node, two_hosts
from harness.job import DDTRACE_RUN, PYTHON, Job, environment
from harness.log import Record, of_type, rank_spans
from harness.waiting import until

pytestmark = pytest.mark.dist

# Two process groups, one after the other: without an id and with a log on each host, then with an id and one log
# directory for both hosts. The second has a store of its own: gloo may find the first one's addresses in the old one,
# and then training dies, with us or without.
TRAIN = """
    import os
    import torch
    import torch.distributed as dist

    def train(**how):
        dist.init_process_group("gloo", **how)
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        dist.destroy_process_group()

    os.environ["DD_PYTORCH_LOG_DIR"] = "/tmp/log"
    train()
    os.environ["DD_PYTORCH_LOG_DIR"] = os.environ["SHARED"]
    os.environ["DD_PYTORCH_JOB_ID"] = "job-7"
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), 2, is_master=rank == 0)
    train(store=store, rank=rank, world_size=2)
"""

# Alone, so rank 0 of its own group, until somebody makes the file `go`.
TRAIN_ALONE = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("training", flush=True)
    while not os.path.exists(sys.argv[1]):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
    dist.destroy_process_group()
    print("trained to the end", flush=True)
"""


@dataclass
class Torchrun:
    """What a job of two nodes left: one rank on each, two process groups one after the other."""

    spans: list[Span]
    merged: Path
    shared: Path

    def group(self, ordinal: int) -> list[Span]:
        """Rank 0's and rank 1's span of one process group."""
        return [[span for span in self.spans if span["metrics"]["rank"] == rank][ordinal] for rank in (0, 1)]


@pytest.fixture(scope="module")
def torchrun_job(shared_agent: Agent, tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    directory = tmp_path_factory.mktemp("torchrun")
    merged, shared = directory / "merged", directory / "shared"
    shared_agent.clear()
    with two_hosts(directory) as hosts:
        env = environment(
            shared_agent.url,
            DD_PATCH_MODULES="pytorch:true",
            DD_PYTORCH_EXPORT="both",
            SHARED=str(shared),
            PORT=str(free_port()),
        )
        port = free_port()
        running = [
            host.start([*DDTRACE_RUN, *torchrun_node(number, port), host.script(TRAIN)], env)
            for number, host in enumerate(hosts)
        ]
        for job in running:
            job.wait().ok()
        for host in hosts:
            shutil.copytree(host.tmp / "log", merged, dirs_exist_ok=True)
    assert shared_agent.check_failures() == ""
    return Torchrun(shared_agent.ranks(), merged, shared)


@dataclass
class Alone:
    """What two jobs left, each PID 1 and rank 0 on its host, with one id and one log directory between them.

    host-a's was sent two SIGTERMs, each once the one before was answered. `survived` says whether it went on.
    """

    shared: Path
    stdout: dict[str, str]
    survived: bool

    def spans(self, host: str) -> list[Record]:
        return [span for span in rank_spans(self.shared) if span["tags"]["host"] == host]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    directory = tmp_path_factory.mktemp("alone")
    shared, go = directory / "shared", directory / "go"
    with two_hosts(directory) as hosts:
        env = environment(
            None,
            DD_PATCH_MODULES="pytorch:true",
            DD_PYTORCH_EXPORT="local",
            DD_PYTORCH_LOG_DIR=str(shared),
            DD_PYTORCH_JOB_ID="job-8",
        )
        running = {
            host: host.start_as_init([*DDTRACE_RUN, *PYTHON, host.script(TRAIN_ALONE), str(go)], env) for host in hosts
        }
        for job in running.values():
            _trains(job)
        for sent in (1, 2):
            os.kill(hosts[0].init_pid(running[hosts[0]]), signal.SIGTERM)
            until(lambda: len(rank_spans(shared)) == sent, 10, f"SIGTERM {sent} ends a piece")  # noqa: B023
            until(
                lambda: _beats_after(rank_spans(shared)[-1], shared), 10, "the next piece is open, and the Pulse beats"
            )
        survived = running[hosts[0]].process.poll() is None
        go.touch()
        stdout = {host.name: job.wait().ok().stdout for host, job in running.items()}
    return Alone(shared, stdout, survived)


def _beats_after(piece: Record, log: Path) -> bool:
    end = piece["start"] + piece["duration"]
    return any(beat["ts"] > end and beat["_file"] == piece["_file"] for beat in of_type(log, "beat"))


def _trains(job: Job) -> None:
    def said() -> bool:
        assert job.process.poll() is None, job.wait().describe()
        return "training" in job.stdout()

    until(said, 60, "the job trains")


def _report(directory: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ddtrace_pytorch.cli.main", "report", str(directory), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_rank_is_tagged_with_its_own_host(torchrun_job: Torchrun, ordinal: int) -> None:
    ranks = torchrun_job.group(ordinal)
    for tag in ("host", "pytorch.node"):
        assert [span["meta"][tag] for span in ranks] == list(NAMES)
    assert [span["metrics"]["pytorch.group_rank"] for span in ranks] == [0, 1]
    assert [span["metrics"]["pytorch.local_rank"] for span in ranks] == [0, 0]


def test_devices_of_the_same_number_on_two_hosts_have_two_ids(torchrun_job: Torchrun) -> None:
    assert [span["meta"]["device.id"] for span in torchrun_job.group(0)] == ["host-a:cpu", "host-b:cpu"]


def test_hosts_agree_on_an_id_that_nobody_gave(torchrun_job: Torchrun) -> None:
    first, second = torchrun_job.group(0), torchrun_job.group(1)
    assert {span["meta"]["training_job.id.source"] for span in first} == {"generated"}
    assert len({span["meta"]["training_job.id"] for span in first}) == 1
    assert len({span["meta"]["pytorch.incarnation"] for span in first}) == 1
    assert {span["meta"]["training_job.id"] for span in second} == {"job-7"}
    assert len({span["meta"]["pytorch.incarnation"] for span in second}) == 1
    assert first[0]["meta"]["pytorch.incarnation"] != second[0]["meta"]["pytorch.incarnation"]


def test_logs_of_both_hosts_copied_together_are_one_job(torchrun_job: Torchrun) -> None:
    report = _report(torchrun_job.merged)
    assert [job["id"] for job in report["jobs"]] == [torchrun_job.group(0)[0]["meta"]["training_job.id"]]
    (attempt,) = report["attempts"]
    assert attempt["hosts"] == list(NAMES)
    assert (attempt["ranks_found"], attempt["ranks_missing"]) == ("0-1", "")
    assert [(rank["rank"], rank["host"], rank["end_reason"]) for rank in attempt["ranks"]] == [
        (0, "host-a", "destroyed"),
        (1, "host-b", "destroyed"),
    ]
    assert report["notes"] == []


def test_hosts_that_share_a_log_directory_write_one_job_there(torchrun_job: Torchrun) -> None:
    report = _report(torchrun_job.shared)
    (attempt,) = report["attempts"]
    assert report["job"]["id"] == "job-7"
    assert [(rank["rank"], rank["host"]) for rank in attempt["ranks"]] == list(enumerate(NAMES))
    assert attempt["hosts"] == list(NAMES)
    assert report["notes"] == []


def test_the_same_job_id_rank_and_pid_on_two_hosts_share_no_file(alone: Alone) -> None:
    identities = of_type(alone.shared, "identity")
    assert {(record["job"]["id"], record["rank"], record["pid"]) for record in identities} == {("job-8", 0, 1)}
    assert {record["host"] for record in identities} == set(NAMES)
    hosts_by_file: dict[str, set[str]] = {}
    for record in identities:
        hosts_by_file.setdefault(record["_file"], set()).add(record["host"])
    assert sorted(map(sorted, hosts_by_file.values())) == [["host-a"], ["host-b"]]


def test_two_jobs_under_one_id_are_two_starts_each_with_its_host(alone: Alone) -> None:
    report = _report(alone.shared, "--attempt", "all")
    assert len(report["jobs"]) == 1
    assert sorted(attempt["hosts"] for attempt in report["attempts"]) == [["host-a"], ["host-b"]]
    assert [attempt["ranks_found"] for attempt in report["attempts"]] == ["0", "0"]
    assert [rank["end_reason"] for attempt in report["attempts"] for rank in attempt["ranks"]] == ["destroyed"] * 2
    assert report["notes"] == []


def test_training_as_pid_1_outlives_sigterm_as_it_does_without_us(alone: Alone) -> None:
    assert alone.survived
    assert alone.stdout == dict.fromkeys(NAMES, "training\ntrained to the end\n")


def test_the_span_of_a_pid_1_that_outlived_sigterm_goes_on_in_linked_pieces(alone: Alone) -> None:
    first, second, last = alone.spans("host-a")
    assert [span["tags"]["pytorch.end_reason"] for span in (first, second, last)] == [
        "signal:SIGTERM",
        "signal:SIGTERM",
        "destroyed",
    ]
    assert [span["metrics"]["pytorch.piece"] for span in (first, second, last)] == [0, 1, 2]
    for before, after in ((first, second), (second, last)):
        assert after["start"] >= before["start"] + before["duration"]
        assert [(link["trace_id"], link["span_id"]) for link in after["links"]] == [
            (before["trace_id"], before["span_id"])
        ]
    (other,) = alone.spans("host-b")
    assert other["tags"]["pytorch.end_reason"] == "destroyed"
