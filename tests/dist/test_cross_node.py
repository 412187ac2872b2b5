"""Whether a group's ranks are on several nodes: by where they are, never by how many devices they see."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.agent import free_port
from harness.hosts import two_hosts
from harness.job import DDTRACE_RUN, PYTHON, Jobs, environment, torchrun
from harness.log import Record, of_type

pytestmark = pytest.mark.dist

# Every rank of the world waits until it has heard where all are; `pair` is ranks 0 and 1, `later` as well.
TRAIN = """
    import os, time
    import torch
    import torch.distributed as dist
    from ddtrace_pytorch import instrumentation

    if "LOCAL_RANK" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() < 2:
        dist.broadcast(torch.ones(1), src=0, group=pair)
    collectives = instrumentation._switched_on.lifecycle.current._collectives
    deadline = time.monotonic() + 30
    while collectives._groups.nodes is None and time.monotonic() < deadline:
        time.sleep(0.01)
    later = dist.new_group([0, 1])
    dist.barrier()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if dist.get_rank() < 2:
        for group in (pair, later):
            dist.all_gather_into_tensor(torch.empty(2), torch.ones(1), group=group)
            dist.barrier(group=group)
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
        dist.send(torch.ones(1), dist.get_world_size() - 1)
    else:
        dist.recv(torch.ones(1), 0)
    if dist.get_world_size() == 2 and dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)
    dist.barrier()
    dist.destroy_process_group()
"""


def settings(log: Path, **more: str) -> dict[str, str]:
    return environment(
        None,
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(log),
        DD_PYTORCH_COLLECTIVES="crossnode",
        DD_PYTORCH_PRINT="crossnode",
        **more,
    )


def crossings(log: Path) -> dict[tuple[str, str], set[str | None]]:
    """What the summaries say, by operation and by whether it was of the world."""
    found: dict[tuple[str, str], set[str | None]] = {}
    for record in of_type(log, "summary"):
        where = "world" if record["tags"]["collective.group"] == "world" else "pair"
        found.setdefault((record["resource"], where), set()).add(record["tags"].get("collective.cross_node"))
    return found


def calls(log: Path) -> list[Record]:
    return [span for span in of_type(log, "span") if span["name"] == "pytorch.collective"]


def printed(stdout: str) -> list[tuple[str, list[int], int | None]]:
    """The marks: operation, ranks of the group, peer."""
    marks = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return [(mark["operation"], mark["group_ranks"], mark.get("peer")) for mark in marks]


@dataclass
class OnTwoHosts:
    log: Path
    stdout: list[str]


@pytest.fixture(scope="module")
def on_two_hosts(tmp_path_factory: pytest.TempPathFactory) -> OnTwoHosts:
    """What a job left with ranks 0 and 1 on one host and rank 2 on the other, which no launcher started."""
    directory = tmp_path_factory.mktemp("cross")
    log, port = directory / "log", str(free_port())
    with two_hosts(directory) as hosts:
        running: list[Any] = []
        for rank, host in enumerate((hosts[0], hosts[0], hosts[1])):
            place = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            running.append(host.start([*DDTRACE_RUN, *PYTHON, host.script(TRAIN)], settings(log, **place)))
        return OnTwoHosts(log, [job.wait().ok().stdout for job in running])


def test_the_world_crosses_nodes_and_a_group_on_one_host_does_not(on_two_hosts: OnTwoHosts) -> None:
    said = crossings(on_two_hosts.log)
    assert said["all_reduce", "world"] == {"true"}
    assert said["broadcast", "pair"] == {"false"}, "of a group that was there before the nodes were known"
    assert said["all_gather_into_tensor", "pair"] == {"false"}, "and of one made later"


def test_crossnode_tells_of_each_call_across_nodes_and_of_no_other(on_two_hosts: OnTwoHosts) -> None:
    told = calls(on_two_hosts.log)
    assert {span["tags"]["collective.cross_node"] for span in told} == {"true"}
    transfers = {0: ["send", "send"], 1: ["recv"], 2: ["recv"]}
    for rank in (0, 1, 2):
        mine = [span["resource"] for span in told if f"rank-{rank:05}" in span["_file"]]
        # The first all_reduce came before anybody knew.
        assert mine[-len(transfers[rank]) - 5 :] == ["barrier", *["all_reduce"] * 3, *transfers[rank], "barrier"]
        assert len(mine) - len(transfers[rank]) in (5, 6)


def test_marks_between_nodes_are_of_such_groups_and_of_transfers_between_such_ranks(on_two_hosts: OnTwoHosts) -> None:
    world = [0, 1, 2]
    by_rank = [printed(stdout) for stdout in on_two_hosts.stdout]
    assert {tuple(ranks) for marks in by_rank for _, ranks, _ in marks} == {tuple(world)}
    assert by_rank[0][-6:] == [
        ("barrier", world, None), *[("all_reduce", world, None)] * 3, ("send", world, 2), ("barrier", world, None),
    ]  # fmt: skip
    assert by_rank[1:] == [[], [("recv", world, 0)]]


def test_one_visible_gpu_for_each_process_of_a_host_is_one_node(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(TRAIN)], settings(tmp_path)).ok()
    assert "ZeroDivisionError" not in result.stderr
    assert crossings(tmp_path)["all_reduce", "world"] == {"false"}
    assert crossings(tmp_path)["all_gather_into_tensor", "pair"] == {"false"}
    assert calls(tmp_path) == []
    assert printed(result.stdout) == []
