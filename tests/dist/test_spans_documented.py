"""What a real Agent receives of a real job is what docs/spans.md says, as tag or as metric."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.agent import Agent
from harness.documented import documented, undocumented
from harness.job import DDTRACE_RUN, Jobs, environment, torchrun

pytestmark = [pytest.mark.dist, pytest.mark.once]

# All that spans are made of, once: the second rank stays away until it is said that it does.
EVERYTHING = """
    import glob, os, time
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader
    import ddtrace_pytorch

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    log = os.environ["DD_PYTORCH_LOG_DIR"] + "/*/*/"
    net = DDP(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def wait_for(condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with ddtrace_pytorch.span("around it all", env="mine", size=3):
        for number, batch in enumerate(DataLoader(torch.ones(24, 64), batch_size=4), 1):
            ddtrace_pytorch.step_tag("training")
            with ddtrace_pytorch.span("forward", **{"a.b": 1, "mode": "train"}):
                loss = net(batch).sum()
                time.sleep(0.001)
            loss.backward()
            ddtrace_pytorch.scalar({"loss": loss, "odd": float("nan")})
            ddtrace_pytorch.event("new best")
            try:
                with ddtrace_pytorch.span("fails"):
                    raise ValueError("meant")
            except ValueError:
                pass
            optimizer.step()
            optimizer.zero_grad()
    torch.save(net.state_dict(), f"rank-{rank}.pt")
    try:
        torch.save(net.state_dict(), "/no/such/folder/at.pt")
    except (OSError, RuntimeError):
        pass
    four = torch.ones(4)
    dist.all_reduce(four, async_op=True).wait()
    dist.all_gather_object([None, None], rank)
    dist.send(four, 1) if rank == 0 else dist.recv(four, 0)
    if rank == 0:
        wait_for(lambda: glob.glob(log + "profiles/*"))
    else:
        wait_for(lambda: any('"type":"verdict"' in open(path).read() for path in glob.glob(log + "*.jsonl")))
    dist.barrier()
    dist.destroy_process_group()
"""


def test_all_that_the_agent_receives_is_documented(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    env = environment(
        agent.url,
        DD_PATCH_MODULES="pytorch:true",
        DD_ENV="staging",
        DD_VERSION="1.2.3",
        DD_PYTORCH_EXPORT="both",
        DD_PYTORCH_LOG_DIR=str(tmp_path / "log"),
        DD_PYTORCH_LOG_METADATA="team:vision",
        DD_PYTORCH_COLLECTIVES="all",
        DD_PYTORCH_STEP_SAMPLE="1",
        DD_PYTORCH_STALL_SECONDS="1",
        DD_PYTORCH_PROFILE_EVERY="4",
        DD_PYTORCH_PROFILE_ACTIVE="1",
        DD_PYTORCH_PROFILE_RANKS="0",
        DD_PYTORCH_ROTATION_SECONDS="1",
        DD_PYTORCH_SNAPSHOT_SECONDS="0.5",
        NCCL_DEBUG="WARN",
    )
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(EVERYTHING)], env).ok()
    sections = documented()
    wrong: dict[str, set[str]] = {}
    for span in agent.received():
        # Attributes of the user's own are names of the user's own.
        own = ("size", "mode") if span["name"] == "pytorch.span" else ()
        tags, metrics = ({name for name in span[kind] if name not in own} for kind in ("meta", "metrics"))
        names = {**sections[""], **sections.get(span["name"], {})}
        wrong.setdefault(span["name"], set()).update(undocumented(names, tags, metrics))
    assert {name: found for name, found in wrong.items() if found} == {}
    # That of a GPU is seen in test_kernel_sampling.py, where its kernels are replayed.
    assert set(wrong) == set(sections) - {"", "pytorch.kernels"}
