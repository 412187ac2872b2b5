"""Each way of seeing collectives counts the same script's calls, to the unit and the byte."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone, environment, torchrun
from harness.log import of_type, rank_spans
from harness.look import HOOKS
from harness.releases import MISSING, without

from ddtrace_pytorch import plain_numbers
from ddtrace_pytorch.collectives import native_hooks

pytestmark = pytest.mark.dist

HAS_HOOKS = native_hooks.exist(torch._C._distributed_c10d)

# Two ranks; a tensor of 16 bytes; every operation of the table that some release's gloo has.
EVERYTHING = """
    import warnings
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch.distributed import irecv, isend

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    other = 1 - rank
    world = dist.group.WORLD
    four = torch.ones(4)
    made = torch.empty

    def both():
        return [made(4), made(4)]

    dist.all_reduce(four)
    dist.all_reduce(four, async_op=True).wait()
    world.allreduce([four]).wait()
    dist.broadcast(four, src=0)
    dist.reduce(four, dst=0)
    dist.all_gather(both(), four)
    dist.all_gather_into_tensor(made(8), four)
    dist.reduce_scatter(made(4), both())
    dist.reduce_scatter_tensor(made(4), made(8))
    dist.all_to_all_single(made(8), made(8))
    dist.all_to_all_single(made(2 if rank else 6), four, [1, 1] if rank else [3, 3], [3, 1])
    dist.all_to_all(both(), both())
    dist.gather(four, None if rank else both(), dst=0)
    dist.scatter(four, None if rank else both(), src=0)
    dist.recv(four, src=0) if rank else dist.send(four, dst=1)
    (dist.irecv(four, src=0) if rank else dist.isend(four, dst=1)).wait()

    for send, receive in ((dist.isend, dist.irecv), (isend, irecv)):
        got = torch.zeros(4)
        batch = [dist.P2POp(send, torch.full((4,), float(rank)), other), dist.P2POp(receive, got, other)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert got.tolist() == [float(other)] * 4
        assert [one.op for one in batch] == [send, receive] and batch[0].op is send

    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    dist.all_reduce_coalesced([four, four])
    dist.all_gather_coalesced([[made(4)], [made(4)]], [four])
    with dist.distributed_c10d._coalescing_manager(None): dist.all_reduce(four), dist.all_reduce(made(2))

    dist.all_gather_object([None, None], 3)
    dist.gather_object(3, None if rank else [None, None], dst=0)
    dist.broadcast_object_list([3], src=0)
    dist.scatter_object_list([None], None if rank else [3, 4], src=0)
    dist.recv_object_list([None], src=0) if rank else dist.send_object_list([3], dst=1)
    dist.destroy_process_group()
"""

Counts = dict[tuple[str, str], tuple[int, int]]

# By operation and how the caller got it: calls and bytes, on rank 0 and on rank 1. A pickled 3 has five bytes, and goes
# with a size of eight.
BY_FUNCTION: tuple[Counts, Counts] = (
    {
        ("all_reduce", "waited"): (1, 16),
        ("all_reduce", "issued"): (1, 16),
        ("broadcast", "waited"): (1, 16),
        ("reduce", "waited"): (1, 16),
        ("all_gather", "waited"): (1, 32),
        ("all_gather_into_tensor", "waited"): (1, 32),
        ("reduce_scatter", "waited"): (1, 32),
        ("reduce_scatter_tensor", "waited"): (1, 32),
        ("all_to_all_single", "waited"): (2, 16 + 4),
        ("all_to_all", "waited"): (1, 16),
        ("gather", "waited"): (1, 16),
        ("scatter", "waited"): (1, 16),
        ("send", "waited"): (1, 16),
        ("isend", "issued"): (3, 48),
        ("irecv", "issued"): (2, 32),
        ("barrier", "waited"): (1, 0),
        ("monitored_barrier", "waited"): (1, 0),
        ("all_reduce_coalesced", "waited"): (2, 32 + 24),
        ("all_gather_coalesced", "waited"): (1, 32),
        ("all_gather_object", "waited"): (1, 16 + 10),
        ("gather_object", "waited"): (1, 16 + 5),
        ("broadcast_object_list", "waited"): (1, 8 + 5),
        ("scatter_object_list", "waited"): (1, 8 + 5 + 8),
        ("send_object_list", "waited"): (1, 8 + 5),
    },
    {
        ("all_reduce", "waited"): (1, 16),
        ("all_reduce", "issued"): (1, 16),
        ("broadcast", "waited"): (1, 16),
        ("reduce", "waited"): (1, 16),
        ("all_gather", "waited"): (1, 32),
        ("all_gather_into_tensor", "waited"): (1, 32),
        ("reduce_scatter", "waited"): (1, 32),
        ("reduce_scatter_tensor", "waited"): (1, 32),
        ("all_to_all_single", "waited"): (2, 16 + 12),
        ("all_to_all", "waited"): (1, 16),
        ("gather", "waited"): (1, 0),
        ("scatter", "waited"): (1, 0),
        ("recv", "waited"): (1, 16),
        ("isend", "issued"): (2, 32),
        ("irecv", "issued"): (3, 48),
        ("barrier", "waited"): (1, 0),
        ("monitored_barrier", "waited"): (1, 0),
        ("all_reduce_coalesced", "waited"): (2, 32 + 24),
        ("all_gather_coalesced", "waited"): (1, 32),
        ("all_gather_object", "waited"): (1, 16 + 10),
        ("gather_object", "waited"): (1, 16),
        ("broadcast_object_list", "waited"): (1, 8 + 5),
        ("scatter_object_list", "waited"): (1, 8),
        ("recv_object_list", "waited"): (1, 8 + 5),
    },
)

# torch's own hooks tell of what the functions issue: `*_object` functions are their parts, and asynchronous calls, or
# transfers in a batch, are like any other. Of an uneven all_to_all_single they don't tell what stays on the rank.
BY_HOOK: tuple[Counts, Counts] = (
    {
        ("all_reduce", "native"): (3, 48),
        ("broadcast", "native"): (4, 16 + 8 + 5 + 8),
        ("reduce", "native"): (1, 16),
        ("all_gather", "native"): (5, 32 + 32 + 16 + 10 + 16),
        ("all_gather_into_tensor", "native"): (1, 32),
        ("reduce_scatter", "native"): (1, 32),
        ("reduce_scatter_tensor", "native"): (1, 32),
        ("all_to_all_single", "native"): (2, 16),
        ("all_to_all", "native"): (1, 16),
        ("gather", "native"): (2, 16 + 5),
        ("scatter", "native"): (3, 16 + 5 + 8),
        ("send", "native"): (6, 64 + 8 + 5),
        ("recv", "native"): (2, 32),
        ("barrier", "native"): (1, 0),
        ("monitored_barrier", "waited"): (1, 0),
        ("all_reduce_coalesced", "native"): (2, 32 + 24),
    },
    {
        ("all_reduce", "native"): (3, 48),
        ("broadcast", "native"): (4, 16 + 8 + 5 + 8),
        ("reduce", "native"): (1, 16),
        ("all_gather", "native"): (5, 32 + 32 + 16 + 10 + 16),
        ("all_gather_into_tensor", "native"): (1, 32),
        ("reduce_scatter", "native"): (1, 32),
        ("reduce_scatter_tensor", "native"): (1, 32),
        ("all_to_all_single", "native"): (2, 16),
        ("all_to_all", "native"): (1, 16),
        ("gather", "native"): (2, 0),
        ("scatter", "native"): (3, 0),
        ("send", "native"): (2, 32),
        ("recv", "native"): (6, 64 + 8 + 5),
        ("barrier", "native"): (1, 0),
        ("monitored_barrier", "waited"): (1, 0),
        ("all_reduce_coalesced", "native"): (2, 32 + 24),
    },
)

def here(counts: tuple[Counts, Counts]) -> list[Counts]:
    """What of `counts`, rank by rank, there is to be counted with the torch at hand."""
    coalesced = {} if "_coalescing_manager" not in MISSING else {("all_reduce_coalesced", "waited"): (1, 32)}
    return [{what: many for what, many in of_rank.items() if what[0] not in MISSING} | coalesced for of_rank in counts]


# The script's one call of a process group's own method, which is no function of torch.distributed.
DIRECT: Counts = {("all_reduce", "native"): (1, 16)}


def run(jobs: Jobs, script: str, log: Path, forced: str) -> tuple[Any, list[Counts], list[str]]:
    """The job's result, what each rank counted, and what each said was in use."""
    env = environment(
        None,
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(log),
        DD_PYTORCH_INSTRUMENT=forced,
    )
    result = jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(without(script))], env).ok()
    counted: list[Counts] = [{}, {}]
    for one in of_type(log, "summary"):
        if one["resource"] != "unseen":
            metrics = one["metrics"]
            key = (one["resource"], one["how"])
            assert key not in counted[rank_of(one)]
            counted[rank_of(one)][key] = (metrics["collective.count"], metrics["collective.bytes"])
    return result, counted, [span["tags"]["pytorch.instrument"] for span in rank_spans(log)]


