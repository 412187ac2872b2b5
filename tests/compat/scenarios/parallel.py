"""The ways to parallelise that torch brings along, and what they write and read."""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from stage import PATCHED, Refused, bits, kind, launched, play, scene

DEVICE = torch.device("cpu")


def fresh(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(*shape, generator=generator)


def model() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def trained(module: Any, optimizer: Any = None, steps: int = 2) -> list[str]:
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = module(fresh(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bits(loss))
    return losses


def local(parameters: Any) -> list[Any]:
    return [one.to_local() if hasattr(one, "to_local") else one for one in parameters]


@scene
def ddp_with_a_comm_hook() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

    came = []
    for hook in (None, allreduce_hook, fp16_compress_hook, own_hook):
        ddp = torch.nn.parallel.DistributedDataParallel(model())
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        came.append([trained(ddp), bits(*ddp.parameters())])
    return came


def own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer() / 2
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])


@scene
def fsdp1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    fsdp = FullyShardedDataParallel(model(), device_id=DEVICE)
    return [trained(fsdp), bits(*fsdp.parameters())]


@scene
def fsdp2() -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Linear(8, 8)
    group = dist.new_group(group_desc="fsdp2")
    fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",)))
    return [trained(module), bits(*local(module.parameters()))]


@scene
def dtensor() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(fresh(8, 4), mesh, [Shard(0)])
    again = sharded.redistribute(mesh, [Shard(1)])
    whole = again.redistribute(mesh, [Replicate()])
    summed = (sharded @ whole.t()).sum()
    out = distribute_module(model(), mesh)(distribute_tensor(torch.ones(4, 8), mesh, [Replicate()]))
    return bits(sharded.to_local(), again.to_local(), whole.to_local(), summed.full_tensor(), out.full_tensor())


@scene
def tensor_parallel() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return [trained(module), bits(*local(module.parameters()))]


@scene
def pipelining() -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    layers = model()
    part = torch.nn.Sequential(layers[0], layers[1]) if rank == 0 else torch.nn.Sequential(layers[2])
    stage = PipelineStage(part, rank, 2, DEVICE)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, wanted: (out - wanted).square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    inputs = torch.ones(4, 8)
    losses: list[Any] = []
    came = []
    for _ in range(2):
        optimizer.zero_grad()
        out = schedule.step(inputs) if rank == 0 else schedule.step(target=torch.zeros(4, 8), losses=losses)
        optimizer.step()
        came += [bits(out) if out is not None else "", bits(*losses)]
    return [came, bits(*part.parameters())]


@scene
def zero() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)
    losses = trained(ddp, optimizer)
    optimizer.consolidate_state_dict(0)
    return [losses, bits(*ddp.parameters()), len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else 0]


@scene
def distributed_checkpoint() -> Any:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    path = os.path.join(os.environ["WORK"], "checkpoint")
    module = model()
    fully_shard(module)
    trained(module)
    saved = {"model": module.state_dict()}
    checkpoint.save(saved, checkpoint_id=path)
    other = model()
    fully_shard(other)
    loaded = {"model": other.state_dict()}
    checkpoint.load(loaded, checkpoint_id=path)
    other.load_state_dict(loaded["model"])
    future = checkpoint.async_save(saved, checkpoint_id=path + "-later")
    future.result()
    return [bits(*local(other.parameters())), bits(*local(module.parameters())), sorted(os.listdir(path))]


@scene
def join() -> Any:
    ddp = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for _ in range(2 + dist.get_rank()):
            ddp(fresh(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return bits(*ddp.parameters())


@scene
def sync_batch_norm() -> Any:
    module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(8)))
    try:
        out = module(fresh(4, 8))
    except ValueError as error:
        raise Refused(f"SyncBatchNorm: {error}") from None
    out.sum().backward()
    return bits(out, *(p.grad for p in module.parameters()))


@scene
def a_module_that_holds_a_function() -> Any:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reduce = dist.all_reduce

    holder = Holder()
    twin = copy.deepcopy(holder)
    tensor = fresh(4)
    twin.reduce(tensor)
    return [twin.reduce is dist.all_reduce, bits(tensor), kind(twin.reduce)]


@scene
def functional_collectives() -> Any:
    import torch.distributed._functional_collectives as functional

    before = launched()
    world = dist.group.WORLD
    reduced = functional.all_reduce(fresh(4), "sum", world)
    gathered = functional.all_gather_tensor(fresh(4), 0, world)
    return [
        bits(functional.wait_tensor(reduced), functional.wait_tensor(gathered)),
        kind(gathered),
        launched() - before,
    ]


@scene
def ten_thousand_calls() -> Any:
    walks: list[Any] = []
    if PATCHED:
        from ddtrace_pytorch import ledger

        kept = ledger.users_frame
        ledger.users_frame = lambda frame: walks.append(frame.f_lineno) or kept(frame)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    tensor = torch.ones(1)
    for _ in range(10_000):
        dist.all_reduce(tensor, group=alone)
    if PATCHED:
        ledger.users_frame = kept
        assert 0 < len(walks) < 100, f"{len(walks)} stack walks"
    return bits(tensor)


if __name__ == "__main__":
    play(a_life_each=True)
