"""The rank span of real jobs, as a real Agent receives it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.agent import Agent
from harness.job import DDTRACE_RUN, Jobs, environment, torchrun
from harness.log import rank_spans
from harness.look import HOOKS

pytestmark = pytest.mark.dist

TRAIN = """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def test_each_rank_of_a_torchrun_job_has_one_span_at_the_agent(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    env = environment(
        agent.url, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(tmp_path / "log")
    )
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(TRAIN)], env).ok()
    ranks = agent.ranks()
    assert [span["resource"] for span in ranks] == ["rank 0", "rank 1"]
    for number, span in enumerate(ranks):
        assert span["service"] == "pytorch"
        assert span["error"] == 0
        assert span["metrics"]["rank"] == number
        assert span["metrics"]["world_size"] == 2
        assert span["metrics"]["pytorch.piece"] == 0
        assert span["meta"]["framework"] == "ddp"
        assert span["meta"]["pytorch.end_reason"] == "destroyed"
        assert span["meta"]["torch.distributed.backend"] == "gloo"
        assert span["meta"]["launcher"] == "torchrun"
        assert span["meta"]["pytorch.instrument"] == "in_place" + HOOKS
    assert ranks[0]["meta"]["training_job.id"] == ranks[1]["meta"]["training_job.id"]
    assert ranks[0]["meta"]["pytorch.incarnation"] == ranks[1]["meta"]["pytorch.incarnation"]
    assert [span["span_id"] for span in rank_spans(tmp_path / "log")] == [str(span["span_id"]) for span in ranks]
