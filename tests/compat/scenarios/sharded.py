"""Models that were parallelised, compiled; and what parallelises them, as the user's code sees it."""

import inspect
import pickle
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from stage import bits, failure, kind, launched, plain, play, scene
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

DEVICE = torch.device("cpu")


def fresh(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def model() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def local(parameters: Any) -> list[Any]:
    return [one.to_local() if hasattr(one, "to_local") else one for one in parameters]


def dynamo() -> dict[str, Any]:
    return {name: {plain(str(key)): value for key, value in one.items()} for name, one in counters.items() if one}


def trained(make: Any) -> Any:
    # What torch imports when it compiles such a thing for the first time goes through ddtrace's importer, and Dynamo
    # counts that one's frames, too.
    module = make()
    torch.compile(module, backend="aot_eager")(fresh(4, 8)).square().mean().backward()
    module = make()
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(module, backend="aot_eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before, losses = launched(), []
    for _ in range(2):
        loss = compiled(fresh(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bits(loss))
    return [losses, bits(*local(module.parameters())), launched() - before, dynamo()]


@scene
def compiled_ddp() -> Any:
    return trained(lambda: DistributedDataParallel(model()))


@scene
def compiled_fsdp1() -> Any:
    return trained(lambda: FullyShardedDataParallel(model(), device_id=DEVICE, use_orig_params=True))


@scene
def compiled_fsdp2() -> Any:
    def make() -> Any:
        module = model()
        fully_shard(module[0])
        return fully_shard(module)

    return trained(make)


@scene
def compiled_tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return trained(lambda: parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


@scene
def compiled_fsdp2_of_a_tensor_parallel_model() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return trained(lambda: fully_shard(parallelize_module(model(), mesh["tp"], plan), mesh=mesh["dp"]))


@scene
def meshes_in_compiled_code() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def slices(tensor: Any) -> Any:
        return tensor * mesh["tp"].size() + mesh.get_local_rank("tp") + mesh["dp"].size()

    def makes(tensor: Any) -> Any:
        return tensor + DeviceMesh("cpu", [0, 1], mesh_dim_names=("made",)).size()

    came: list[Any] = []
    for function, whole in ((slices, True), (slices, False), (makes, True), (makes, False)):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(function, backend="eager", fullgraph=whole)
        if function is makes and whole:
            came.append(failure(lambda compiled=compiled: compiled(torch.ones(2)), tail=1)["type"])
        else:
            said = bits(compiled(torch.ones(2)))
            came.append([said, {name: one for name, one in dynamo().items() if name in ("graph_break", "stats")}])
    return came


@scene
def what_parallelises_stays_what_it_is() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    sharded = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["tp"])
    functions = [fully_shard, parallelize_module]
    methods = [DeviceMesh.__init__, DistributedDataParallel.__init__, FullyShardedDataParallel.__init__]
    copies = [pickle.loads(pickle.dumps(one)) is one for one in functions]
    again = pickle.loads(pickle.dumps(mesh))
    return [
        copies,
        [str(inspect.signature(one)) for one in functions + methods],
        [len(inspect.getsource(one)) for one in functions + methods],
        [one.__qualname__ for one in functions + methods],
        [kind(sharded), kind(fully_shard.state(sharded))],
        [again == mesh, hash(again) == hash(mesh), mesh["tp"] == mesh["tp"], repr(mesh["tp"])],
        repr(mesh._flatten("flat")),
    ]


@scene
def warnings_and_errors_are_about_the_users_lines() -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model(), mesh, {"nowhere": ColwiseParallel()})
    parallelize_module(model(), mesh)
    FullyShardedDataParallel(torch.nn.ModuleList([torch.nn.Linear(4, 4)]), device_id=DEVICE)
    return [
        failure(lambda: DistributedDataParallel(torch.nn.ReLU())),
        failure(lambda: DistributedDataParallel(model(), device_ids=[])),
        failure(lambda: fully_shard(torch.nn.ModuleList([]))),
        failure(lambda: DeviceMesh("cpu", [[0, 1], [2, 3]])),
        failure(lambda: DeviceMesh("cpu")),
        failure(lambda: parallelize_module(model(), None, {"0": ColwiseParallel()})),
    ]


if __name__ == "__main__":
    play()
