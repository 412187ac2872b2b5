"""Collectives that torch launches without any Python function: counted, sized by the flight recorder, or said unknown.

With the functions instrumented in place alone, on every release: where torch has hooks these see them too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone, environment, torchrun
from harness.log import Record, of_type, rank_spans
from harness.releases import RELEASE, without

from ddtrace_pytorch.collectives import native_hooks

pytestmark = pytest.mark.dist

HAS_HOOKS = native_hooks.exist(torch._C._distributed_c10d)

# Whether torch records what gloo does; and whether a group can be given a name by its user.
RECORDS = RELEASE >= (2, 8)
DESCRIBES = RELEASE >= (2, 4)

STEPS = 7

# Four parameters; once the buckets are made anew, after the first step, each is in one of its own.
DDP = f"""
    import json, os, threading
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    first = dist.group.WORLD._get_sequence_number_for_group()

    def count():
        return dist.group.WORLD._get_sequence_number_for_group() - first

    layers = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 50))
    model = DistributedDataParallel(layers, bucket_cap_mb=1e-5)
    made = count()
    steps = []
    for _ in range({STEPS}):
        model(torch.ones(8, 40)).sum().backward()
        steps.append(count() - made - sum(steps))
    loss = torch.ones(3)
    dist.all_reduce(loss)
    dist.all_reduce(loss, async_op=True).wait()
    size = sum(one.numel() * one.element_size() for one in layers.parameters())
    said = {{"made": made, "steps": steps, "bytes": size}}
    dist.destroy_process_group()
    said["threads"] = [one.name for one in threading.enumerate()]
    said["timing"] = "TORCH_NCCL_ENABLE_TIMING" in os.environ
    open(f"said-{{os.environ['RANK']}}", "w").write(json.dumps(said))
"""


def settings(log: Path, **more: str) -> dict[str, str]:
    temporary = log.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    return {
        "DD_PATCH_MODULES": "pytorch:true",
        "DD_PYTORCH_EXPORT": "local",
        "DD_PYTORCH_LOG_DIR": str(log),
        "DD_PYTORCH_INSTRUMENT": "in_place",
        "TMPDIR": str(temporary),
        **more,
    }


def by_rank(log: Path) -> list[list[Record]]:
    """The summaries of each rank, life by life."""
    ranks: dict[str, list[Record]] = {}
    for one in of_type(log, "summary"):
        ranks.setdefault(one["_file"], []).append(one)
    lives = {file: min(one["ts"] for one in of_type(Path(file).parent, "identity")) for file in ranks}
    return [ranks[file] for file in sorted(ranks, key=lambda file: (lives[file], file))]


def unseen_in(summaries: list[Record], group: str = "world") -> dict[str | None, tuple[float, float, float | None]]:
    """Of all `unseen` summaries of `group`, by what they are recorded as: operations, those with a size, bytes."""
    found: dict[str | None, tuple[float, float, float | None]] = {}
    for one in summaries:
        tags, metrics = one["tags"], one["metrics"]
        if one["resource"] == "unseen" and tags["collective.group"] == group:
            assert tags["collective.op"] == "unseen"
            name = tags.get("collective.recorded_as")
            assert name not in found
            found[name] = (metrics["collective.count"], metrics["collective.sized"], metrics.get("collective.bytes"))
    return found


def test_a_plain_ddp_job(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(DDP)], environment(None, **settings(log))).ok()
    for rank, summaries in enumerate(by_rank(log)):
        said = json.loads((tmp_path / "job-0" / f"said-{rank}").read_text())
        launched = said["made"] + sum(said["steps"]) + 2
        for one in summaries:
            assert one["metrics"]["collective.group_launched"] == launched
            assert one["metrics"]["collective.group_seen"] == 2
            assert one["metrics"]["collective.group_coverage"] == 2 / launched
            assert "collective.coverage" not in one["tags"]
        unseen = unseen_in(summaries)
        assert said["threads"] == ["MainThread"]
        assert not said["timing"]
        if not RECORDS:
            assert unseen == {None: (launched - 2, 0, None)}
            continue
        assert said["steps"][:1] + said["steps"][2:] == [1, *[4] * (STEPS - 2)], "the buckets are made anew in the second"
        gradients = 1 + 4 * (STEPS - 1)
        assert unseen.pop("all_reduce") == (gradients, gradients, STEPS * said["bytes"])
        # The rest is what the constructor does, and the making of new buckets, with sizes known.
        assert sum(calls for calls, _, _ in unseen.values()) == launched - 2 - gradients
        assert all(calls == sized for calls, sized, _ in unseen.values())
    assert "WorkerServer" not in result.stderr
    assert not list((tmp_path / "tmp").glob("ddtrace-pytorch-*")), "no socket is left"


# Three ranks do all that torch counts otherwise than we number it. In a second life the one in the middle is late, while
# summaries are told every 0.3 s.
EVERYTHING = """
    import os, time
    import torch
    import torch.distributed as dist

    def both(one, other):
        dist.all_reduce(one)
        dist.all_reduce(other)

    def everything(turn, late):
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.ones(4)
        dist.monitored_barrier()
        if rank == 0:
            dist.send(tensor, 1)
            dist.isend(tensor, 1).wait()
            dist.send_object_list([1, "two"], 1)
        elif rank == 1:
            dist.recv(torch.empty(4))
            dist.irecv(torch.empty(4), 0).wait()
            dist.recv_object_list([None, None], 0)
        if rank < 2:
            batch = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, torch.empty(4), 1 - rank)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
        dist.all_gather_object([None] * size, rank)
        dist.gather_object(rank, [None] * size if rank == 0 else None)
        dist.broadcast_object_list([rank])
        dist.scatter_object_list([None], [1, 2, 3])
        dist.reduce_scatter(torch.empty(2), [torch.ones(2)] * size)
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(6))
        dist.all_gather_into_tensor(torch.empty(6), torch.ones(2))
        dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2))
        dist.all_to_all_single(torch.empty(6), torch.ones(6))
        dist.all_to_all([torch.empty(2) for _ in range(size)], [torch.ones(2)] * size)
        dist.reduce(tensor, 0)
        dist.broadcast(tensor, 0)
        dist.gather(tensor, [torch.empty(4) for _ in range(size)] if rank == 0 else None)
        dist.scatter(tensor, [torch.ones(4) for _ in range(size)] if rank == 0 else None)
        dist.barrier()
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as block: both(torch.ones(2), torch.ones(3))
        block.wait()  # of _coalescing_manager()
        if rank == 1:
            time.sleep(late)
        dist.all_reduce(tensor)
        dist.group.WORLD.allreduce([torch.ones(1000 + turn)]).wait()

    def life(number):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=dist.FileStore(f"life-{number}", size), rank=rank, world_size=size)

    life(1)
    for turn in range(3):
        everything(turn, late=0)
    later = dist.new_group([0, 1], group_desc="later")
    if dist.get_rank() < 2:
        later.allreduce([torch.ones(5)]).wait()  # no function of ours was ever called on this group
    dist.destroy_process_group()

    os.environ["DD_PYTORCH_SUMMARY_SECONDS"] = "0.3"
    life(2)
    for turn in range(3):
        everything(turn, late=0.7)
    end_last_life()
