"""A process that makes its group anew again and again: each life's memory is given back as it ends, and doesn't wait for
Python to look for cycles, which it does the more seldom the more there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.job import DDTRACE_RUN, Jobs, environment, torchrun

pytestmark = [pytest.mark.dist]

LIVES = """
    import collections, gc, json, os, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    import ddtrace_pytorch
    from torch.nn.parallel import DistributedDataParallel

    def is_ours(one):
        return str(type(one).__module__).startswith("ddtrace_pytorch") and hasattr(one, "__dict__")

    def parts():
        # How many there are of what a session consists of, and of what that does.
        there = [one for one in gc.get_objects() if is_ours(one)]
        whole = [one for one in there if type(one).__qualname__ == "Session"]
        for _ in range(2):
            whole += [part for one in whole for part in vars(one).values() if is_ours(part)]
        kinds = {type(one) for one in whole}
        return collections.Counter(str(type(one)) for one in there if type(one) in kinds)

    gc.disable()
    rank, work, said = int(os.environ["RANK"]), Path(os.environ["WORK"]), []
    for life in range(4):
        dist.init_process_group("gloo", store=dist.FileStore(str(work / f"store-{life}"), 2), rank=rank, world_size=2)
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        until, over = time.monotonic() + 2.5, torch.zeros(1)
        while not over:
            with ddtrace_pytorch.span("user.work"):
                loss = model(torch.ones(2, 4)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ddtrace_pytorch.scalar({"loss": loss})
            over.fill_(time.monotonic() > until)
            dist.all_reduce(over)
            time.sleep(0.01)
        dist.all_reduce(over, async_op=True).wait()
        del model, optimizer, loss
        dist.destroy_process_group()
        said.append(parts())  # of one that has nothing under way, and is kept until the next
    (work / f"said-{rank}.json").write_text(json.dumps(said))
"""


def test_a_life_that_is_over_is_given_back(jobs: Jobs, tmp_path: Path) -> None:
    env = environment(
        None,
        WORK=str(tmp_path),
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(tmp_path / "log"),
        DD_PYTORCH_PROFILE_EVERY="20",
        DD_PYTORCH_STEP_SAMPLE="1",
        DD_PYTORCH_SUMMARY_SECONDS="1",
        DD_PYTORCH_ROTATION_SECONDS="1",
        DD_PYTORCH_SNAPSHOT_SECONDS="1",
    )
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(LIVES)], env).ok()
    for rank in (0, 1):
        said = json.loads((tmp_path / f"said-{rank}.json").read_text())
        second, last = said[1], said[-1]
        assert len(second) > 20
        # Two lives later. Of one kind or another there may be one more just then.
        more = [f"{kind}: {second[kind]}, then {many}" for kind, many in last.items() if many >= second[kind] + 2]
        assert not more, "\n".join(sorted(more))
