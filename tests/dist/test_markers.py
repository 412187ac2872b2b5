"""Marks of real collectives: NVTX ranges through a stand-in for the nvtx package, and lines on the ranks' stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.job import Jobs, environment, torchrun
from harness.releases import MISSING, without

pytestmark = pytest.mark.dist

HAS_REDUCE_SCATTER = "reduce_scatter_tensor" not in MISSING

# What Nsight would see: the functions of the nvtx package that we use.
NVTX = """
    import json

    seen, depth = [], 0

    def push_range(message):
        global depth
        depth += 1
        assert message.isascii()
        seen.append(json.loads(message) | {"depth": depth})

    def pop_range():
        global depth
        depth -= 1
"""

TRAIN = """
    import contextlib, json, os, socket, sys
    import numpy
    import nvtx
    import torch, torch.distributed as dist
    from torch.distributed import all_reduce as bound_before
    from torch.utils._python_dispatch import TorchDispatchMode
    import ddtrace_pytorch
    from ddtrace_pytorch import hooks

    if hasattr(torch._C, "_nvtx"):  # a build with CUDA has its own
        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = nvtx.push_range, nvtx.pop_range
    ddtrace_pytorch.patch()
    rank = int(os.environ["RANK"])
    peer = 1 - rank
    told = {}

    @contextlib.contextmanager
    def session(name, **settings):
        # A socket that keeps writes apart: each line has to come in one.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdout = os.dup(1)
        os.environ.update(settings)
        # A rendezvous of its own: a store of the launcher's still has the addresses of the group before.
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}{name}", rank=rank, world_size=2)
        os.dup2(theirs.fileno(), 1)
        nvtx.seen.clear()
        told[name] = {"ranges": [], "writes": []}
        try:
            yield told[name]
        finally:
            os.dup2(stdout, 1)
            ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    told[name]["writes"].append(ours.recv(65536).decode())
            told[name]["ranges"] = list(nvtx.seen)
            told[name]["depth"] = nvtx.depth
            dist.destroy_process_group()
            for variable in settings:
                del os.environ[variable]

    def exchange(tensor, other):
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, other, peer)])
        for work in works:
            work.wait()

    def refused(call):
        try:
            call()
        except Exception as error:
            return [type(error).__name__, str(error)]

    def train(facts):
        tensor, other = torch.ones(8), torch.zeros(8)
        facts["line"] = sys._getframe().f_lineno + 1
        dist.all_reduce(tensor)
        bound_before(tensor, async_op=True).wait()
        dist.broadcast(tensor, numpy.int64(1))
        dist.barrier()
        dist.send(tensor, peer) if rank == 0 else dist.recv(other, peer)
        exchange(tensor, other)
        assert other.equal(tensor)
        dist.all_gather_object([None, None], {"rank": rank})
        dist.gather(tensor, [torch.zeros(8), torch.zeros(8)] if rank == 0 else None, 0)
        dist.reduce_scatter_tensor(torch.zeros(4), tensor)
        facts["errors"] = [
            refused(lambda: dist.all_reduce("no tensor")),  # its mark says that its size isn't known
            refused(lambda: dist.all_reduce(tenser=tensor)),
            refused(lambda: dist.batch_isend_irecv([])),
            refused(lambda: dist.batch_isend_irecv([tensor])),
        ]

    def layers():
        inner = dict(zip(bound_before.__code__.co_freevars, bound_before.__closure__))["func"].cell_contents
        return inner.__globals__["__name__"].startswith("ddtrace_pytorch.collectives.listening")

    class Dispatched(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.ops.append(str(function))
            return function(*args, **(kwargs or {}))

    def dispatched(tensor):
        with Dispatched() as mode:
            dist.all_reduce(tensor)
            exchange(tensor, torch.zeros(8))
        return mode.ops

    with session("nothing") as facts:
        train(facts)
        facts["ops"] = dispatched(torch.ones(8))
        facts["layers"] = layers()

    with session("ours", DD_PYTORCH_NVTX="true", DD_PYTORCH_PRINT="1") as facts:
        train(facts)
        facts["layers"] = layers()
    told["ours"]["afterwards"] = layers()

    with session("between-nodes", DD_PYTORCH_NVTX="crossnode", DD_PYTORCH_PRINT="crossnode") as facts:
        train(facts)
        facts["layers"] = layers()

    with session("theirs", TORCH_DISTRIBUTED_TRACING="ALL", TORCH_DISTRIBUTED_TRACING_PRINT="y", GPU_SERIAL="13",
                 VM_ID="vm-7") as facts:
        train(facts)
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2), group=pair)

    with session("ours-wins", TORCH_DISTRIBUTED_TRACING="ALL", TORCH_DISTRIBUTED_TRACING_PRINT="1",
                 DD_PYTORCH_NVTX="false", DD_PYTORCH_PRINT="true") as facts:
        dist.all_reduce(torch.ones(2))

    def refuse(*args, **kwargs):
        raise AssertionError("this would touch the device")

    with session("capturing", DD_PYTORCH_NVTX="true", DD_PYTORCH_PRINT="true") as facts:
        handles = [hooks.register_collective_start_hook(id), hooks.register_collective_end_hook(id)]
        torch.cuda.is_current_stream_capturing = lambda: True
        for name in ("Event", "Stream", "synchronize", "current_stream", "stream", "init", "_lazy_init"):
            setattr(torch.cuda, name, refuse)
        facts["ops"] = dispatched(torch.ones(8))
        for handle in handles:
            handle.remove()

    with open(sys.argv[1] + str(rank), "w") as out:
        json.dump(told, out)
