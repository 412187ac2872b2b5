"""A training that says what it does: spans, numbers and events of its own, and those of a process beside it.

Without `ddtrace-run` and its variable they do nothing. On GPUs, if there is one for each rank, or on the CPU:

    DD_PATCH_MODULES=pytorch:true ddtrace-run torchrun --standalone --nproc-per-node 2 examples/user_records.py
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn

from ddtrace_pytorch import event, scalar, set_step, span, step_tag

# A process that is no trainer: it has no process group, and need not have torch.
ROLLOUT = """from ddtrace_pytorch import scalar, span
with span("rollout", prompts=16):
    scalar({"reward": 0.5})"""


@span("evaluate")
def evaluate(model: nn.Module, device: torch.device) -> float:
    step_tag("eval")
    with torch.no_grad():
        inputs = torch.linspace(-1, 1, 100, device=device).unsqueeze(1)
        return (model(inputs) - inputs.square()).square().mean().item()


def train(device: torch.device, epochs: int = 3, batches: int = 8) -> None:
    torch.manual_seed(dist.get_rank())  # DistributedDataParallel gives all ranks the model of the first
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for number in range(epochs * batches):
        set_step(1000 + number, relative_step=number)  # as in a training that goes on from a checkpoint
        with span("forward and backward", samples=64):
            inputs = torch.rand(64, 1).to(device) * 2 - 1
            loss = (model(inputs) - inputs.square()).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scalar({"loss": loss, "lr": optimizer.param_groups[0]["lr"]})
        if number % batches == batches - 1:
            error = evaluate(model.module, device)
            event("evaluated", error=error)
            if dist.get_rank() == 0:
                print(f"step {1000 + number}  loss {loss.item():.9g}  error {error:.9g}", flush=True)


if __name__ == "__main__":
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    torch.cuda.set_device(device) if on_gpus else torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    if dist.get_rank() == 0:
        subprocess.run([sys.executable, "-c", ROLLOUT], env=os.environ | {"DD_PYTORCH_SOURCE": "rollout"}, check=True)
    train(device)
    dist.destroy_process_group()
