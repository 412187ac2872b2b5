"""Collectives that torch issues by itself: counted where process groups have hooks, else declared as not seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.job import DDTRACE_RUN, PYTHON, Jobs, Result, environment, torchrun
from harness.log import Record, of_type, rank_spans

from ddtrace_pytorch.collectives import native_hooks

pytestmark = pytest.mark.dist

HAS_HOOKS = native_hooks.exist(torch._C._distributed_c10d)


def local(log: Path) -> dict[str, str]:
    return {"DD_PYTORCH_EXPORT": "local", "DD_PYTORCH_LOG_DIR": str(log)}


# Each rank says how many collectives torch counts on each group, and what came out of it all.
TRAIN = """
    import gc, json, os, warnings, weakref
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed import all_reduce as bound_before
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    results = []

    def tell(tensor):
        results.append(tensor.detach().double().sum().item())

    trained = dist.new_group([0, 1])
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=trained)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    tell(model.module.weight.grad)

    called = dist.new_group([0, 1])
    for reduce in (dist.all_reduce, dist.distributed_c10d.all_reduce, bound_before):
        reduce(torch.ones(4), group=called)
    for _ in range(5):
        called.allreduce([torch.ones(4)]).wait()
    tell(functional.all_reduce(torch.ones(4), "sum", called))
    tell(functional.all_gather_tensor(torch.ones(4), 0, called))
    for reduced in functional.all_reduce_coalesced([torch.ones(4), torch.ones(2)], "sum", called):
        tell(reduced)

    compiled_for = dist.new_group([0, 1])
    compiled = torch.compile(
        lambda x: functional.all_reduce(x, "sum", compiled_for) + 1, backend="aot_eager", fullgraph=True
    )
    for _ in range(10):
        tell(compiled(torch.ones(4)))

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    sharded = torch.nn.Linear(8, 8)
    fully_shard(sharded, mesh=mesh["tp"])
    sharded(torch.ones(2, 8)).sum().backward()
    tell(sharded.weight.grad.to_local())
    tell(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]).redistribute(mesh["tp"], [Replicate()]).to_local())
    mesh.get_group("pp").allreduce([torch.ones(2)]).wait()

    first = dist.new_group([0])
    if rank == 0:
        first.allreduce([torch.ones(2)]).wait()
    dist.all_reduce(torch.ones(2), group=first)

    dist.barrier()

    def name(group):
        return group.group_name, group._get_sequence_number_for_group()

    groups = {
        "trained": name(trained), "called": name(called), "compiled": name(compiled_for),
        "tp": name(mesh.get_group("tp")), "pp": name(mesh.get_group("pp")),
    }
    if rank == 0:
        groups["first"] = name(first)

    for_a_while = dist.new_group([0, 1])
    for_a_while.allreduce([torch.ones(2)]).wait()
    dist.all_reduce(torch.ones(2), group=for_a_while)
    gone = weakref.ref(for_a_while)
    dist.destroy_process_group(for_a_while)
    del for_a_while
    gc.collect()

    print("TOLD " + json.dumps({"rank": rank, "groups": groups, "results": results, "gone": gone() is None}), flush=True)
    dist.destroy_process_group()