def rank_of(record: Any) -> int:
    return int(Path(record["_file"]).name.removeprefix("rank-").partition(".")[0])


@pytest.mark.parametrize(("forced", "used"), [("in_place", "in_place"), ("python", "python"), ("wrapt", "wrapt")])
def test_functions_alone_count_what_goes_through_them(jobs: Jobs, tmp_path: Path, forced: str, used: str) -> None:
    assert plain_numbers.exist, "built with the wheel; `pip install -e .` builds it too"
    _, counted, in_use = run(jobs, EVERYTHING, tmp_path / "log", forced)
    assert in_use == [used, used]
    assert counted == here(BY_FUNCTION)


@pytest.mark.skipif(HAS_HOOKS, reason="the next test is the one for this torch")
def test_without_hooks_there_are_the_functions_alone(jobs: Jobs, tmp_path: Path) -> None:
    result, counted, in_use = run(jobs, EVERYTHING, tmp_path / "log", "hooks")
    assert in_use == ["in_place", "in_place"]
    assert counted == here(BY_FUNCTION)
    assert result.stderr.count("DD_PYTORCH_INSTRUMENT=hooks needs torch 2.14 or later; using 'auto'") == 1


@pytest.mark.skipif(not HAS_HOOKS, reason="process groups have hooks from torch 2.14 on")
def test_hooks_add_what_goes_past_the_functions(jobs: Jobs, tmp_path: Path) -> None:
    _, counted, in_use = run(jobs, EVERYTHING, tmp_path / "log", "auto")
    assert in_use == ["in_place+hooks"] * 2
    assert counted == [one | DIRECT for one in here(BY_FUNCTION)]


