"""Train a model whose layers are split over the ranks, by DTensor; plain torch (2.5 or later), nothing of ours in it.

On GPUs, if there is one for each rank, or on the CPU; start it with

    DD_PATCH_MODULES=pytorch:true ddtrace-run torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.narrow(nn.functional.gelu(self.wide(self.norm(batch))))


def train(device: torch.device, steps: int = 20) -> None:
    torch.manual_seed(0)  # all ranks have the whole of each batch, and a part of each layer
    model = nn.Sequential(Block(), Block(), nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model[:2]:
        parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(1, steps + 1):
        batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)).to(device)
        loss = nn.functional.mse_loss(model(batch), batch.amax(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step:2}/{steps}  loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    torch.cuda.set_device(device) if on_gpus else torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    train(device)
    dist.destroy_process_group()
