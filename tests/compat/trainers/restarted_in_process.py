"""A DDP training in NVIDIA's in-process restart: one rank raises half-way, all begin anew in the same processes."""

import os
from datetime import timedelta

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from said import say

BREAKS_AT, STEPS = 6, 12


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["INPROCESS_PORT"]), "timeout": timedelta(seconds=60)},
    monitor_thread_interval=timedelta(milliseconds=100),
    monitor_process_interval=timedelta(milliseconds=100),
    last_call_wait=timedelta(0),
)
def train(life: inprocess.CallWrapper = None):
    # A store for each life: torch finds the addresses of the one before in the launcher's.
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['SAID']}.store-{life.iteration}",
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for step in range(1, STEPS + 1):
        if (life.iteration, step, dist.get_rank()) == (0, BREAKS_AT, 1):
            raise RuntimeError("this life breaks here")
        torch.manual_seed(step)
        loss = model(torch.randn(8, 4)).square().mean()
        say(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
    dist.destroy_process_group()


train()
