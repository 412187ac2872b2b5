"""Train a few blocks with FSDP2 and take a checkpoint half-way; plain torch (2.6 or later), nothing of ours in it.

torch's distributed checkpoints need NumPy, which `pip install torch` doesn't bring along. The checkpoint is written to
`fsdp2-checkpoint/` in the working directory.

On GPUs, if there is one for each rank, or on the CPU; start it with

    DD_PATCH_MODULES=pytorch:true ddtrace-run torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(device: torch.device, steps: int = 20) -> None:
    torch.manual_seed(0)  # the same model on all ranks; what they learn from differs
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    for block in (*model, model):
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(step: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        batch = torch.randn(32, 64, generator=numbers).to(device)
        return (model(batch) - batch.roll(1, dims=1)).square().mean()

    def say(step: int, loss: torch.Tensor, then: str = "") -> None:
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step:2}/{steps}  loss {total.item() / dist.get_world_size():.9g}{then}", flush=True)

    for step in range(1, steps + 1):
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(step, loss)
        if step == steps // 2:
            weights, moments = get_state_dict(model, optimizer)
            checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id="fsdp2-checkpoint")
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id="fsdp2-checkpoint")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    say(steps // 2 + 1, loss_of(steps // 2 + 1), then="  again, from the checkpoint")


if __name__ == "__main__":
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    torch.cuda.set_device(device) if on_gpus else torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    train(device)
    dist.destroy_process_group()
