"""A training in NVIDIA's in-process restart: one rank raises half-way, all begin anew in the same processes.

Gradients are summed by hand, and nobody is in a collective as it breaks: only NCCL's can be aborted, so on gloo a
rank in one would wait for its time-out; and one that has raised out of DistributedDataParallel hangs later, as the next
life gives its process group up.
"""

import os
import time
from datetime import timedelta

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from said import say

BREAKS_AT, STEPS = 6, 12


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["STORE_PORT"]), "timeout": timedelta(seconds=60)},
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
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for step in range(1, STEPS + 1):
        if (life.iteration, step) == (0, BREAKS_AT):
            if dist.get_rank() == 1:
                raise RuntimeError("this life breaks here")
            while True:  # until the restart raises in here
                time.sleep(0.01)
        torch.manual_seed(step * 2 + dist.get_rank())
        loss = net(torch.randn(8, 4)).square().mean()
        say(loss.detach())
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


train()
