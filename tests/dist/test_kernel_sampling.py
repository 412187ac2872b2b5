"""Kernels of two ranks, counted by the library as it is built, with a libcupti that replays them: at the Agent, in the
report and in the timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.agent import Agent
from harness.documented import documented, undocumented
from harness.job import DDTRACE_RUN, PYTHON, Jobs, environment, torchrun
from harness.kernel_sampler import build_mock, build_sampler
from harness.log import of_type

pytestmark = [pytest.mark.dist, pytest.mark.once]

TESTS = Path(__file__).resolve().parents[1]

# NCCL's kernels of rank 1 are the shorter ones: the other waits in them.
TRAIN = """
    import os, sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from harness.kernel_sampler import MockCupti
    from harness.sampled import NoGpu, kernels
    from ddtrace_pytorch.kernels import sampler, sampler_library, windows

    cupti = MockCupti(Path(sys.argv[2]))
    sampler_library.find = lambda: Path(sys.argv[3])
    sampler_library.libcupti = lambda: sys.argv[2]
    sampler.Gpu = lambda torch: NoGpu()
    windows.gpu_is_there = lambda torch: True
    torch.cuda.is_current_stream_capturing, torch.cuda.synchronize = bool, int
    torch.version.cuda = "13.0"
    dist.init_process_group("gloo")
    net = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nccl = 1_000_000 if dist.get_rank() else 9_000_000
    for step in range(60):
        cupti.replay(kernels((b"gemm", 3_000_000), (b"ncclDevKernel_AllReduce", nccl)))
        time.sleep(0.05)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def train(jobs: Jobs, agent: Agent, tmp_path: Path, **settings: str) -> None:
    """Told at the Agent, and in a run log in ``log``."""
    log = {"DD_PYTORCH_EXPORT": "both", "DD_PYTORCH_LOG_DIR": str(tmp_path / "log")}
    env = environment(agent.url, DD_PATCH_MODULES="pytorch:true", **log, **settings)
    libraries = str(build_mock(tmp_path)), str(build_sampler(tmp_path))
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(TRAIN), str(TESTS), *libraries], env).ok()


def test_kernels_of_real_ranks_are_told_everywhere(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    log, line = tmp_path / "log", tmp_path / "line.json"
    train(jobs, agent, tmp_path, DD_PYTORCH_KERNEL_EVERY="10")
    told = of_type(log, "kernels")
    assert {(one["step"], one["state"], one["metrics"]["events"]) for one in told} == {
        (step, "complete", 2) for step in (10, 20, 30, 40, 50, 60)
    }

    ranks = {span["trace_id"]: span for span in agent.ranks()}
    summaries = agent.spans("pytorch.kernels")
    assert sorted(span["metrics"]["kernels.communication_ms"] for span in summaries) == [1.0, 9.0]
    assert {span["metrics"]["kernels.steps"] for span in summaries} == {6.0}
    sections = documented()
    for span in summaries:
        assert undocumented({**sections[""], **sections["pytorch.kernels"]}, span["meta"], span["metrics"]) == []
    steps = {span["span_id"]: span for span in agent.spans("pytorch.step")}
    kernels = agent.spans("pytorch.kernel")
    assert len(kernels) == 4
    for kernel in kernels:
        assert steps[kernel["parent_id"]]["resource"] == "step 10"
        assert kernel["trace_id"] in ranks

    ours = [*PYTHON, "-m", "ddtrace_pytorch.cli.main"]
    shown = jobs.run([*ours, "report", str(log)], environment(None)).ok().stdout
    assert "GPU kernels" in shown
    assert "rank 1 is late: in 6 steps whose kernels were counted, collectives took 1ms each time on it, and 9ms" in shown
    jobs.run([*ours, "timeline", str(log), "-o", str(line)], environment(None)).ok()
    names = {event.get("args", {}).get("name") for event in json.loads(line.read_text())["traceEvents"]}
    assert any(str(name).startswith("GPU stream 7") for name in names)


def test_windows_of_real_ranks_can_be_taken_with_it(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    train(jobs, agent, tmp_path, DD_PYTORCH_PROFILE_WITH="sampler", DD_PYTORCH_PROFILE_EVERY="20")
    told = of_type(log, "profile")
    assert [(one["step"], one["state"], one["activity"], one["metrics"]["events"]) for one in told] == 2 * [
        (20, "complete", "gpu", 4), (40, "complete", "gpu", 4), (60, "cut short", "gpu", 2),
    ]  # fmt: skip
    windows = agent.spans("pytorch.profile")
    assert {span["metrics"]["profile.communication_ms"] for span in windows} == {1.0, 2.0, 9.0, 18.0}
    assert len(agent.spans("pytorch.kernel")) == 20
    shown = jobs.run([*PYTHON, "-m", "ddtrace_pytorch.cli.main", "report", str(log)], environment(None)).ok().stdout
    assert "rank 1 is late: in 2 profiler windows, collectives took 2ms each time on it, and 18ms" in shown
