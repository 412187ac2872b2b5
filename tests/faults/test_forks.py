"""Processes that a rank forks: they are no ranks, hang in nothing of ours, and may become ranks themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.agent import Agent
from harness.job import PYTHON, Jobs, environment
from harness.log import rank_spans, records

pytestmark = pytest.mark.faults

LOADERS = """
    import os
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            import threading
            ours = [t.name for t in threading.enumerate() if t.name.startswith("ddtrace_pytorch")]
            assert not ours, ours
            return torch.tensor([index * index, os.getpid()])

    if __name__ == "__main__":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for context in ("fork", "spawn"):
            for batch in DataLoader(Squares(), num_workers=2, multiprocessing_context=context):
                assert int(batch[0, 1]) != os.getpid()
                model(batch[:, :1].float()).sum().backward()
                optimizer.step()
        print("PID", os.getpid(), flush=True)
        dist.destroy_process_group()
"""


def test_data_loader_workers_have_no_span_and_no_log(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    env = environment(agent.url, DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    result = jobs.run([*PYTHON, jobs.script(LOADERS)], env).ok()
    pid = int(result.stdout.split("PID")[1])
    assert len(agent.ranks()) == 1
    assert {span["metrics"]["process_id"] for span in agent.received("pytorch.rank")} == {pid}
    everything = records(tmp_path / "log")
    assert len({record["_file"] for record in everything}) == 1
    assert {record["pid"] for record in everything if "pid" in record} == {pid}
    assert len(rank_spans(tmp_path / "log")) == 1


MANY_FORKS = """
    import logging, os, sys, threading
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch.distributed as dist
    from ddtrace.trace import tracer
    from ddtrace_pytorch import instrumentation

    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    session = instrumentation._switched_on.lifecycle.current
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            session.rotate()
            session.learn({"busy": os.getpid()})

    thread = threading.Thread(target=busy)
    thread.start()
    for number in range(200):
        child = os.fork()
        if child == 0:
            logging.getLogger("ddtrace_pytorch").warning("child %d", number)
            with tracer.trace("in.child"):
                pass
            assert instrumentation._switched_on.lifecycle.current is None
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    thread.join()
    print("FORKED", flush=True)
    dist.destroy_process_group()
"""


def test_two_hundred_forks_while_the_writer_is_busy_never_hang(jobs: Jobs, tmp_path: Path) -> None:
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    result = jobs.run([*PYTHON, jobs.script(MANY_FORKS)], env, timeout=60).ok()
    assert "FORKED" in result.stdout
    assert sum(f"child {number}" in result.stderr for number in range(200)) == 200
    assert len({record["pid"] for record in records(tmp_path / "log") if "pid" in record}) == 1


CHILDREN = """
    import sys
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def member(rank, path, destroy):
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        dist.barrier()
        if destroy:
            dist.destroy_process_group()

    if __name__ == "__main__":
        for destroy in (True, False):
            mp.start_processes(member, args=(f"{sys.argv[1]}-{destroy}", destroy), nprocs=2, start_method="fork")
"""


def test_forked_ranks_have_their_spans_with_and_without_destroy(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(CHILDREN), str(tmp_path / "meet")], environment(agent.url)).ok()
    spans = agent.ranks()
    who = sorted((span["metrics"]["rank"], span["meta"]["pytorch.end_reason"]) for span in spans)
    assert who == [(0, "destroyed"), (0, "exit"), (1, "destroyed"), (1, "exit")]
    assert len({span["metrics"]["process_id"] for span in spans}) == 4
