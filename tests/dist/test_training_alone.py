"""What a training loop shows of itself: optimizer steps, compiled ones too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, alone
from harness.log import rank_spans

pytestmark = pytest.mark.dist

STEPS = """
    import json, sys, threading
    import torch
    import torch._dynamo as dynamo
    if sys.argv[1] == "with us":
        import ddtrace_pytorch
        ddtrace_pytorch.patch()

    def breaks(optimizer):
        found = dynamo.explain(optimizer.step)()
        return [found.graph_count, found.graph_break_count, found.op_count]

    def sessions():
        return sum(thread.name == "ddtrace_pytorch.pulse" for thread in threading.enumerate())

    seen = {}
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(3)).sum().backward()
        seen[kind.__name__ + " breaks"] = breaks(optimizer)
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            step()
        seen[kind.__name__ + " weights"] = model.weight.tolist()
        assert sessions() == (sys.argv[1] == "with us"), "a compiled step opens a session"
    optimizer.step()
    print(json.dumps(seen))
"""


def test_a_compiled_step_is_the_same_with_us_and_opens_a_session(jobs: Jobs, tmp_path: Path) -> None:
    script = jobs.script(STEPS)
    running = [jobs.start([*PYTHON, script, who], alone(tmp_path / who)) for who in ("with us", "without")]
    ours, plain = (json.loads(job.wait().ok().stdout) for job in running)
    assert ours == plain
    (span,) = rank_spans(tmp_path / "with us")
    assert span["metrics"]["world_size"] == 1
    assert span["metrics"]["pytorch.steps"] == 9  # `explain` steps too
    assert "torch.distributed.backend" not in span["tags"]
    assert span["tags"]["pytorch.end_reason"] == "exit"
