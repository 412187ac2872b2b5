"""torchft: two replica groups of one rank each; one dies half-way, is started anew, and catches up with the other.

Each is a job of torchrun's with a process group of its own; the group between them is torchft's, made anew with each
quorum of the lighthouse at TORCHFT_LIGHTHOUSE. Gradients are averaged by hand: of torchft's two ways to do it, one
fails in a hook of its own where a peer on gloo is gone, and the other waits for nothing on a CPU.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from said import say
from torchft import Manager, Optimizer, ProcessGroupGloo

DIES_AT, STEPS = 6, 12
REPLICA = os.environ["REPLICA"]

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
inner = torch.optim.AdamW(net.parameters(), 0.01)


def state():
    return {"net": net.state_dict(), "optimizer": inner.state_dict()}


def load(state):
    net.load_state_dict(state["net"])
    inner.load_state_dict(state["optimizer"])


dist.init_process_group("gloo")
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), load_state_dict=load, state_dict=state, min_replica_size=2,
    replica_id=f"replica-{REPLICA}", use_async_quorum=False, timeout=timedelta(seconds=20),
    quorum_timeout=timedelta(seconds=60), connect_timeout=timedelta(seconds=20), hostname="127.0.0.1",
)  # fmt: skip
optimizer = Optimizer(manager, inner)
while manager.current_step() < STEPS:
    optimizer.zero_grad()
    step = manager.current_step()
    if step == DIES_AT and os.environ["LIFE"] == "dying":
        os._exit(1)
    generator = torch.Generator().manual_seed(step * 2 + int(REPLICA))
    loss = net(torch.randn(8, 4, generator=generator)).square().mean()
    loss.backward()
    for parameter in net.parameters():
        manager.allreduce(parameter.grad).wait()
    optimizer.step()
    if manager.current_step() > step:
        say(loss.detach(), REPLICA)
manager.shutdown(wait=False)
dist.destroy_process_group()
