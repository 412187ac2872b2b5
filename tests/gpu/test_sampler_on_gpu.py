"""By hand, on a machine with a GPU (two for the NCCL test): the kernels of one step in so many, by its own CUPTI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, alone, environment, torchrun
from harness.log import of_type

pytestmark = pytest.mark.gpu

# Says how many additions of its own each profile of the user's has, of 50.
TRAIN = """
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    many = torch.ones(64, 64, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([many], lr=0.0)
    found = []
    for step in range(1, 61):
        with torch.no_grad():
            for _ in range(5 if step % 10 == 0 else 50):
                many.add_(1)
        many.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        time.sleep(0.04)  # for what was counted to be taken before the next
        if step == 30:
            for _ in range(3):
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as one:
                    with torch.no_grad():
                        for _ in range(50):
                            many.add_(1)
                found.append(sum("elementwise" in event.name() for event in one.profiler.kineto_results.events()))
    print(found)
    dist.destroy_process_group()
"""


def test_kernels_are_counted_and_profiles_of_yours_have_all_of_theirs(jobs: Jobs, tmp_path: Path) -> None:
    env = alone(tmp_path, DD_PYTORCH_KERNEL_EVERY="10", DD_PYTORCH_KERNEL_BUDGET="100")
    done = jobs.run([*PYTHON, jobs.script(TRAIN)], env).ok()
    assert json.loads(done.stdout) == [50, 50, 50]
    told = of_type(tmp_path, "kernels")
    assert {one["step"] for one in told} >= {10, 20, 40, 50}
    assert {one["state"] for one in told} == {"complete"}
    assert len({one["metrics"]["events"] for one in told}) == 1
    (first,) = (one for one in told if "longest" in one)
    added = next(one for one in first["kernels"] if "elementwise" in one["name"])
    assert "at::native" in added["name"]
    assert added["count"] >= 5
    assert all(first["start"] - 10**9 < one["start"] < first["start"] + 10**10 for one in first["longest"])


NCCL = """
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import os, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    net = DDP(torch.nn.Linear(1024, 1024).cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(60):
        time.sleep(0.01 * dist.get_rank())
        net(torch.ones(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    dist.destroy_process_group()
"""


def test_the_rank_that_is_late_has_the_shortest_nccl_kernels(jobs: Jobs, tmp_path: Path) -> None:
    env = environment(
        None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"), DD_PYTORCH_KERNEL_EVERY="10"
    )
    jobs.run([*torchrun(2), jobs.script(NCCL)], env).ok()
    told = of_type(tmp_path / "log", "kernels")
    assert told
    assert all(one["metrics"]["communication_calls"] > 0 for one in told)
    command = [*PYTHON, "-m", "ddtrace_pytorch.cli.main", "report", str(tmp_path / "log")]
    assert "rank 1 is late: in" in jobs.run(command, environment(None)).ok().stdout