"""

# Destroying the group of the second life, gloo of 2.0 was seen to hang in two of the three ranks, without us.
END = "dist.destroy_process_group()" if RELEASE >= (2, 2) else "__import__('ddtrace_pytorch').unpatch(), os._exit(0)"


def of_release(script: str) -> str:
    """`script` as the torch at hand can run it."""
    return without(script if DESCRIBES else re.sub(r', group_desc="\w+"', "", script)).replace("end_last_life()", END)


def label(description: str) -> str:
    """Of the first group after the default one, for which the user has `description`."""
    return description if DESCRIBES else "1"


def test_what_torch_counts_otherwise_is_not_taken_for_unseen(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = jobs.script(of_release(EVERYTHING))
    jobs.run([*DDTRACE_RUN, *torchrun(3), script], environment(None, **settings(log))).ok()
    files = by_rank(log)
    assert len(files) == 6
    for summaries in files[:3]:
        world = [one["metrics"] for one in summaries if one["tags"]["collective.group"] == "world"]
        assert world[-1]["collective.group_launched"] == world[-1]["collective.group_seen"] + 3
        assert unseen_in(summaries) == ({"all_reduce": (3, 3, 4 * 3003)} if RECORDS else {None: (3, 0, None)})
    later = {"all_reduce": (1, 1, 20)} if RECORDS else {None: (1, 0, None)}
    assert [unseen_in(summaries, label("later")) for summaries in files[:3]] == [later, later, {}]
    for summaries in files[3:]:
        unseen = [one["metrics"] for one in summaries if one["resource"] == "unseen"]
        assert sum(one["collective.count"] for one in unseen) == 3
        assert sum(one.get("collective.bytes", 0) for one in unseen) in (0, 4000, 4004, 4008, 8004, 8008, 8012, 12012)
        assert unseen[-1]["collective.group_launched"] == unseen[-1]["collective.group_seen"] + 3


# A block of three reduce_scatters, one of two, and as many by a function that no Python wrapper sees.
SCATTERED = """
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    dist.init_process_group("gloo")
    group = dist.new_group([0, 1], group_desc="scattered")
    for many, deferred in ((3, False), (2, True)):
        with dist.distributed_c10d._coalescing_manager(group, async_ops=deferred) as block:
            for _ in range(many):
                dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4), group=group)
        if deferred:
            block.wait()
    assert group._get_sequence_number_for_group() == 3 + 2
    whole = [torch.ones(4)] * 3
    for part in functional.reduce_scatter_tensor_coalesced(whole, "sum", [0] * 3, group):
        part.sum()
    assert group._get_sequence_number_for_group() == 3 + 2 + 3
    dist.destroy_process_group()
