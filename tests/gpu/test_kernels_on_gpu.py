"""By hand, on a machine with a GPU: what it ran is found below the rank that launched it.

The reference tracer (tests/native/kernel_tracer.c) hears it from CUPTI, which the torch of a GPU machine brings.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.agent import Agent
from harness.job import DDTRACE_RUN, Jobs, environment, torchrun
from harness.native import built

pytestmark = pytest.mark.gpu

STEPS = 20

TRAIN = f"""
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.cuda.set_device(0)
    torch.ones(1, device="cuda").sum().item()  # CUPTI is there before the first parent
    dist.init_process_group("nccl")
    net = DDP(torch.nn.Linear(64, 64).cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range({STEPS}):
        net(torch.ones(2, 64, device="cuda")).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
    dist.destroy_process_group()
"""


def test_kernels_of_a_training_are_below_its_rank(jobs: Jobs, tmp_path: Path, agent: Agent) -> None:
    env = environment(
        agent.url,
        LD_PRELOAD=str(built("kernel_tracer", tmp_path, "-pthread")),
        KERNEL_TRACER_AGENT=f"127.0.0.1:{agent.port}",
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="agent",
    )
    jobs.run([*DDTRACE_RUN, *torchrun(1), jobs.script(TRAIN)], env).ok()
    pieces = {(int(piece["trace_id"]), int(piece["span_id"])) for piece in agent.ranks()}
    kernels = agent.spans("kernel")
    assert len(kernels) >= 3 * STEPS
    assert {(int(one["trace_id"]), int(one["parent_id"])) for one in kernels} <= pieces
    assert all(one["duration"] > 0 and one["metrics"]["stream"] >= 0 for one in kernels)
    assert any("gemm" in one["resource"].lower() or "cutlass" in one["resource"].lower() for one in kernels)
