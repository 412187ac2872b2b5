"""What a rank that waits has on disk of where it is, in each of the ways in which ranks wait."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, alone, environment, jobs_in, torchrun
from harness.log import of_type
from harness.waiting import until

from ddtrace_pytorch.stalls import mates
from ddtrace_pytorch.stalls.roll import RankState

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

# Rank 0 comes to each scene at once; rank 1 only when a file of that name is there.
SCRIPT = """
    import os, sys, time
    from datetime import timedelta
    from pathlib import Path
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import numpy
    import torch
    import torch.distributed as dist

    class Unreadable(torch.Tensor):
        nbytes = property(lambda self: 1 // 0)

        @classmethod
        def __torch_function__(cls, func, *rest):
            assert "get" not in func.__name__, "somebody looks"
            return super().__torch_function__(func, *rest)

    gates = Path(os.environ["GATES"])
    while os.environ["RANK"] == "1" and not (gates / "init").exists():
        time.sleep(0.02)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1], group_desc="dp")
    last = dist.new_group([0, 1], group_desc="last")
    for number in range(40):
        short = dist.new_group([0, 1], group_desc=f"short-{number}")
        dist.barrier(group=short)
        dist.destroy_process_group(short)
    del short
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=pair)

    def scene(name):
        if rank == 1:
            while not (gates / name).exists():
                time.sleep(0.02)

    four = torch.ones(4)
    dist.all_reduce(four)
    scene("all_reduce")
    dist.all_reduce(torch.ones(2, 3, dtype=torch.float64))
    scene("broadcast")
    dist.broadcast(four, src=1, group=pair)
    scene("sparse")
    dist.all_reduce(four.to_sparse())
    scene("of a class of its own")
    dist.broadcast(four.as_subclass(Unreadable), src=numpy.int64(1))
    scene("recv")
    dist.recv(four, src=1) if rank == 0 else dist.send(four, dst=0)
    scene("irecv")
    (dist.irecv(four, src=1) if rank == 0 else dist.isend(four, dst=0)).wait()
    scene("awaited")
    dist.all_reduce(four, async_op=True).wait()
    scene("objects")
    dist.all_gather_object([None, None], rank)
    scene("backward")
    model(torch.ones(1, 8)).sum().backward()
    scene("making")
    dist.new_group([0, 1])
    scene("late")
    dist.barrier(group=last)
    try:
        dist.monitored_barrier(last, timedelta(seconds=5)) if rank == 0 else scene("raises")
    except RuntimeError:
        pass
    scene("end")
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A job that goes from scene to scene: where its gates and its states are."""
    with jobs_in(tmp_path_factory.mktemp("whereabouts")) as jobs:
        yield from _job(jobs)


def _job(jobs: Jobs) -> Iterator[tuple[Path, Path]]:
    gates, states = jobs.directory / "gates", jobs.directory / "states"
    gates.mkdir()
    env = environment(
        None,
        GATES=str(gates),
        DD_PYTORCH_STATE_DIR=str(states),
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(jobs.directory / "log"),
        DD_PYTORCH_STALL_SECONDS="2",
    )
    job = jobs.start([*torchrun(2), jobs.script(SCRIPT)], env)
    stderr = states.parent / "job-0" / "stderr"
    until(lambda: "init_process_group has waited" in stderr.read_text(), 60, "rank 0 says that it waits")
    (gates / "init").touch()
    yield gates, states
    for scene in SCENES:
        (gates / scene).touch()
    job.wait(60).ok()


SCENES = (
    "all_reduce",
    "broadcast",
    "sparse",
    "of a class of its own",
    "recv",
    "irecv",
    "awaited",
    "objects",
    "backward",
    "making",
    "late",
    "raises",
    "end",
)


def state_of_rank_0(states: Path, group: str, operation: str) -> RankState:
    """Its state, once it says that it is in that operation."""

    def found() -> RankState | None:
        for lock in states.rglob("rank-00000.lock"):
            state = mates.read(str(lock))
            for here in state.groups.values() if state is not None else ():
                if here.label == group and here.current is not None and here.current.operation == operation:
                    assert state is not None
                    # The first look at a call is before it is looked at closer.
                    if here.current.shape is not None or state.as_of - here.current.since > 2 * 10**9:
                        return state
        return None

    state = until(found, 60, f"{operation} on {group}")
    assert state is not None
    return state


def test_of_groups_that_are_gone_the_last_ones_are_told(waiting: tuple[Path, Path]) -> None:
    _, states = waiting
    labels = [here.label for here in state_of_rank_0(states, "world", "all_reduce").groups.values()]
    assert labels == ["world", "dp", "last", *(f"short-{number}" for number in range(24, 40))]


@pytest.mark.parametrize(
    ("scene", "group", "operation", "key", "shape", "dtype", "peer"),
    [
        ("all_reduce", "world", "all_reduce", 2, (2, 3), "float64", None),
        ("broadcast", "dp", "broadcast", None, (4,), "float32", 1),
        ("sparse", "world", "all_reduce", 3, (4,), "float32", None),
        ("of a class of its own", "world", "broadcast", 4, (4,), "float32", 1),
        ("recv", "world", "recv", 0, (4,), "float32", 1),
        ("irecv", "world", "irecv", 0, None, None, 1),
        ("awaited", "world", "all_reduce", 5, None, None, None),
        ("objects", "world", "all_gather", 6, (1,), "int64", None),  # of which it is made
        ("backward", "dp", "all_reduce", None, (72,), "float32", None),
    ],
)
def test_what_it_is_in(
    waiting: tuple[Path, Path],
    scene: str,
    group: str,
    operation: str,
    key: int | None,
    shape: tuple[int, ...] | None,
    dtype: str | None,
    peer: int | None,
) -> None:
    gates, states = waiting
    state = state_of_rank_0(states, group, operation)
    (here,) = [one for one in state.groups.values() if one.label == group]
    call = here.current
    assert call is not None
    assert (call.shape, call.dtype, call.peer) == (shape, dtype, peer)
    if key is not None:
        assert call.key == key
    if call.key:
        assert (here.entered, here.completed) == (call.key, call.key - 1)
    assert state.doing == ("user" if scene == "backward" else "collective")
    assert any("train.py" in frame for frame in state.frames)
    (gates / scene).touch()


def test_where_not_all_come_to_the_first_group_it_is_said_who_has(waiting: tuple[Path, Path]) -> None:
    _, states = waiting
    (said,) = re.findall(r"init_process_group has waited .*", (states.parent / "job-0" / "stderr").read_text())
    assert re.fullmatch(r".* 2 s: here \(.+\) with rank 0, without rank 1, as far as they are traced", said)


def test_of_what_took_too_long_it_is_told_how_it_ended(waiting: tuple[Path, Path]) -> None:
    gates, states = waiting
    for scene in SCENES[: SCENES.index("making")]:
        (gates / scene).touch()
    stderr = states.parent / "job-0" / "stderr"

    def said(words: str) -> None:
        until(lambda: words in stderr.read_text(), 60, words)

    said("new_group of group `world` has waited")
    assert re.search(r"new_group of group `world` has waited .*: rank 1 \(.*\) has not entered it", stderr.read_text())
    (gates / "making").touch()
    said("new_group of group `world` went on after")
    said("barrier #1 of group `last` has waited")
    (gates / "late").touch()
    said("barrier #1 of group `last` went on after")
    said("monitored_barrier of group `last` has waited")
    said("monitored_barrier of group `last` raised RuntimeError: ")
    assert "monitored_barrier of group `last` went on" not in stderr.read_text()


RAISING = """
    import threading, time
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    while not any(thread.name == "ddtrace_pytorch.standstill" for thread in threading.enumerate()):
        time.sleep(0.01)
    raised, end = 0, time.monotonic() + 2.5
    while raised < 1_000 or time.monotonic() < end:
        try:
            dist.all_reduce(torch.ones(1), op="no such operation")
        except TypeError:
            raised += 1
    dist.destroy_process_group()
"""


def test_collectives_that_raise_in_a_loop_are_written_down_once_a_second(jobs: Jobs, tmp_path: Path) -> None:
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    result = jobs.run([*torchrun(2), jobs.script(RAISING)], env).ok()
    states = [record for record in of_type(tmp_path / "log", "state") if record["why"] == "raised"]
    assert 1 <= len(states) <= 2 * (result.seconds + 1)
    assert "waited" not in result.stderr  # nobody waits: both ranks were refused
