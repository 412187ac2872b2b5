"""What a rank says it is parallelised with, and where it is in its meshes: in real jobs, with torch's own ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.agent import Agent
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone, environment, torchrun
from harness.log import Record, of_type, rank_spans

pytestmark = pytest.mark.dist

# A store for each life: torch finds the addresses of the one before in the launcher's.
INIT = """
    import os
    import torch.distributed as dist
    def init(number):
        dist.init_process_group("gloo", init_method=f"file://{os.path.abspath(f'life-{number}')}",
                                rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
"""

# Each life of the process group puts one thing to use; the names are bound before we are switched on.
LIVES = f"""
{INIT}
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module)
    import ddtrace_pytorch
    ddtrace_pytorch.patch()

    CPU = torch.device("cpu")

    def model():
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def step(module, optimizer=None):
        module(torch.ones(2, 4)).sum().backward()
        (optimizer or torch.optim.SGD(module.parameters(), 0.1)).step()

    def mesh_of(*shape, names):
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    def nothing():
        pass

    def ddp():
        step(DDP(model()))

    def fsdp1():
        step(FSDP(model(), device_id=CPU))

    def fsdp2():
        module = model()
        for layer in module:
            fully_shard(layer)
        step(fully_shard(module))

    def fsdp2_of_one_rank():
        fully_shard(model(), mesh=mesh_of(2, 1, names=("a", "b"))["b"])

    def hsdp():
        step(fully_shard(model(), mesh=mesh_of(1, 2, names=("replicate", "shard"))))

    def only_replicated():
        step(fully_shard(model(), mesh=mesh_of(2, 1, names=("replicate", "shard"))))

    def zero():
        module = model()
        step(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1))

    def ddp_and_zero():
        module = DDP(model())
        step(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1))

    def pipelining():
        rank = dist.get_rank()
        stage = PipelineStage(torch.nn.Linear(4, 4), rank, 2, CPU)
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).sum())
        schedule.step(torch.ones(2, 4)) if rank == 0 else schedule.step(target=torch.ones(2, 4))

    def tp():
        step(parallelize_module(model(), mesh_of(2, names=("tp",)), {{"0": ColwiseParallel(), "1": RowwiseParallel()}}))

    def tp_by_hand():
        def shard(name, module, mesh):
            for key, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, torch.nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
        distribute_module(model(), mesh_of(2, names=("tp",)), shard)

    def no_tp():
        # Activations only, nothing at all, and a loader of FSDP's state.
        mesh = mesh_of(2, names=("tp",))
        parallelize_module(torch.nn.Sequential(torch.nn.LayerNorm(4)), mesh, {{"0": SequenceParallel()}})
        parallelize_module(model(), mesh, PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()))
        parallelize_module(model(), mesh)
        distribute_tensor(torch.ones(4), mesh, [Shard(0)])

    def refused():
        try:
            DDP(torch.nn.ReLU())  # has no parameters
        except RuntimeError:
            pass
        else:
            raise AssertionError

    USES = [nothing, ddp, fsdp1, fsdp2, fsdp2_of_one_rank, hsdp, only_replicated, zero, ddp_and_zero, pipelining, tp,
            tp_by_hand, no_tp, refused, nothing]
    for number, use in enumerate(USES):
        init(number)
        torch.manual_seed(0)
        use()
        dist.barrier()
        dist.destroy_process_group()
"""

# `framework`, `pytorch.parallelism` and dimensions with their sizes.
SAID: list[tuple[str, str | None, dict[str, int]]] = [
    ("none", None, {}),
    ("ddp", "ddp", {}),
    ("fsdp", "fsdp", {}),
    ("fsdp", "fsdp", {}),
    ("fsdp", None, {"a": 2, "b": 1}),
    ("fsdp", "fsdp", {"replicate": 1, "shard": 2}),
    ("fsdp", "ddp", {"replicate": 2, "shard": 1}),
    ("zero", "zero", {}),
    ("ddp", "ddp+zero", {}),
    ("pp", "pp", {}),
    ("tp", "tp", {"tp": 2}),
    ("tp", "tp", {"tp": 2}),
    ("none", None, {"tp": 2}),
    ("none", None, {}),
    ("none", None, {}),
]


def sizes(span: Record) -> dict[str, int]:
    found = {}
    for name, value in span["metrics"].items():
        if name.startswith("pytorch.mesh.") and name.endswith(".size"):
            found[name.removeprefix("pytorch.mesh.").removesuffix(".size")] = value
    return found


def coordinates(span: Record) -> dict[str, int]:
    return {name: span["metrics"][f"pytorch.mesh.{name}"] for name in sizes(span)}


def settings(log: Path) -> dict[str, str]:
    return {"DD_PYTORCH_EXPORT": "local", "DD_PYTORCH_LOG_DIR": str(log)}


def test_each_way_to_parallelise_is_told_and_only_while_it_is_used(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs.run([*torchrun(2), jobs.script(LIVES)], environment(None, **settings(log))).ok()
    for rank in (0, 1):
        spans = [span for span in rank_spans(log) if span["metrics"]["rank"] == rank]
        said = [(span["tags"]["framework"], span["tags"].get("pytorch.parallelism"), sizes(span)) for span in spans]
        assert said == SAID
        for span in spans:
            for name, size in sizes(span).items():
                assert span["metrics"][f"pytorch.mesh.{name}"] == (rank if size == 2 else 0)


ONE_RANK = """
    import sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    import ddtrace_pytorch

    def life(use=None):
        dist.init_process_group("gloo")
        model = use(torch.nn.Linear(1, 1)) if use else None
        dist.destroy_process_group()

    ddtrace_pytorch.patch()
    assert "torch.distributed.fsdp" not in sys.modules
    life(DDP)
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
    life()
    life(lambda model: FSDP(model, device_id=torch.device("cpu")))
    ddtrace_pytorch.unpatch()
    ddtrace_pytorch.patch()
    life(lambda model: FSDP(DDP(model).module, device_id=torch.device("cpu")))
    life(fully_shard)
    life(DDP)
