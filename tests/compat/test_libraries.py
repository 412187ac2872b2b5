"""Trainer libraries as they are installed: they are where the table says, and what has no training is told.

Trainings are in test_trainers.py. Each is skipped where it isn't installed. What is tried by hand, and with which
release, is in docs/compatibility.md.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
from harness.installed import needs
from harness.job import Jobs, environment, torchrun
from harness.log import rank_spans

from ddtrace_pytorch.training.signs import SIGNS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

# Of each set, an installed release has one; the others are for other releases.
PLACES = [
    {"deepspeed.runtime.engine"},
    {"deepspeed.runtime.pipe.engine"},
    {"megatron.core.parallel_state"},
    {"megatron.core.distributed.distributed_data_parallel"},
    {"megatron.core.distributed.fsdp.mcore_fsdp_adapter"},
    {"torchtitan.distributed.parallel_dims"},
    {"transformers.trainer"},
    {"transformers.distributed.tensor_parallel", "transformers.integrations.tensor_parallel"},
    {"transformers.distributed.expert_parallel", "transformers.integrations.tensor_parallel"},
    {"accelerate.accelerator"},
    {"lightning.pytorch.trainer.trainer"},
    {"lightning.fabric.fabric"},
    {"pytorch_lightning.trainer.trainer"},
    {"lightning_fabric.fabric"},
    {"torchft.manager"},
]


def is_there(module: str) -> bool:
    """Whether all signs of `module` are functions that it defines."""
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or not module.startswith(missing.name):
            pytest.skip(f"{missing.name} is not installed")
        return False
    for sign in SIGNS:
        if sign.module == module:
            owner, _, name = sign.name.rpartition(".")
            thing = vars(getattr(imported, owner, None) if owner else imported).get(name)
            if not inspect.isfunction(thing):
                return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("modules", PLACES, ids=lambda modules: max(modules))
def test_what_the_table_names_is_where_it_says(modules: set[str]) -> None:
    needs(min(modules).partition(".")[0])
    assert sum(is_there(module) for module in modules) == 1


def test_every_sign_of_a_library_is_looked_for_above() -> None:
    libraries = {sign.module for sign in SIGNS if sign.module.partition(".")[0] != "torch"}
    assert libraries == set().union(*PLACES)


TRANSFORMERS_TP = """
    import os
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        LlamaForCausalLM(LlamaConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
            vocab_size=32)).save_pretrained("model")
    dist.barrier()
    LlamaForCausalLM.from_pretrained("model", tp_plan="auto")
"""

MEGATRON = """
    import torch.distributed as dist
    from megatron.core import parallel_state
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
"""

TITAN = """
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # its backend of dimensions of one rank
    from torchtitan.distributed import parallel_dims
    parallel_dims.device_type = "cpu"  # it knows only machines that have something faster
    dist.init_process_group("gloo")
    parallel_dims.ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=2).build_mesh()
"""

TRAININGS = {
    "transformers.distributed": (TRANSFORMERS_TP, "tp", "tp", None),
    "megatron.core": (MEGATRON, "megatron", "tp", "megatron"),
    "torchtitan": (TITAN, "none", "tp", "torchtitan"),
}


@pytest.mark.parametrize("library", TRAININGS)
def test_a_training_is_told(jobs: Jobs, tmp_path: Path, library: str) -> None:
    needs(library.partition(".")[0])
    script, framework, parallelism, trainer = TRAININGS[library]
    switch_on = "\n    import ddtrace_pytorch\n    ddtrace_pytorch.patch()\n"
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    jobs.run([*torchrun(2), jobs.script(switch_on + script)], env, timeout=200).ok()
    spans = rank_spans(tmp_path / "log")
    assert [span["metrics"]["rank"] for span in spans] == [0, 1]
    for span in spans:
        tags = span["tags"]
        said = tags["framework"], tags.get("pytorch.parallelism"), tags.get("pytorch.trainer")
        assert said == (framework, parallelism, trainer)
        if parallelism == "tp":
            assert span["metrics"]["pytorch.mesh.tp"] == span["metrics"]["rank"]
            assert span["metrics"]["pytorch.mesh.tp.size"] == 2
