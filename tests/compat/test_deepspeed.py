"""DeepSpeed's engine steps once, however many times ZeRO steps its inner optimizer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from harness.job import DDTRACE_RUN, Jobs, environment, torchrun
from harness.log import of_type, rank_spans

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

TRAIN = """
    import sys
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import deepspeed, torch

    deepspeed.init_distributed("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    groups = [{"params": one.parameters()} for one in net]
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": int(sys.argv[1])},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    for _ in range(10):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_one_step_for_each_of_the_engine(jobs: Jobs, tmp_path: Path, stage: str) -> None:
    log = tmp_path / "log"
    env = environment(None, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log),
                      DS_ACCELERATOR="cpu")  # fmt: skip
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(TRAIN), stage], env, timeout=240).ok()
    spans = rank_spans(log)
    assert [span["metrics"]["pytorch.steps"] for span in spans] == [5, 5]
    assert [span["tags"]["framework"] for span in spans] == ["deepspeed"] * 2
    assert sorted(one["step"] for one in of_type(log, "step")) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
