"""By hand, on a machine with a GPU (two for the NCCL tests): what the rank span says of it, and that we leave CUDA
alone.

The machine needs the package installed (or on PYTHONPATH) with its dependencies, and no Agent: the run log tells.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, environment, torchrun
from harness.log import of_type, rank_spans
from harness.waiting import blocked_in_cpp, until

pytestmark = pytest.mark.gpu

PATCH = """
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
"""

ALONE = (
    PATCH
    + """
    import os, time
    import torch, torch.distributed as dist
    from ddtrace_pytorch import instrumentation

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    session = instrumentation._switched_on.lifecycle.current
    deadline = time.monotonic() + 30
    while session.span.facts().get("device.kind") is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not torch.cuda.is_initialized()
    child = os.fork()
    if child == 0:
        torch.ones(1, device="cuda").sum().item()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print("uuid", "GPU-" + str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-"))
    dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("visible", [None, "0", "1"])
def test_the_device_is_named_without_initialising_cuda(jobs: Jobs, tmp_path: Path, visible: str | None) -> None:
    chosen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"), **chosen)
    result = jobs.run([*PYTHON, jobs.script(ALONE)], env).ok()
    [span] = rank_spans(tmp_path / "log")
    assert span["tags"]["device.kind"] == "cuda"
    assert result.stdout.split() == ["uuid", span["tags"]["device.id"]]
    assert span["tags"]["device.gpu.name"]
    assert span["metrics"]["device.gpu.total_memory_bytes"] > 1 << 30


NCCL = (
    PATCH
    + """
    import os, sys, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[local])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    print("uuid", dist.get_rank(), "GPU-" + str(torch.cuda.get_device_properties(local).uuid).removeprefix("GPU-"))
    if len(sys.argv) > 1:
        mine = os.path.join(sys.argv[1], str(dist.get_rank()))
        with open(mine + ".tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename(mine + ".tmp", mine)
        if dist.get_rank() == 1:
            time.sleep(120)
        dist.all_reduce(torch.ones(1, device="cuda"))
        reduced = torch.cuda.Event(blocking=True)  # waits without using the processor
        reduced.record()
        reduced.synchronize()
    dist.destroy_process_group()
"""
)


def test_two_ranks_over_nccl_name_their_own_gpus(jobs: Jobs, tmp_path: Path) -> None:
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    result = jobs.run([*torchrun(2), jobs.script(NCCL)], env).ok()
    said = {int(line.split()[1]): line.split()[2] for line in result.stdout.splitlines() if line.startswith("uuid")}
    spans = rank_spans(tmp_path / "log")
    assert {span["metrics"]["rank"]: span["tags"]["device.id"] for span in spans} == said
    assert len(set(said.values())) == 2
    for span in spans:
        assert span["tags"]["torch.distributed.backend"] == "nccl"
        assert span["tags"]["framework"] == "ddp"
        assert span["tags"]["torch.cuda.nccl_version"]
        assert span["metrics"]["device.gpu.sm_count"] > 0
        assert span["tags"]["pytorch.end_reason"] == "destroyed"
    devices = {(record["host"], record["device"]["device.id"]) for record in of_type(tmp_path / "log", "identity")}
    assert len(devices) == 2


def test_a_rank_blocked_in_a_cuda_synchronise_says_farewell(jobs: Jobs, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    job = jobs.start([*torchrun(2), jobs.script(NCCL), str(pids)], env)
    until(lambda: all((pids / rank).exists() for rank in "01"), 90, "both ranks reach the collective")
    until(lambda: blocked_in_cpp(int((pids / "0").read_text())), 30, "rank 0 is in the synchronise")
    sent = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    job.wait(60)
    assert time.monotonic() - sent < 15
    assert [span["tags"]["pytorch.end_reason"] for span in rank_spans(tmp_path / "log")] == ["signal:SIGTERM"] * 2
