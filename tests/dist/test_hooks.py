"""The public hooks on real process groups: in time, under one name, and without a trace when they are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.job import PYTHON, Jobs, alone, environment, torchrun
from harness.releases import RELEASE

pytestmark = pytest.mark.dist

HAS_MESH = RELEASE >= (2, 2)

THREADS = """
    import threading

    def our_thread():
        return any(thread.name == "ddtrace_pytorch.callbacks" for thread in threading.enumerate())
"""

LATE_PEER = f"""
    import json, os, sys, time
{THREADS}
    import torch, torch.distributed as dist
    import ddtrace_pytorch
    from ddtrace_pytorch import hooks

    rank = int(os.environ["RANK"])
    starts, ends, groups = [], [], []

    def until(condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "in vain"
            time.sleep(0.005)

    def marker(name):
        return os.path.join(sys.argv[1], name)

    def on_start(status):
        starts.append(status)
        if rank == 0 and status.operation == "all_reduce":
            open(marker(f"started-{{status.sequence_number}}"), "w").close()

    handles = [hooks.register_collective_start_hook(on_start), hooks.register_process_group_hook(
        lambda group, name: groups.append((name, dist.distributed_c10d._world.pg_names[group], dist.get_process_group_ranks(group))))]
    hooks.register_process_group_hook(lambda group, name: 1 / 0)
    assert not our_thread(), "nothing before there is a session"

    ddtrace_pytorch.patch()
    dist.init_process_group("gloo")
    assert our_thread()

    # Blocking. Rank 1 comes only once rank 0's hook was called: called at the end, it would wait for ever.
    tensor = torch.ones(4)
    if rank == 1:
        until(lambda: os.path.exists(marker("started-1")))
    dist.all_reduce(tensor)

    # Deferred, and registered while the session is open. Its end is told without anybody having waited for it.
    handles.append(hooks.register_collective_end_hook(ends.append))
    if rank == 1:
        until(lambda: os.path.exists(marker("issued")))
    began = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        until(lambda: starts[-1].sequence_number == 2)
        time.sleep(0.2)  # how late the peer is
        assert not ends, "it can't have ended"
        open(marker("issued"), "w").close()
    until(lambda: ends)
    took = 1000 * (time.monotonic() - began)
    late = ends[-1]
    assert (late.operation, late.sequence_number, late.time_source) == ("all_reduce", 2, "completion")
    assert 0 < late.duration <= took, (late, took)
    assert rank == 1 or late.duration >= 200
    work.wait()

    # Names agree, on member ranks only.
    mine = dist.new_group([0])
    both = dist.new_group([0, 1])
    {"mesh = dist.device_mesh.init_device_mesh('cpu', (2, 1), mesh_dim_names=('dp', 'tp'))" if HAS_MESH else ""}
    if rank == 0:
        dist.all_reduce(tensor, group=mine)
    dist.all_reduce(tensor, group=both)
    {"dist.all_reduce(tensor, group=mesh.get_group('tp'))" if HAS_MESH else ""}
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    dist.isend(tensor, 1).wait() if rank == 0 else dist.irecv(tensor, 0).wait()
    dist.barrier()
    until(lambda: ends[-1].operation == "barrier")

    # A forked child has no thread of ours, and its own session has one again.
    child = os.fork()
    if child == 0:
        try:
            status = 1
            assert not our_thread()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        except (RuntimeError, ValueError):  # torch's own: the parent's group came along
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0

    for handle in handles[:2]:
        handle.remove()
    many = len(starts)
    dist.barrier()
    until(lambda: ends[-1].operation == "barrier" and ends[-1].sequence_number > 3)
    assert len(starts) == many
    handles[2].remove()
    until(lambda: not our_thread())
    dist.barrier()

    seen = []
    hooks.register_collective_start_hook(lambda status: seen.append(status.operation))
    dist.barrier()
    dist.destroy_process_group()
    assert not our_thread(), "joined when the session closes"
    assert seen == ["barrier"], seen

    with open(marker(f"told-{{rank}}"), "w") as out:
        json.dump({{"starts": [vars(one) for one in starts], "ends": [vars(one) for one in ends],
                   "groups": groups}}, out)
"""


def test_hooks_on_two_ranks(jobs: Jobs, tmp_path: Path) -> None:
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    result = jobs.run([*torchrun(2), jobs.script(LATE_PEER), str(tmp_path)], env).ok()
    for rank in (0, 1):
        told: dict[str, Any] = json.loads((tmp_path / f"told-{rank}").read_text())
        names = [name for name, _, _ in told["groups"]]
        assert [name for _, name, _ in told["groups"]] == names
        memberships = [ranks for _, _, ranks in told["groups"]]
        assert memberships[: 3 - rank] == ([[0, 1], [0], [0, 1]] if rank == 0 else [[0, 1], [0, 1]])
        assert ([rank] in memberships[3 - rank :]) is HAS_MESH, "a mesh's groups too"
        assert {one["pg_name"] for one in told["starts"]} <= set(names)
        assert len({one["pg_name"] for one in told["starts"]}) == 3 - rank + HAS_MESH
        by_operation = {one["operation"]: one for one in told["ends"]}
        assert by_operation["send" if rank == 0 else "recv"]["time_source"] == "completion"
        assert by_operation["isend" if rank == 0 else "irecv"]["time_source"] == "issue"
        assert by_operation["barrier"]["time_source"] == "completion"
        assert {one["backend"] for one in told["starts"]} == {"gloo"}
        assert all(one["drop_count"] == 0 for one in told["starts"] + told["ends"])
    assert result.stderr.count("not switched on") == 1, "once on each host"
    assert result.stderr.count("ZeroDivisionError") == 1, "once on each host, and training went on"


ALONE = f"""
    import os, threading
{THREADS}
    import torch, torch.distributed as dist
    import ddtrace_pytorch
    from ddtrace_pytorch import hooks
    from ddtrace_pytorch.patch import unpatch

    c10d = dist.distributed_c10d
    names = ("init_process_group", "destroy_process_group", "new_group", "_new_group_with_tag", "split_group",
             "shrink_group", "_abort_process_group")
    functions = [getattr(c10d, name) for name in names if hasattr(c10d, name)]

    def state():
        return [(one.__code__, [cell.cell_contents for cell in one.__closure__ or ()]) for one in functions]

    before = state()
    ddtrace_pytorch.patch()
    patched = state()
    groups, starts = [], []
    handle = hooks.register_process_group_hook(lambda group, name: groups.append(name))
    hooks.register_collective_start_hook(starts.append)
    assert state() == patched, "one layer, whoever follows"
    handle.remove()
    assert state() == patched
    hooks.register_process_group_hook(lambda group, name: groups.append(name))

    # A forked child opens a session of its own, in which hooks registered before are called.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert state() == patched
    child = os.fork()
    if child == 0:
        assert not our_thread()
        dist.distributed_c10d._world.default_pg = None
        dist.distributed_c10d._update_default_pg(None)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, group_name="of the child")
        assert our_thread()
        dist.barrier()
        ddtrace_pytorch.unpatch()
        os._exit(0 if starts[-1].operation == "barrier" and len(groups) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0

    # The layer is no graph break, and what is compiled gives the same.
    compiled = torch.compile(lambda tensor: dist.all_reduce(tensor.add_(1)), backend="eager", fullgraph=True)
    tensor = torch.ones(2)
    compiled(tensor)
    assert tensor.tolist() == [2, 2]
    hooks.register_process_group_hook(lambda group, name: groups.append(name)).remove()
    dist.destroy_process_group()
    assert state() == patched, "sessions come and go, and leave no layer of theirs"
    starts.clear()

    os.environ["DD_PYTORCH_COLLECTIVES"] = "off"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    assert not our_thread()
    assert (len(groups), starts) == (2, [])  # two of the parent's own
    unpatch()
    assert state() == before
    dist.destroy_process_group()
"""


def test_hooks_outlive_forks_and_sessions_and_leave_nothing_behind(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*PYTHON, jobs.script(ALONE)], alone(tmp_path / "log")).ok()
    assert result.stderr.count("DD_PYTORCH_COLLECTIVES=off: collectives are neither") == 1, result.describe()
