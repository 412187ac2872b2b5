"""What holds a function of torch.distributed is copied, pickled and sent to other processes as if nobody watched."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone, environment
from harness.log import of_type

pytestmark = pytest.mark.dist

HOLD = """
    import copy, functools, os, pickle
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.reduce = dist.all_reduce

    def work(index, reduce, model):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(4)
        reduce(tensor)
        model.reduce(tensor)
        dist.destroy_process_group()

    if __name__ == "__main__":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = Model()
        copied = copy.deepcopy(model)
        assert copied.reduce is model.reduce is copy.copy(model.reduce)
        assert model.reduce == dist.all_reduce and model.reduce in {dist.all_reduce}
        for reduce in (model.reduce, dist.all_reduce):
            reduce(torch.ones(2))
        with open("pickled", "wb") as file:
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                held = {"bare": dist.all_reduce, "partial": functools.partial(dist.all_reduce, group=None)}
                pickle.dump(held, file, protocol)
        mp.spawn(work, args=(functools.partial(dist.all_reduce, op=dist.ReduceOp.SUM), model))
        dist.destroy_process_group()
        # Held beyond the session's end.
        with open("pickled", "ab") as file:
            pickle.dump({"bare": model.reduce, "partial": functools.partial(copied.reduce)}, file)
"""

LOAD = """
    import pickle, sys
    import torch.distributed as dist

    loaded = []
    with open(sys.argv[1], "rb") as file:
        while file.peek(1):
            loaded.append(pickle.load(file))
    print(sum(one["bare"] is dist.all_reduce and one["partial"].func is dist.all_reduce for one in loaded), len(loaded))
"""


@pytest.mark.parametrize("forced", ["in_place", "wrapt"])
def test_functions_are_held_copied_and_sent(jobs: Jobs, tmp_path: Path, forced: str) -> None:
    log = tmp_path / "log"
    env = alone(log, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_INSTRUMENT=forced)
    job = jobs.start([*DDTRACE_RUN, *PYTHON, jobs.script(HOLD)], env)
    job.wait().ok()
    loader = jobs.script(LOAD, "load.py")
    loaded = jobs.run([*PYTHON, loader, str(job.directory / "pickled")], environment(None)).ok()
    assert loaded.stdout.split() == ["7", "7"], "in a process without us, as the function itself"
    counted = sorted((one["resource"], one["metrics"]["collective.count"]) for one in of_type(log, "summary"))
    # In the spawned process the names are bound before there is a session, where a proxy misses them, and says so.
    spawned = ("all_reduce", 2) if forced == "in_place" else ("unseen", 2)
    assert counted == [("all_reduce", 2), spawned]
