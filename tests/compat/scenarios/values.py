"""What every operation gives back, how it fails, and what it takes from the machine."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from stage import PATCHED, bits, failure, kind, launched, play, scene

SUM = dist.ReduceOp.SUM


def fresh(n: int = 4) -> Any:
    return torch.arange(n, dtype=torch.float32) * 1.1 + dist.get_rank()


def peer() -> int:
    return 1 - dist.get_rank()


def done(result: Any) -> list[str]:
    """What a call gave back, and what waiting for it gives."""
    return [kind(result), repr(result.wait())] if result is not None else [kind(result)]


def each_operation(deferred: bool) -> dict[str, Any]:
    one, two, double = fresh(), [fresh(), fresh()], fresh(8)
    half = fresh(2)
    rank = dist.get_rank()
    uneven, splits = fresh(3 + rank), ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
    calls = {
        "all_reduce": lambda: (one, dist.all_reduce(one, async_op=deferred)),
        "all_reduce max": lambda: (one, dist.all_reduce(one, dist.ReduceOp.MAX, async_op=deferred)),
        "broadcast": lambda: (one, dist.broadcast(one, 1, async_op=deferred)),
        "broadcast in group": lambda: (one, dist.broadcast(one, group_src=0, async_op=deferred)),
        "reduce": lambda: (one if rank == 0 else [], dist.reduce(one, 0, async_op=deferred)),
        "all_gather": lambda: (two, dist.all_gather(two, one, async_op=deferred)),
        "all_gather_into_tensor": lambda: (double, dist.all_gather_into_tensor(double, one, async_op=deferred)),
        "_all_gather_base": lambda: (double, dist._all_gather_base(double, one, async_op=deferred)),
        "reduce_scatter": lambda: (one, dist.reduce_scatter(one, two, async_op=deferred)),
        "reduce_scatter_tensor": lambda: (half, dist.reduce_scatter_tensor(half, one, async_op=deferred)),
        "all_to_all_single": lambda: (half, dist.all_to_all_single(half, half + 1, async_op=deferred)),
        "all_to_all_single, uneven": lambda: (
            uneven,
            dist.all_to_all_single(uneven, fresh(4 - rank), *splits, async_op=deferred),
        ),
        "all_to_all": lambda: (two, dist.all_to_all(two, [fresh(), fresh() + 1], async_op=deferred)),
        "gather": lambda: (
            two if rank == 0 else [],
            dist.gather(one, two if rank == 0 else None, 0, async_op=deferred),
        ),
        "scatter": lambda: (one, dist.scatter(one, two if rank == 1 else None, 1, async_op=deferred)),
        "barrier": lambda: ([], dist.barrier(async_op=deferred)),
        "all_reduce_coalesced": lambda: (two, dist.all_reduce_coalesced(two, async_op=deferred)),
    }
    if hasattr(dist, "all_gather_single"):
        calls["all_gather_single"] = lambda: (double, dist.all_gather_single(double, one, async_op=deferred))
        calls["reduce_scatter_single"] = lambda: (half, dist.reduce_scatter_single(half, one, async_op=deferred))
    came = {}
    for name, call in calls.items():
        tensors, result = call()
        gave = done(result)
        came[name] = [*gave, bits(*(tensors if isinstance(tensors, list) else [tensors]))]
    return came


@scene
def blocking_calls() -> Any:
    return each_operation(deferred=False)


@scene
def calls_that_are_waited_for_later() -> Any:
    return each_operation(deferred=True)


@scene
def point_to_point() -> Any:
    mine, theirs = fresh(), torch.zeros(4)
    came: dict[str, Any] = {}
    sent, got = dist.isend(mine, peer()), dist.irecv(theirs, peer())
    came["isend, irecv"] = [done(sent), done(got), bits(theirs)]
    if dist.get_rank() == 0:
        came["send, recv"] = [repr(dist.send(mine, 1)), dist.recv(theirs, 1)]
    else:
        came["send, recv"] = [dist.recv(theirs), repr(dist.send(mine, 0))]
    batch = [dist.P2POp(dist.isend, mine, peer()), dist.P2POp(dist.irecv, theirs, peer())]
    works = dist.batch_isend_irecv(batch)
    came["batch"] = [kind(works), [done(work) for work in works], bits(theirs)]
    return came


@scene
def objects() -> Any:
    rank = dist.get_rank()
    everybody: list[Any] = [None, None]
    gathered: list[Any] = [None, None]
    told, given = [{"from": rank}], [None]
    came = [
        dist.all_gather_object(everybody, {"rank": rank}),
        dist.gather_object((rank,), gathered if rank == 0 else None, 0),
        dist.broadcast_object_list(told, 1),
        dist.scatter_object_list(given, ["a", "b"] if rank == 0 else None, 0),
    ]
    if rank == 0:
        dist.send_object_list(["hello"], 1)
    else:
        dist.recv_object_list(told, 0)
    return [came, everybody, gathered, told, given]


@scene
def coalesced() -> Any:
    manager = dist.distributed_c10d._coalescing_manager
    group = dist.new_group(group_desc="coalesced")
    came: dict[str, Any] = {}
    for deferred in (False, True):
        one, two = fresh(), fresh(8)
        with manager(group, async_ops=deferred) as block:
            inside = [dist.all_reduce(one, group=group), dist.all_reduce(two, group=group)]
        came[str(deferred)] = [
            kind(block), [kind(one) for one in inside], len(block.works), block.wait() if deferred else None,
            bits(one, two),
        ]  # fmt: skip
    came["illegal"] = failure(raised_inside)
    came["mixed"] = failure(mixed)
    came["refused at the end"] = failure(refused_at_the_end)["tail"]  # its text has a set, in any order
    came["one inside of another"] = failure(one_inside_of_another)
    return came


# torch leaves a group in a state of disorder after each of these: it has one of its own.
def raised_inside() -> None:
    group = dist.new_group()
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True):
        dist.all_reduce(fresh(), group=group, async_op=True).is_completed()


def mixed() -> None:
    group = dist.new_group()
    with dist.distributed_c10d._coalescing_manager(group):
        dist.all_reduce(fresh(), group=group)
        dist.broadcast(fresh(), 0, group=group)


def refused_at_the_end() -> None:
    group = dist.new_group()
    with dist.distributed_c10d._coalescing_manager(group):
        dist.all_reduce(fresh(), group=group)
        dist.reduce_scatter_tensor(fresh(2), fresh(), group=group)


def one_inside_of_another() -> None:
    group = dist.new_group()
    manager = dist.distributed_c10d._coalescing_manager
    with manager(group), manager(group):
        pass


@scene
def not_a_member() -> Any:
    group = dist.new_group([0])
    one = fresh()
    return [done(dist.all_reduce(one, group=group)), done(dist.barrier(group)), bits(one), repr(group is None)]


@scene
def wrong_arguments() -> Any:
    one, rank = fresh(), dist.get_rank()
    work = dist.all_reduce(fresh(), async_op=True)
    wrong = {
        "nothing given": lambda: dist.all_reduce(),
        "too much": lambda: dist.all_reduce(one, SUM, None, False, 5),
        "unknown name": lambda: dist.all_reduce(one, opp=SUM),
        "twice": lambda: dist.all_reduce(one, tensor=one),
        "not a tensor": lambda: dist.all_reduce([1]),
        "not an operation": lambda: dist.all_reduce(one, "sum"),
        "not a group": lambda: dist.all_reduce(one, group="world"),
        "no root": lambda: dist.broadcast(one),
        "no such root": lambda: dist.broadcast(one, 7),
        "two roots": lambda: dist.reduce(one, 0, group_dst=0),
        "sizes": lambda: dist.all_gather_into_tensor(fresh(3), one),
        "not a list": lambda: dist.all_gather(3, one),
        "types": lambda: dist.all_gather([one.long(), one.long()], one),
        "splits": lambda: dist.all_to_all_single(fresh(), one, [1], [1, 3]),
        "splits that are none": lambda: dist.all_to_all_single(fresh(), one, 3, 4),
        "list of another rank": lambda: dist.gather(one, None if rank == 0 else [one, one], 0),
        "isend, nothing given": lambda: dist.isend(),
        "isend, unknown name": lambda: dist.isend(one, 1, tagg=3),
        "to itself": lambda: dist.isend(one, rank),
        "send to itself": lambda: dist.send(one, rank),
        "recv, not a tensor": lambda: dist.recv(3, 0),
        "recv, not a tag": lambda: dist.recv(one, peer(), None, "tag"),
        "empty batch": lambda: dist.batch_isend_irecv([]),
        "batch of nothing": lambda: dist.batch_isend_irecv(3),
        "barrier": lambda: dist.barrier(device_ids=3),
        "monitored_barrier": lambda: dist.monitored_barrier(timeout="long"),
        "objects, nothing given": lambda: dist.all_gather_object(),
        "objects": lambda: dist.all_gather_object([None], lambda: 0),
        "object list": lambda: dist.broadcast_object_list(3, 0),
        "coalesced": lambda: dist.all_reduce_coalesced([one, 3]),
        "manager": lambda: dist.distributed_c10d._coalescing_manager(3, 4, 5, 6),
        "wait": lambda: work.wait("long"),
    }
    came = {name: failure(call) for name, call in wrong.items()}
    work.wait()
    return came


@scene
def wrong_arguments_while_somebody_listens() -> Any:
    if not PATCHED:
        return wrong_arguments()
    from ddtrace_pytorch import hooks

    handle = hooks.register_collective_end_hook(lambda status: None)
    try:
        return wrong_arguments()
    finally:
        handle.remove()


@scene
def wrong_groups() -> Any:
    c10d = dist.distributed_c10d
    wrong = {
        "a second default": lambda: dist.init_process_group("gloo"),
        "unknown name": lambda: dist.init_process_group(backennd="gloo"),
        "no such rank": lambda: dist.new_group([0, 7]),
        "twice the same": lambda: dist.new_group([0, 0]),
        "no such backend": lambda: dist.new_group(backend="carrier pigeon"),
        "made wrongly": lambda: c10d._new_group_with_tag(3, 4, 5, 6, 7, 8, 9, 10, 11),
        "no group": lambda: dist.destroy_process_group(3),
        "nothing to split": lambda: dist.split_group(),
        "split of gloo": lambda: dist.split_group(split_ranks=[[0], [1]]),
        "abort of no group": lambda: c10d._abort_process_group(3),
    }
    if hasattr(dist, "shrink_group"):
        wrong["nothing to exclude"] = lambda: dist.shrink_group([])
        wrong["gloo does not shrink"] = lambda: dist.shrink_group([1])
    return {name: failure(call) for name, call in wrong.items()}


class Mine(torch.Tensor):
    """A tensor that fails in its own way wherever torch asks it to take over."""

    error = ValueError("mine")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is dist.all_reduce:
            raise cls.error
        return super().__torch_function__(function, types, args, kwargs or {})


@scene
def an_error_is_the_same_object() -> Any:
    tensor = fresh().as_subclass(Mine)
    try:
        dist.all_reduce(tensor)
    except ValueError as error:
        return [error is Mine.error, kind(error.__context__), kind(error.__cause__), error.__suppress_context__]
    return "torch asks nobody"


@scene
def a_call_returns_before_the_peer_enters() -> Any:
    # If it did not, this would never end.
    store = dist.distributed_c10d._get_default_store()
    tensor = fresh()
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        early = work.is_completed()
        store.set("issued", "1")
    else:
        store.wait(["issued"])
        work = dist.all_reduce(tensor, async_op=True)
        early = False
    work.wait()
    return [early, bits(tensor)]


@scene
def never_waited_for() -> Any:
    group = dist.new_group(group_desc="never waited for")
    for _ in range(5):
        work = dist.all_reduce(fresh(), group=group, async_op=True)
        if dist.get_rank() == 1:
            work.wait()
        del work
    return "no hang"


@scene
def what_it_takes_of_the_gpu() -> Any:
    used: list[str] = []

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            used.append("Event")

    kept = {name: getattr(torch.cuda, name) for name in ("Event", "synchronize", "is_current_stream_capturing")}
    torch.cuda.Event = Event
    torch.cuda.synchronize = lambda *args: used.append("synchronize")
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        before = launched()
        for deferred in (False, True):
            each_operation(deferred)
        issued = launched() - before
    finally:
        for name, value in kept.items():
            setattr(torch.cuda, name, value)
    timing = sorted(name for name in os.environ if "ENABLE_TIMING" in name)
    return [used, issued, timing, torch.cuda.is_initialized()]


@scene
def in_a_gradient_hook_on_another_thread() -> Any:
    weight = torch.ones(3, requires_grad=True)
    threads: list[bool] = []
    group = dist.new_group(group_desc="hook")

    def hook(grad: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        reduced = grad.clone()
        dist.all_reduce(reduced, SUM, group)
        return reduced

    weight.register_hook(hook)
    thread = threading.Thread(target=lambda: (weight * fresh(3)).sum().backward())
    thread.start()
    thread.join()
    return [threads, bits(weight.grad)]


@scene
def an_absent_peer() -> Any:
    group = dist.new_group(timeout=timedelta(seconds=1), group_desc="absent")
    other = dist.new_group()
    came: list[Any] = []
    if dist.get_rank() == 0:
        came = [
            failure(lambda: dist.monitored_barrier(other, timedelta(seconds=0.3))),
            failure(lambda: dist.all_reduce(fresh(), group=group)),
        ]
    return came


if __name__ == "__main__":
    play()