"""

Told = dict[str, Any]


def of(told: Told, name: str, operation: str) -> list[Told]:
    return [one for one in told[name]["ranges"] if one.get("operation", one.get("name")) == operation]


def printed(told: Told, name: str) -> list[Any]:
    writes: list[str] = told[name]["writes"]
    assert all(write.endswith("\n") and write.count("\n") == 1 for write in writes)
    return [json.loads(write) if write.startswith("{") else write for write in writes]


def test_marks_on_two_ranks(jobs: Jobs, tmp_path: Path) -> None:
    jobs.script(NVTX, "nvtx.py")
    script = jobs.script(without(TRAIN))
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    result = jobs.run([*torchrun(2), script, str(tmp_path / "told-")], env).ok()
    ranks = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in (0, 1)]
    for rank, told in enumerate(ranks):
        assert all(facts["depth"] == 0 for facts in told.values()), "each range that is pushed is popped"
        nothing_by_default(told)
        ranges_in_our_words(told, rank)
        marks_in_the_words_of_monitor_collectives(told, rank)
        assert told["between-nodes"]["ranges"] == told["between-nodes"]["writes"] == []
        assert told["ours-wins"]["ranges"] == []
        assert told["capturing"]["ops"] == told["nothing"]["ops"], "no work of ours for the device"
        assert of(told, "capturing", "all_reduce")
    what_is_printed(ranks)
    (batch_of_0, batch_of_1) = (of(told, "ours", "batch_isend_irecv")[0]["correlation_id"] for told in ranks)
    assert batch_of_0 != batch_of_1
    assert "could not" not in result.stderr, result.describe()


def nothing_by_default(told: Told) -> None:
    assert told["nothing"]["ranges"] == told["nothing"]["writes"] == []
    assert not told["nothing"]["layers"], "no layer costs anything"
    assert told["ours"]["layers"]
    assert not told["ours"]["afterwards"]
    assert told["nothing"]["errors"] == told["ours"]["errors"]
    assert None not in told["ours"]["errors"]


def ranges_in_our_words(told: Told, rank: int) -> None:
    first, second, refused = of(told, "ours", "all_reduce")
    path, _, line = first.pop("line").rpartition(":")
    assert path.endswith("train.py")
    assert int(line) == told["ours"]["line"]
    assert first == {
        "operation": "all_reduce",
        "bytes": 32,
        "group": "world",
        "group_ranks": [0, 1],
        "rank": rank,
        "seq": 1,
        "async": False,
        "device": "cpu",
        "depth": 1,
    }
    assert (second["async"], second["seq"]) == (True, 2)
    assert refused["bytes"] is None
    assert of(told, "ours", "broadcast")[0]["root"] == 1
    assert of(told, "ours", "barrier")[0]["bytes"] == 0
    assert of(told, "ours", "send" if rank == 0 else "recv")[0]["peer"] == 1 - rank
    assert of(told, "ours", "all_gather_object")[0]["bytes"] is None
    assert len(of(told, "ours", "gather")) == 1
    assert [one["bytes"] for one in of(told, "ours", "reduce_scatter_tensor")] == [32] * HAS_REDUCE_SCATTER
    (batch,) = of(told, "ours", "batch_isend_irecv")
    assert (batch["transfers"], batch["bytes"]) == (2, 64)
    inner = [of(told, "ours", name)[0] for name in ("isend", "irecv")]
    assert [one["correlation_id"] for one in inner] == [batch["correlation_id"]] * 2
    assert [one["peer"] for one in inner] == [1 - rank] * 2
    assert (batch["depth"], inner[0]["depth"], inner[1]["depth"]) == (1, 2, 2)


def marks_in_the_words_of_monitor_collectives(told: Told, rank: int) -> None:
    first, _, _, of_pair = of(told, "theirs", "all_reduce")
    assert first["source_line"].endswith(f"train.py:{told['theirs']['line']}")
    assert set(first) - {"depth"} == {
        "name", "rank", "source_line", "message_size", "device", "timestamp", "gpu_serial", "vm_id",
    }  # fmt: skip
    assert (first["message_size"], first["device"]) == (32, None)
    assert (first["gpu_serial"], first["vm_id"]) == ("13", "vm-7")
    assert of_pair["group_ranks"] == [0, 1]
    assert of(told, "theirs", "broadcast")[0]["root_rank"] == 1
    assert len(of(told, "theirs", "gather")) == (1 if rank == 0 else 0)
    assert [one["message_size"] for one in of(told, "theirs", "reduce_scatter")] == [16] * HAS_REDUCE_SCATTER
    assert of(told, "theirs", "batch_isend_irecv") == []
    batch = [one for one in told["theirs"]["ranges"] if "correlation_id" in one]
    assert {(one["name"], one["peer_rank"]) for one in batch} == {("send", 1 - rank), ("recv", 1 - rank)}
    assert len({one["correlation_id"] for one in batch}) == 1
    lines = printed(told, "theirs")
    assert lines.count("Num p2p ops in batch: 2\n") == 1
    assert {one["name"] for one in lines if isinstance(one, dict)} >= {"send", "recv"}


def what_is_printed(ranks: list[Told]) -> None:
    both = [[one["operation"] for one in printed(told, "ours")] for told in ranks]
    shared = ["all_reduce", "all_reduce", "barrier", "all_gather_object", "gather"]
    shared += ["reduce_scatter_tensor"] * HAS_REDUCE_SCATTER
    assert both[0] == [*shared[:3], "send", "batch_isend_irecv", "isend", "irecv", *shared[3:], "all_reduce"]
    assert both[1] == ["broadcast", "recv", "batch_isend_irecv", "isend", "irecv"]
    assert [len(printed(told, "ours-wins")) for told in ranks] == [1, 0]
    assert printed(ranks[0], "ours-wins")[0]["operation"] == "all_reduce"
