"""Processes that end without `destroy_process_group`: hooks that are still registered then can abort them."""

from __future__ import annotations

import json

import pytest
from harness.job import PYTHON, Jobs, environment

pytestmark = pytest.mark.faults

MANY = 30

# Each child is a process group by itself and ends as scripts do, with a reducer and works that are still alive. Forked,
# two at a time and from a frozen heap, because thirty times to import torch and to clear it away takes minutes.
END = f"""
    import gc, json, os, sys, warnings
    import torch
    import torch._dynamo
    import torch.distributed as dist
    import ddtrace_pytorch.session
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    ddtrace_pytorch.patch()

    def train():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=dist.new_group([0]))
        model(torch.ones(2, 4)).sum().backward()
        works = [dist.group.WORLD.allreduce([torch.ones(2)]) for _ in range(3)]
        works.append(dist.all_reduce(torch.ones(2), async_op=True))
        sys.modules["kept"] = (model, works)  # beyond the end of this module

    gc.collect()
    gc.freeze()
    ends, running = [], 0
    for _ in range({MANY}):
        if os.fork() == 0:
            train()
            sys.exit(0)
        running += 1
        if running == 2:
            ends.append(os.wait()[1])
            running -= 1
    while running:
        ends.append(os.wait()[1])
        running -= 1
    print(json.dumps(ends))
"""


@pytest.mark.timeout(400)
def test_thirty_processes_end_well(jobs: Jobs) -> None:
    env = environment(None, DD_PYTORCH_EXPORT="none")
    result = jobs.run([*PYTHON, jobs.script(END)], env, timeout=300).ok()
    assert json.loads(result.stdout.splitlines()[-1]) == [0] * MANY
    assert "Traceback" not in result.stderr
    assert "could not" not in result.stderr