"""


def test_a_framework_is_what_was_used_be_it_by_one_rank(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(ONE_RANK)], alone(tmp_path / "log")).ok()
    spans = rank_spans(tmp_path / "log")
    assert [span["tags"]["framework"] for span in spans] == ["ddp", "none", "fsdp", "fsdp", "fsdp", "ddp"]
    assert not [span for span in spans if "pytorch.parallelism" in span["tags"]]


FSDP2 = """
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    fully_shard(torch.nn.Linear(4, 4))
    dist.destroy_process_group()
"""


def test_fsdp2_is_no_longer_none(agent: Agent, jobs: Jobs) -> None:
    """Fault 8 of ddtrace's built-in integration."""
    env = environment(agent.url, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="agent")
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(FSDP2)], env).ok()
    assert [(span["meta"]["framework"], span["meta"]["pytorch.parallelism"]) for span in agent.ranks()] == [
        ("fsdp", "fsdp")
    ] * 2


# Four ranks in two dimensions, by a mesh that makes the process group itself; then laid out in other ways as well.
TWO_DIMENSIONS = """
    import gc, weakref
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    module = parallelize_module(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})
    DDP(torch.nn.Linear(4, 4), process_group=mesh.get_group("dp"))
    flat = mesh._flatten("dp_tp")
    if hasattr(flat, "_unflatten"):
        flat._unflatten(0, (2, 2), ("slow", "fast"))
    half = DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))  # says less of dp
    backwards = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("tp", "dp"))  # says as much, and later
    init_device_mesh("cpu", (4,))
    later = DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("ring",))
    DeviceMesh.from_group(mesh.get_group("tp"), "cpu", mesh_dim_names=("from_group",))
    outside = DeviceMesh("cpu", [0, 1], mesh_dim_names=("outside",))  # for the other two
    gone = weakref.ref(half)
    del half
    gc.collect()
    assert gone() is None
    dist.barrier()
    dist.destroy_process_group()
"""


def test_coordinates_in_every_named_mesh(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = environment(None, DD_PATCH_MODULES="pytorch:true", **settings(log))
    jobs.run([*DDTRACE_RUN, *torchrun(4), jobs.script(TWO_DIMENSIONS)], env).ok()
    from torch.distributed.device_mesh import DeviceMesh

    spans = rank_spans(log)
    assert len(spans) == 4
    for rank, span in enumerate(spans):
        outside = {"outside": rank} if rank < 2 else {}
        expected = {
            "dp": rank // 2, "tp": rank % 2, "dp_tp": rank, "ring": 3 - rank, "from_group": rank % 2, **outside,
        }  # fmt: skip
        if hasattr(DeviceMesh, "_unflatten"):
            expected |= {"slow": rank // 2, "fast": rank % 2}
        assert coordinates(span) == expected
        assert sizes(span) == dict.fromkeys(expected, 2) | {"dp_tp": 4, "ring": 4}
        assert (span["tags"]["framework"], span["tags"]["pytorch.parallelism"]) == ("ddp", "ddp+tp")


def test_what_is_learnt_is_in_a_further_identity_record_before_the_end(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = environment(None, DD_PATCH_MODULES="pytorch:true", **settings(log))
    # So that the first record is written before anything is learnt.
    waits = TWO_DIMENSIONS.replace(
        "    mesh = init",
        """
    import os, time
    from pathlib import Path
    dist.init_process_group("gloo")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(Path(os.environ["DD_PYTORCH_LOG_DIR"]).rglob("rank-*"))) < 4:
        time.sleep(0.01)
    mesh = init""",
        1,
    )
    jobs.run([*DDTRACE_RUN, *torchrun(4), jobs.script(waits)], env).ok()
    identities = [record for record in of_type(log, "identity") if record["rank"] == 3]
    told: list[Any] = [record["tags"].get("pytorch.mesh.dp") for record in identities]
    assert told[0] is None
    assert told[-1] == 1
    assert identities[-1]["tags"]["pytorch.parallelism"] == "ddp+tp"


LATE = f"""
{INIT}
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    import ddtrace_pytorch
    init(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    init_device_mesh("cpu", (2, 2))
    ddtrace_pytorch.patch()
    dist.barrier()
    dist.destroy_process_group()
    init(1)
    dist.barrier()
    dist.destroy_process_group()
"""


def test_meshes_from_before_the_patch_are_told_by_their_groups_and_not_by_the_next_life(
    jobs: Jobs, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    jobs.run([*torchrun(4), jobs.script(LATE)], environment(None, **settings(log))).ok()
    spans = rank_spans(log)
    assert [coordinates(span) for span in spans[::2]] == [{"dp": rank // 2, "tp": rank % 2} for rank in range(4)]
    assert [coordinates(span) for span in spans[1::2]] == [{}] * 4
