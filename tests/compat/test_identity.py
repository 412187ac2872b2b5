"""The instrumented functions stay the objects that they were: compared, hashed, pickled, copied, bound early."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, alone

pytestmark = pytest.mark.dist

IDENTITY = """
    import copy, functools, inspect, os, pickle, subprocess, sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    c10d = dist.distributed_c10d
    NAMES = [name for name in (
        "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single",
        "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single", "all_to_all", "gather",
        "scatter", "isend", "irecv", "send", "recv", "barrier", "monitored_barrier", "batch_isend_irecv",
        "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
        "recv_object_list", "all_reduce_coalesced", "all_gather_coalesced", "_coalescing_manager",
        "init_process_group", "destroy_process_group", "new_group",
    ) if hasattr(c10d, name)]

    def cells(function):
        return [cell.cell_contents for cell in function.__closure__ or ()]

    def outside(function):
        return {
            "self": function, "id": id(function), "hash": hash(function), "signature": inspect.signature(function),
            "dict": dict(vars(function)), "names": (function.__name__, function.__qualname__, function.__module__),
            "doc": function.__doc__, "defaults": (function.__defaults__, function.__kwdefaults__),
            "annotations": dict(function.__annotations__), "unwrapped": inspect.unwrap(function),
            "source": inspect.getsource(inspect.unwrap(function)),
        }

    def inside(function):
        return {"code": function.__code__, "cells": cells(function),
                "inner": [(one.__code__, cells(one)) for one in cells(function) if inspect.isfunction(one)]}

    def everything(look):
        return {name: (look(getattr(c10d, name)), getattr(dist, name, None) is getattr(c10d, name)) for name in NAMES}

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.reduce, self.sends = dist.all_reduce, {dist.isend, dist.irecv}

    def spawned(rank, reduce, path):
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=1)
        reduce(torch.ones(1))
        assert reduce.func is dist.all_reduce
        dist.destroy_process_group()

    # In a process that nobody patches: the environment here has no plugin to switch on.
    LOAD = (
        "import sys, pickle, torch.distributed as dist\\n"
        "functions = pickle.loads(sys.stdin.buffer.read())\\n"
        "assert functions == [dist.all_reduce, dist.isend], functions\\n"
        "assert 'ddtrace_pytorch.instrumentation' not in sys.modules\\n"
    )

    def check():
        for name in NAMES:
            function = getattr(c10d, name)
            assert function is early[name] and function == early[name], name
            assert pickle.loads(pickle.dumps(function)) is function, name
            assert copy.deepcopy(function) is function and copy.copy(function) is function, name
        assert dist.isend in {early["isend"]} and {dist.isend: 1}[early["isend"]] == 1
        assert c10d.P2POp.__new__(c10d.P2POp, dist.isend, torch.ones(1), 0) is not None
        holder = Holder()
        twin = copy.deepcopy(holder)
        assert twin.reduce is dist.all_reduce and twin.sends == holder.sends
        assert pickle.loads(pickle.dumps(functools.partial(dist.all_reduce, async_op=True))).func is dist.all_reduce

    if __name__ == "__main__":
        early = {name: getattr(c10d, name) for name in NAMES}
        work = dict(vars(c10d.Work))
        before, untouched = everything(outside), everything(inside)
        import ddtrace_pytorch
        ddtrace_pytorch.patch()
        assert everything(outside) == before
        for _ in range(2):
            dist.init_process_group("gloo")
            assert everything(outside) == before
            assert everything(inside) != untouched
            check()
            tensor = torch.ones(2)
            dist.all_reduce(tensor, async_op=True).wait()  # from here on, Work.wait is instrumented too
            assert type(vars(c10d.Work)["wait"]) is type(work["wait"])
            subprocess.run([sys.executable, "-c", LOAD], input=pickle.dumps([dist.all_reduce, dist.isend]), check=True)
            dist.destroy_process_group()
            assert everything(outside) == before
            assert dict(vars(c10d.Work)) == work
            check()
        now = everything(inside)
        lifecycle = ("init_process_group", "destroy_process_group")
        assert {name: now[name] for name in NAMES if name not in lifecycle + ("new_group",)} == {
            name: untouched[name] for name in NAMES if name not in lifecycle + ("new_group",)}
        mp.spawn(spawned, (functools.partial(dist.all_reduce, async_op=False), os.path.abspath("rendezvous")), nprocs=1)
        ddtrace_pytorch.unpatch()
        assert everything(outside) == before
        assert everything(inside) == untouched
        assert dict(vars(c10d.Work)) == work
        check()
"""


def test_functions_stay_the_objects_they_were(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(IDENTITY)], alone(tmp_path / "log")).ok()
