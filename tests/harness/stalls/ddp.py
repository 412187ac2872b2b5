"""Training as most do it: DistributedDataParallel, whose collectives no function of Python's issues, and a loss that is
averaged by hand after each step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.stalls.plan import Plan


def train_ddp(plan: Plan) -> None:
    rank = dist.get_rank()
    layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    step = 0
    while True:
        plan.begins(rank, step)
        loss = model(torch.rand(16, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average(plan, rank, step, loss)
        step += 1


def average(plan: Plan, rank: int, step: int, loss: torch.Tensor) -> None:
    told = loss.detach().clone()
    if plan.strikes(rank, step):
        plan.struck()
        if plan.fault == "ddp-skip":
            return
        told = torch.zeros(7)
    dist.all_reduce(told)
