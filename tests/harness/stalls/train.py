"""One rank of a small real training job: data, tensor and no parallelism at once, on groups of two and of four.

Run by :mod:`harness.stalls.trial`; the fault comes by the environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from harness.stalls import faults
from harness.stalls.ddp import train_ddp
from harness.stalls.pipeline import train_pipeline
from harness.stalls.plan import CALLS, WORLD, Plan, altered, from_environment

BATCH = 8
PR_SET_PDEATHSIG = 1


class Samples(Dataset[torch.Tensor]):
    """As many as anybody wants; in the plan's step the culprit's take long to load."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        step, sample = divmod(index, BATCH)
        if self._plan.fault in ("loader", "worker") and sample == 0 and self._plan.strikes(self._rank, step):
            self._plan.struck()
            time.sleep(self._plan.lasting)
        return torch.rand(32)


def batches(plan: Plan, rank: int) -> Iterator[torch.Tensor]:
    return iter(DataLoader(Samples(plan, rank), batch_size=BATCH, num_workers=int(plan.fault == "worker")))


class Exchange:
    """The collectives of one group in a step, over the model's gradients."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._size = dist.get_world_size(group)
        self._root = dist.get_process_group_ranks(group)[0]

    def make(self, calls: list[str], model: torch.nn.Sequential, go_on: torch.Tensor) -> None:
        """`go_on` is the root's afterwards."""
        for call in calls:
            self._make(call, model, go_on)

    def _make(self, call: str, model: torch.nn.Sequential, go_on: torch.Tensor) -> None:
        name, _, odd = call.partition(" of another ")
        if name == "all_gather":
            there = [torch.empty(16, device=self._device) for _ in range(self._size)]
            dist.all_gather(there, torch.rand(16, device=self._device), group=self.group)
        elif name == "broadcast":
            dist.broadcast(go_on, self._root, group=self.group)
        else:
            layer = model[0] if name == "large" else model[2]
            gradients = torch.cat([parameter.grad.flatten() for parameter in layer.parameters()])
            if odd == "shape":
                gradients = gradients[: len(gradients) // 2]
            elif odd == "dtype":
                gradients = gradients.double()
            dist.all_reduce(gradients, group=self.group)


def device_of(plan: Plan) -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if plan.backend == "nccl" else torch.device("cpu")


def train(plan: Plan) -> None:
    rank = dist.get_rank()
    device = device_of(plan)
    exchanges = {}
    if plan.ranks == WORLD:
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
        exchanges = {name: Exchange(mesh.get_group(name), device) for name in ("tp", "dp")}
    exchanges["world"] = Exchange(dist.group.WORLD, device)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    faults.prepare(plan)
    data = batches(plan, rank)
    dist.barrier()
    began = time.monotonic()
    step = 0
    go_on = torch.ones(1, device=device)
    while go_on:
        plan.begins(rank, step)
        faults.between_steps(plan, rank, step, model)
        model(next(data).to(device)).square().mean().backward()
        strikes = plan.strikes(rank, step)
        order = list(exchanges)
        if strikes and plan.fault == "circle":
            plan.struck()
            order = ["dp", "world", "tp"]
        for name in order:
            calls = list(CALLS)
            if strikes and name == plan.group:
                calls = altered(CALLS, plan)
                if calls != list(CALLS):
                    plan.struck()
            mine = torch.tensor([float(time.monotonic() - began < plan.seconds)], device=device)
            exchanges[name].make(calls, model, mine)
            go_on = mine if name == "world" else go_on
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            dist.barrier()
        step += 1


def main() -> None:
    # Whatever ends the launcher ends its ranks, those too that are stopped.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    plan = from_environment()
    if plan.patched:
        import ddtrace_pytorch

        ddtrace_pytorch.patch()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    if plan.backend == "nccl":
        torch.cuda.set_device(device_of(plan))
    dist.init_process_group(plan.backend)
    try:
        {"pipeline": train_pipeline, "ddp-skip": train_ddp, "ddp-shape": train_ddp}.get(plan.fault, train)(plan)
    except Exception:
        plan.raised(dist.get_rank())
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
