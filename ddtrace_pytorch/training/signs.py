"""By which call each framework shows: one row for each, with where it is defined and what it tells.

A class that is made, or a function that is called, says that it is put to use; that it is imported says nothing. What
spans one rank only, as FSDP over a mesh of one, is a framework in use but no parallelism.

What says *tensor parallel* is neither a mesh nor the function's name: styles that only move activations, and experts'
styles, go through `parallelize_module` too, and loaders of FSDP's state call `distribute_tensor`. It is a parameter
that has become a DTensor sharded over the mesh that was handed in.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddtrace_pytorch.identity import mesh as meshes
from ddtrace_pytorch.training.frameworks import Use


class Call(NamedTuple):
    """A call of what a sign names. Of a method, the instance is the first of `args`; of a function, `args` has all that
    can be given by position, however it was given, and `kwargs` all the rest, with its defaults."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Sign:
    """A call of `name` (``function`` or ``Class.method``), defined in `module`, tells ``tells(call)``.

    That is asked once the call has come back, or, of one that goes on for as long as the training, `before` it.
    `uncompiled`: torch.compile leaves it alone because of its name, under which it would find only what we put there.
    """

    module: str
    name: str
    tells: Callable[[Call], Use]
    before: bool = False
    uncompiled: bool = False


def _several(many: Any) -> bool:
    """Whether a kind spans more than one rank; also where it can't be said of how many."""
    return many is None or many > 1


def _uses(framework: str, *kinds: tuple[str, Any], trainer: str | None = None) -> Use:
    """`framework`, and of `kinds`, each with how many ranks it spans, those that span several."""
    return Use(framework, tuple(kind for kind, many in kinds if _several(many)), trainer)


def _world_size() -> int:
    return int(sys.modules["torch"].distributed.get_world_size())


def _size(group: Any) -> Any:
    return group.size() if group is not None else None


def _ddp(call: Call) -> Use:
    return _uses("ddp", ("ddp", _size(getattr(call.args[0], "process_group", None))))


def _fsdp1(call: Call) -> Use:
    return _uses("fsdp", ("fsdp", _size(getattr(call.args[0], "process_group", None))))


def _fully_shard(call: Call) -> Use:
    """A mesh of two dimensions replicates along the first; what only replicates is no sharding."""
    mesh, dims = call.kwargs["mesh"], call.kwargs.get("dp_mesh_dims")
    if mesh is None:
        replicas, shards = 1, _world_size()
    elif dims is not None:
        replicas, shards = _along(mesh, dims.replicate), _along(mesh, dims.shard)
    else:
        replicas, shards = (mesh.size(0), mesh.size(1)) if mesh.ndim == 2 else (1, mesh.size())
    return _uses("fsdp", ("fsdp", shards) if shards > 1 else ("ddp", replicas))


def _along(mesh: Any, names: str | Iterable[str] | None) -> int:
    names = (names,) if isinstance(names, str) else names or ()
    return math.prod(mesh.size(mesh.mesh_dim_names.index(name)) for name in names)


def _replicate(call: Call) -> Use:
    mesh = call.kwargs["mesh"]
    return _uses("ddp", ("ddp", _world_size() if mesh is None else mesh.size()))


def _zero(call: Call) -> Use:
    return _uses("zero", ("zero", getattr(call.args[0], "world_size", None)))


def _stage(call: Call) -> Use:
    return _uses("pp", ("pp", getattr(call.args[0], "num_stages", None)))


def _tensor_parallel(call: Call) -> Use:
    module, mesh = call.args[:2]
    sharded = any(_is_sharded(parameter, mesh) for parameter in module.parameters())
    return _uses("tp", ("tp", mesh.size() if mesh is not None else None)) if sharded else Use()


def _is_sharded(parameter: Any, mesh: Any | None) -> bool:
    """Over `mesh`; without one, the mesh that is used is that of a ``with`` around the call."""
    over = getattr(parameter, "device_mesh", None)
    return over is not None and mesh in (None, over) and any(place.is_shard() for place in parameter.placements)


def _mesh(call: Call) -> Use:
    return Use(places=tuple(meshes.of_mesh(call.args[0])))