"""


@pytest.mark.skipif(RELEASE < (2, 3), reason="gloo knows no coalesced reduce_scatter_tensor before 2.3")
@pytest.mark.parametrize("instrument", ["in_place", "auto"])
def test_gloo_counts_coalesced_reduce_scatters_tensor_by_tensor(jobs: Jobs, tmp_path: Path, instrument: str) -> None:
    log = tmp_path / "log"
    env = environment(None, **settings(log, DD_PYTORCH_INSTRUMENT=instrument))
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(of_release(SCATTERED))], env).ok()
    seen_by_hooks = HAS_HOOKS and instrument == "auto"
    # A wrapper counts the two blocks; a hook sees the third one too; and what none sees is three to torch.
    launched, seen = (3, 3) if seen_by_hooks else (5, 2)
    for summaries in by_rank(log):
        mine = [one for one in summaries if one["tags"]["collective.group"] == label("scattered")]
        assert {one["metrics"]["collective.group_launched"] for one in mine} == {launched}
        assert {one["metrics"]["collective.group_seen"] for one in mine} == {seen}
        unseen = {"all_reduce": (3, 3, 48)} if RECORDS else {None: (3, 0, None)}
        assert unseen_in(mine, label("scattered")) == ({} if seen_by_hooks else unseen)


# One process is a group; what it issues by the group itself passes by every function of torch.distributed.
ALONE = """
    import os, sys
    import torch
    import torch.distributed as dist

    late = "late" in sys.argv
    if late:
        dist.init_process_group("gloo")
        dist.group.WORLD.allreduce([torch.ones(3)]).wait()
        import ddtrace_pytorch
        ddtrace_pytorch.patch()
    else:
        dist.init_process_group("gloo")
    for number in range(30):
        dist.group.WORLD.allreduce([torch.ones(3)]).wait()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
"""


def train_alone(jobs: Jobs, log: Path, *arguments: str, **more: str) -> tuple[list[Record], str]:
    env = alone(log) | settings(log, **more)
    how = () if "late" in arguments else DDTRACE_RUN
    result = jobs.run([*how, *PYTHON, jobs.script(ALONE), *arguments], env).ok()
    (summaries,) = by_rank(log)
    return summaries, result.stderr


def test_a_wrapped_buffer_is_not_made_more_of_than_it_holds(jobs: Jobs, tmp_path: Path) -> None:
    summaries, _ = train_alone(jobs, tmp_path / "log", TORCH_FR_BUFFER_SIZE="10")
    assert unseen_in(summaries) == {None: (30, 0, None)}


OFF = "torch's flight recorder is off"


@pytest.mark.parametrize("when", ["early", "late"])
def test_without_a_buffer_coverage_is_unknown(when: str, jobs: Jobs, tmp_path: Path) -> None:
    summaries, stderr = train_alone(jobs, tmp_path / "log", when, TORCH_FR_BUFFER_SIZE="0")
    assert unseen_in(summaries) == {None: (30, 0, None)}
    (unseen,) = [one["tags"].get("collective.coverage") for one in summaries if one["resource"] == "unseen"]
    assert unseen == ("unknown" if RECORDS else None)
    assert stderr.count(OFF) == RECORDS, "nothing is off where there is nothing"


# An older release, as far as the variable goes.
BUFFER = """
    import os
    import torch
    import torch.distributed as dist
    import ddtrace_pytorch

    def buffer():
        return {name: value for name, value in os.environ.items() if name.endswith("_BUFFER_SIZE")}

    torch.__version__ = "2.9.1"
    dist.init_process_group("gloo")
    print(buffer())
    dist.destroy_process_group()
    ddtrace_pytorch.unpatch()
    print(buffer())
"""


@pytest.mark.parametrize(
    ("more", "during", "after"),
    [
        ({}, {"TORCH_FR_BUFFER_SIZE": "2000"}, {}),
        ({"TORCH_FR_BUFFER_SIZE": "7"}, {"TORCH_FR_BUFFER_SIZE": "7"}, {"TORCH_FR_BUFFER_SIZE": "7"}),
        ({"DD_PYTORCH_COLLECTIVES": "off"}, {}, {}),
    ],
)
def test_the_recorder_has_a_buffer_while_we_are_on(
    more: dict[str, str], during: dict[str, str], after: dict[str, str], jobs: Jobs, tmp_path: Path
) -> None:
    env = alone(tmp_path / "log", DD_PATCH_MODULES="pytorch:true", **more)
    result = jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(BUFFER)], env).ok()
    assert result.stdout.splitlines() == [str(during), str(after)]


WATCHED = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
"""


@pytest.mark.skipif(not RECORDS, reason="torch records nothing of gloo before 2.8")
@pytest.mark.parametrize(("size", "watch"), [("2000", "full"), ("0", "degraded")])
def test_where_torch_records_nothing_the_stall_watch_is_said_to_be_degraded(
    jobs: Jobs, tmp_path: Path, size: str, watch: str
) -> None:
    env = environment(None, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="local",
                      DD_PYTORCH_LOG_DIR=str(tmp_path / "log"), TORCH_FR_BUFFER_SIZE=size)  # fmt: skip
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(WATCHED)], env).ok()
    assert [span["tags"]["pytorch.stall_watch"] for span in rank_spans(tmp_path / "log")] == [watch] * 2
