"""By hand, on a machine with a GPU (two for the NCCL test): profiler windows see its kernels, and leave it as it was.

The machine needs the package installed (or on PYTHONPATH) with its dependencies, and no Agent: the run log tells.
"""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, alone, environment, torchrun
from harness.log import of_type

pytestmark = pytest.mark.gpu
with_both = pytest.mark.parametrize("taken_with", ["torch", "sampler"])

PATCH = """
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
"""

# Says how long a step took before the first window, and after the last, in ms.
ALONE = (
    PATCH
    + """
    import statistics, sys, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(16)]).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    took = []
    for step in range(1, 451):
        torch.cuda.synchronize()
        began = time.perf_counter()
        net(torch.ones(64, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - began) * 1e3)
    print(statistics.median(took[50:140]), statistics.median(took[350:440]))
    dist.destroy_process_group()
"""
)


@with_both
def test_kernels_are_recorded_and_steps_are_as_fast_after_it_as_before(
    jobs: Jobs, tmp_path: Path, taken_with: str
) -> None:
    log = tmp_path / "log"
    env = alone(
        log,
        DD_PYTORCH_PROFILE_WITH=taken_with,
        DD_PYTORCH_PROFILE_EVERY="150",
        DD_PYTORCH_PROFILE_MEMORY="true",
    )
    before, after = map(float, jobs.run([*PYTHON, jobs.script(ALONE)], env).ok().stdout.split())
    told = of_type(log, "profile")
    assert [(one["step"], one["state"], one["activity"], one["of"]) for one in told[:2]] == [
        (150, "complete", "gpu", "kernels"), (300, "complete", "gpu", "kernels"),
    ]  # fmt: skip
    for one in told[:2]:
        assert one["metrics"]["events"] > 100
        assert 0 < one["metrics"]["busy_share"] < 1
        assert all(one["start"] <= kernel["start"] < one["start"] + one["duration"] for kernel in one["longest"])
        trace = json.loads(gzip.decompress(Path(one["path"]).read_bytes()))
        assert pickle.loads(Path(one["memory"]).read_bytes())["segments"]
        assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    assert after / before <= 1.05


# The user's own profiles, one right after the other, between our windows; says how many kernels each has. The first one
# may come before anything of ours. Ends without another call of CUDA after the last window.
YOURS = (
    PATCH
    + """
    import sys
    import torch, torch.distributed as dist

    many = torch.ones(64, 64, device="cuda")

    def profiled():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as one:
            for _ in range(50):
                many.add_(1)
        return sum("elementwise" in event.name() for event in one.profiler.kineto_results.events())

    found = []
    if sys.argv[1] == "first":
        found.append(profiled())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    optimizer = torch.optim.SGD([many.requires_grad_()], lr=0.0)
    with torch.no_grad():
        for step in range(1, 36):
            many.add_(1)
            optimizer.step()
            if step == 15:
                found += [profiled() for _ in range(4)]
        with ddtrace_pytorch.profile_window():
            many.add_(1)
    print(found)
    dist.destroy_process_group()
"""
)


@with_both
@pytest.mark.parametrize("whose", ["first", "later"])
def test_profiles_of_yours_in_a_row_have_all_their_kernels_between_our_windows(
    jobs: Jobs, tmp_path: Path, whose: str, taken_with: str
) -> None:
    log = tmp_path / "log"
    every = "10" if whose == "later" else "0"
    env = alone(log, DD_PYTORCH_PROFILE_WITH=taken_with, DD_PYTORCH_PROFILE_EVERY=every)
    done = jobs.run([*PYTHON, jobs.script(YOURS), whose], env).ok()
    assert json.loads(done.stdout) == [50] * (5 if whose == "first" else 4)
    told = of_type(log, "profile")
    # Its steps take no time, so that one may come before the last has been written.
    taken = [one for one in told if one.get("why") != "the window before is still being written"]
    assert taken
    assert {one["state"] for one in taken} == {"complete"}


NCCL = (
    PATCH
    + """
    import os, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    net = DDP(torch.nn.Linear(1024, 1024).cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(40):
        time.sleep(0.01 * dist.get_rank())
        net(torch.ones(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    dist.destroy_process_group()
"""
)


@with_both
def test_the_late_rank_is_named_by_its_nccl_kernels(jobs: Jobs, tmp_path: Path, taken_with: str) -> None:
    log = tmp_path / "log"
    env = environment(
        None,
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(log),
        DD_PYTORCH_PROFILE_WITH=taken_with,
        DD_PYTORCH_PROFILE_EVERY="15",
        NCCL_DEBUG="WARN",
    )
    jobs.run([*torchrun(2), jobs.script(NCCL)], env).ok()
    assert all(one["metrics"]["communication_calls"] > 0 for one in of_type(log, "profile"))
    report = jobs.run([*PYTHON, "-m", "ddtrace_pytorch.cli.main", "report", str(log)], environment(None)).ok()
    assert "rank 1 is late: in 2 profiler windows" in report.stdout