def _deepspeed(call: Call) -> Use:
    engine = call.args[0]
    kind = "zero" if engine.zero_optimization_stage() > 0 else "ddp"
    return _uses("deepspeed", (kind, getattr(engine, "dp_world_size", None)))


def _megatron(call: Call) -> Use:
    """Data parallelism is told by its wrapper: `dp` is what is left of the ranks, whether or not it is used."""
    state = sys.modules["megatron.core.parallel_state"]
    places = tuple(meshes.of_megatron(state))
    kinds = tuple(place.name for place in places if place.size > 1 and place.name != "dp")
    return Use("megatron", kinds, "megatron", places)


def _megatron_data(call: Call, kind: str) -> Use:
    state = sys.modules["megatron.core.parallel_state"]
    many = state.get_data_parallel_world_size(with_context_parallel=True)
    shards = getattr(getattr(call.args[0], "ddp_config", None), "use_distributed_optimizer", False)
    zero = [("zero", many)] if shards and kind == "ddp" else []
    return _uses("megatron", (kind, many), *zero, trainer="megatron")


def _titan(call: Call) -> Use:
    """Sharding and replicating are told by `fully_shard`, which titan calls in any case."""
    dims = call.args[0]
    return _uses("none", *((kind, getattr(dims, kind, 1)) for kind in ("tp", "cp", "ep", "pp")), trainer="torchtitan")


def _hugging_face(framework: str, kind: str) -> Callable[[Call], Use]:
    """Of functions whose second argument is the mesh."""
    return lambda call: _uses(framework, (kind, call.args[1].size()))


def _trainer(word: str) -> Callable[[Call], Use]:
    return lambda call: Use(trainer=word)


_FSDP2 = ("torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed._composable.fsdp.fully_shard")
_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_FABRIC = ("lightning.fabric.fabric", "lightning_fabric.fabric")

SIGNS: tuple[Sign, ...] = (
    Sign("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", _ddp),
    Sign("torch.distributed._composable.replicate_with_fsdp", "replicate", _replicate),
    Sign("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__", _fsdp1),
    *(Sign(module, "fully_shard", _fully_shard) for module in _FSDP2),
    Sign("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer.__init__", _zero),
    Sign("torch.distributed.pipelining.stage", "_PipelineStageBase.__init__", _stage),
    Sign("torch.distributed.tensor.parallel.api", "parallelize_module", _tensor_parallel),
    Sign("torch.distributed.tensor._api", "distribute_module", _tensor_parallel),
    Sign("torch.distributed._tensor.api", "distribute_module", _tensor_parallel),  # up to 2.4
    Sign("torch.distributed.device_mesh", "DeviceMesh.__init__", _mesh, uncompiled=True),
    Sign("deepspeed.runtime.engine", "DeepSpeedEngine.__init__", _deepspeed),
    Sign("deepspeed.runtime.pipe.engine", "PipelineEngine.__init__", _stage),
    Sign("megatron.core.parallel_state", "initialize_model_parallel", _megatron),
    Sign(
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.__init__",
        lambda call: _megatron_data(call, "ddp"),
    ),
    Sign(
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
        "FullyShardedDataParallel.__init__",
        lambda call: _megatron_data(call, "fsdp"),
    ),
    Sign("torchtitan.distributed.parallel_dims", "ParallelDims.build_mesh", _titan),
    Sign("transformers.trainer", "Trainer.__init__", _trainer("transformers")),
    Sign("transformers.distributed.tensor_parallel", "apply_tensor_parallelism", _hugging_face("tp", "tp")),
    Sign("transformers.distributed.expert_parallel", "apply_expert_parallelism", _hugging_face("none", "ep")),
    Sign("transformers.integrations.tensor_parallel", "distribute_model", lambda call: Use("tp", ("tp",))),  # up to 4
    Sign("accelerate.accelerator", "Accelerator.__init__", _trainer("accelerate")),
    # `_run`: in a process that the trainer has spawned, nobody calls `fit`.
    *(
        Sign(module, f"Trainer.{name}", _trainer("lightning"), before=True)
        for module in _LIGHTNING
        for name in ("fit", "_run")
    ),
    *(Sign(module, "Fabric.__init__", _trainer("fabric")) for module in _FABRIC),
    Sign("torchft.manager", "Manager.__init__", _trainer("torchft")),
)