@pytest.mark.skipif(not HAS_HOOKS, reason="process groups have hooks from torch 2.14 on")
def test_hooks_alone_count_everything(jobs: Jobs, tmp_path: Path) -> None:
    _, counted, in_use = run(jobs, EVERYTHING, tmp_path / "log", "hooks")
    assert in_use == ["hooks", "hooks"]
    assert counted == here(BY_HOOK)
    unsized = {one["resource"] for one in of_type(tmp_path / "log", "summary") if "collective.unsized" in one["metrics"]}
    assert unsized == {"all_to_all_single"}


STALE = """
    import sys
    import ddtrace_pytorch.collectives
    ddtrace_pytorch.collectives.__path__.insert(0, sys.argv[1])
    import torch
    import torch.distributed as dist
    import ddtrace_pytorch
    ddtrace_pytorch.patch()

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
"""


@pytest.mark.once
def test_a_part_in_c_that_was_built_for_another_version_is_as_good_as_none(jobs: Jobs, tmp_path: Path) -> None:
    now = (Path(__file__).parents[2] / "native" / "counting.c").read_text()
    source = tmp_path / "counting.c"
    source.write_text(re.sub(r"(#define INTERFACE \d+)", r"\g<1>0", now).replace('{"instrument", ', '{"make", '))
    module = tmp_path / "old" / ("_counting" + sysconfig.get_config_var("EXT_SUFFIX"))
    module.parent.mkdir()
    build = ["gcc", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", str(source), "-o", str(module)]
    subprocess.run(build, check=True, capture_output=True)
    result = jobs.run([*PYTHON, jobs.script(STALE), str(module.parent)], alone(tmp_path / "log")).ok()
    assert result.stderr.count("WARNING") == 1, result.describe()
    assert "the part in C was built for another version; build it anew" in result.stderr
    (span,) = rank_spans(tmp_path / "log")
    assert span["tags"]["pytorch.instrument"] == "python" + HOOKS
    counted = {one["resource"]: one["metrics"]["collective.count"] for one in of_type(tmp_path / "log", "summary")}
    assert counted == {"all_reduce": 1}