"""


# Threads issue while we are switched off and on again; in the end we are off, and what keeps the group alive stays.
SWITCHED = """
    import sys, threading
    import torch, torch.distributed as dist
    import ddtrace_pytorch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    over = threading.Event()
    works, errors = [], []

    def issue():
        tensor = torch.ones(1)
        try:
            while not over.is_set():
                dist.all_reduce(tensor, group=group)
                group.allreduce([tensor]).wait()
        except BaseException as error:
            errors.append(error)
        works.append(group.allreduce([tensor]))

    sys.setswitchinterval(1e-5)
    ddtrace_pytorch.patch()
    threads = [threading.Thread(target=issue) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        ddtrace_pytorch.unpatch()
        ddtrace_pytorch.patch()
    ddtrace_pytorch.unpatch()
    over.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    sys.modules["kept"] = (works, group)  # beyond the end of this module
"""


def test_switching_while_threads_issue_collectives_crashes_nothing(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs.run([*PYTHON, jobs.script(SWITCHED)], environment(None, **local(log))).ok()
    assert [span["tags"]["pytorch.end_reason"] for span in rank_spans(log)] == ["unpatched"] * 11
    counted = [summary["resource"] for summary in of_type(log, "summary")]
    assert "all_reduce" in counted


# By group, operation and how the caller got it: calls and bytes on rank 0.
Counts = dict[tuple[str, str], tuple[int, int]]
BY_FUNCTION: dict[str, Counts] = {
    "called": {("all_reduce", "waited"): (3, 48)},
    "tp": {
        ("all_gather_into_tensor", "waited"): (1, 288),
        ("reduce_scatter_tensor", "waited"): (1, 288),
        ("scatter", "waited"): (1, 32),
        ("barrier", "waited"): (1, 0),
    },
    "first": {("all_reduce", "waited"): (1, 8)},
}
BY_HOOK: dict[str, Counts] = {
    "trained": {
        ("all_gather", "native"): (1, 16),  # of how many parameters there are
        ("broadcast", "native"): (4, 48 + 80 + 16),  # shapes and parameters, then how the buckets were rebuilt
        ("all_reduce", "native"): (3, 3 * 80),
    },
    "called": {
        ("all_reduce", "native"): (5 + 1, 96),
        ("all_gather_into_tensor", "native"): (1, 32),
        ("all_reduce_coalesced", "native"): (1, 24),
    },
    "compiled": {("all_reduce", "native"): (10, 160)},
    "tp": {("all_gather_into_tensor", "native"): (1, 64)},
    "pp": {("all_reduce", "native"): (1, 8)},
    "first": {("all_reduce", "native"): (1, 8)},
}
# A dimension that spans the world is the default group.
LABELS = {"tp": "world", "pp": "pp"}


def told(result: Result) -> list[Any]:
    lines = [line.partition("TOLD ")[2] for line in result.ok().stdout.splitlines() if "TOLD " in line]
    return sorted((json.loads(line) for line in lines), key=lambda one: int(one["rank"]))


def test_what_torch_issues_by_itself_is_counted_or_declared(jobs: Jobs, tmp_path: Path) -> None:
    log, script = tmp_path / "log", jobs.script(TRAIN)
    env = environment(None, DD_PATCH_MODULES="pytorch:true", **local(log))
    with_us = told(jobs.run([*DDTRACE_RUN, *torchrun(2), script], env))
    without_us = told(jobs.run([*torchrun(2), script], environment(None)))
    assert with_us == without_us, "the same results, and a group that is destroyed goes when it would"
    assert [one["gone"] for one in with_us] == [True, True]

    summaries = of_type(log, "summary")
    for rank, one in enumerate(with_us):
        mine = [summary for summary in summaries if f"rank-{rank:05}" in summary["_file"]]
        for group, (name, launched) in one["groups"].items():
            of_group = [summary for summary in mine if summary["tags"]["collective.group_name"] == name]
            assert {summary["tags"]["collective.group"] for summary in of_group} == {LABELS.get(group, name)}
            expected = BY_FUNCTION.get(group, {}) | (BY_HOOK.get(group, {}) if HAS_HOOKS else {})
            if group == "tp" and rank == 1:
                expected |= {("scatter", "waited"): (1, 0)}
            assert counts(of_group) == expected, group
            seen = sum(calls for calls, _ in expected.values())
            for summary in of_group:
                assert summary["metrics"]["collective.group_launched"] == launched, group
                assert summary["metrics"]["collective.group_seen"] == seen, group
            unseen = [summary for summary in of_group if summary["resource"] == "unseen"]
            assert sum(summary["metrics"]["collective.count"] for summary in unseen) == launched - seen, group
            if HAS_HOOKS:
                assert seen == launched, group
    of_first = {name for one in with_us for group, (name, _) in one["groups"].items() if group == "first"}
    assert [one["groups"].keys() >= {"first"} for one in with_us] == [True, False]
    told_of_first = [summary for summary in summaries if summary["tags"]["collective.group_name"] in of_first]
    assert {Path(summary["_file"]).name for summary in told_of_first} == {"rank-00000.jsonl"}


def counts(summaries: list[Record]) -> Counts:
    return {
        (one["resource"], one["how"]): (one["metrics"]["collective.count"], one["metrics"]["collective.bytes"])
        for one in summaries
        if one["resource"] != "unseen"
    }
