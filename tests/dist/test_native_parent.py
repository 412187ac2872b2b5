"""Datadog's native GPU tracer, a shared object in its place, beside real ranks: its parent is the open rank span."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.agent import Agent, Span
from harness.job import DDTRACE_RUN, Jobs, environment, torchrun
from harness.log import rank_spans
from harness.native import built

pytestmark = [pytest.mark.dist, pytest.mark.once]

# Each rank lives twice, and forks in the first life.
TRAIN = """
    import os, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    rank = int(os.environ["RANK"])
    for life in range(2):
        store = dist.FileStore(os.environ["PARENT_CONTEXT"] + f"-{life}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        net = DDP(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        end = time.monotonic() + 1.5
        left = torch.ones(1)
        while left > 0:
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            left = torch.tensor(end - time.monotonic())
            dist.all_reduce(left, op=dist.ReduceOp.MIN)
        if not life:
            child = os.fork()
            if not child:
                open(os.environ["PARENT_CONTEXT"] + ".child", "a").write(f"{os.getpid()}\\n")
                os._exit(0)
            os.waitpid(child, 0)
        dist.destroy_process_group()
"""


def test_its_parent_is_the_piece_that_is_open(jobs: Jobs, tmp_path: Path) -> None:
    calls, log = tmp_path / "calls", tmp_path / "log"
    env = environment(
        None,
        LD_PRELOAD=str(built("parent_context", tmp_path, "-pthread")),
        PARENT_CONTEXT=str(calls),
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(log),
        DD_PYTORCH_ROTATION_SECONDS="0.3",
        DD_PYTORCH_JOB_ID="nächtlich",
        DD_PYTORCH_SERVICE="zug",
    )
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(TRAIN)], env).ok()
    children = (tmp_path / "calls.child").read_text().split()
    heard = {path.suffix[1:]: path.read_text(encoding="utf-8").splitlines() for path in tmp_path.glob("calls.*")}
    del heard["child"]
    assert len(children) == 2
    for child in children:
        assert [call for call in heard.pop(child) if not call.startswith("kept")] == ["clear"]
    # torchrun itself has no rank, and is told nothing.
    assert len(heard) == 2
    ranks = {rank: [span for span in rank_spans(log) if span["metrics"]["rank"] == rank] for rank in (0, 1)}
    for told in heard.values():
        said = [call.split("\t") for call in told if not call.startswith("kept")]
        assert [call[0] for call in said].count("clear") == 2
        assert said[-1] == ["clear"]
        tags = dict(tag.split("=", 1) for tag in said[0][7:])
        assert (tags["world_size"], tags["service"], tags["framework"]) == ("2", "zug", "none")
        pieces = ranks[int(tags["rank"])]
        assert len(pieces) >= 6
        assert list(dict.fromkeys(_ids(call) for call in said if call[0] == "set")) == [_spans(one) for one in pieces]
        last = dict(tag.split("=", 1) for tag in said[-2][7:])
        assert last == tags | {"framework": "ddp", "training_job_id": "nächtlich"}
        assert {tuple(call[4:6]) for call in said if call[0] == "set"} == {("1", "2")}


def _ids(call: list[str]) -> tuple[int, int]:
    low, high, span = (int(number, 16) for number in call[1:4])
    return high << 64 | low, span


def _spans(span: dict[str, Any]) -> tuple[int, int]:
    return int(span["trace_id"], 16), int(span["span_id"])


# After each step the CPU says that it was a GPU, and what it ran.
KERNELS = """
    import ctypes, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    tracer = ctypes.CDLL(None)
    tracer.kernel.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64]
    dist.init_process_group("gloo")
    net = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(60):
        start = time.time_ns()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        dist.barrier()
        tracer.kernel(b"sgd_step", start, time.time_ns() - start)
        time.sleep(0.01)
    dist.destroy_process_group()
"""


def test_kernels_are_below_the_rank_that_launched_them(jobs: Jobs, tmp_path: Path, agent: Agent) -> None:
    env = environment(
        agent.url,
        LD_PRELOAD=str(built("kernel_tracer", tmp_path, "-pthread")),
        KERNEL_TRACER_AGENT=f"127.0.0.1:{agent.port}",
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="agent",
        DD_PYTORCH_ROTATION_SECONDS="0.2",
    )
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(KERNELS)], env).ok()
    pieces = {_key(piece, piece["span_id"]): piece for piece in agent.ranks()}
    kernels = agent.spans("kernel")
    assert len(kernels) == 2 * 60
    below = [pieces[_key(kernel, kernel["parent_id"])] for kernel in kernels]
    for kernel, piece in zip(kernels, below, strict=True):
        assert kernel["meta"]["rank"] == str(round(piece["metrics"]["rank"]))
        # One that begins in a piece may end in the next, which then is its parent.
        assert piece["start"] <= kernel["start"] + kernel["duration"]
        assert kernel["start"] <= piece["start"] + piece["duration"]
    assert {piece["metrics"]["rank"] for piece in below} == {0, 1}
    assert len({piece["span_id"] for piece in below}) >= 4


def _key(span: Span, span_id: int) -> tuple[Any, int, int]:
    return span["meta"].get("_dd.p.tid"), int(span["trace_id"]), int(span_id)
