"""By hand, on a machine with two GPUs: collectives over NCCL, and that nothing of ours runs on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.job import Jobs, environment, torchrun
from harness.log import of_type

pytestmark = pytest.mark.gpu

CALLS = """
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import json, os
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    ones = torch.ones(1024, device="cuda")
    for _ in range(4):
        dist.all_reduce(ones)
    work = dist.all_reduce(ones, async_op=True)
    work.wait()
    dist.all_gather_into_tensor(torch.empty(2048, device="cuda"), ones)
    dist.send(ones, 1) if rank == 0 else dist.recv(ones, 0)
    there = torch.empty(1024, device="cuda")
    both_ways = [dist.P2POp(dist.isend, ones, 1 - rank), dist.P2POp(dist.irecv, there, 1 - rank)]
    for one in dist.batch_isend_irecv(both_ways):
        one.wait()
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cuda", local), async_ops=True) as both:
        dist.all_reduce(ones)
        dist.all_reduce(there)
    both.wait()
    dist.all_gather_object([None, None], {"rank": rank})
    torch.cuda.synchronize()
    assert "TORCH_NCCL_ENABLE_TIMING" not in os.environ
    dist.destroy_process_group()
"""


def run(jobs: Jobs, log: Path, script: str, **settings: str) -> Any:
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log), **settings)
    return jobs.run([*torchrun(2), jobs.script(script)], env).ok()


def test_calls_are_counted_and_their_time_is_not_taken_for_completion(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run(jobs, log, CALLS)
    for rank in (0, 1):
        totals = {
            (one["resource"], one["how"]): one
            for one in of_type(log, "summary")
            if one["resource"] != "unseen" and one["_file"].endswith(f"rank-{rank:05d}.jsonl")
        }
        counts = {name: one["metrics"]["collective.count"] for name, one in totals.items()}
        assert counts == {
            ("all_reduce", "waited"): 4,
            ("all_reduce", "issued"): 1,
            ("all_gather_into_tensor", "waited"): 1,
            ("send" if rank == 0 else "recv", "waited"): 1,
            ("isend", "issued"): 1,
            ("irecv", "issued"): 1,
            ("all_reduce_coalesced", "issued"): 1,
            ("all_gather_object", "waited"): 1,
        }
        assert totals["all_reduce_coalesced", "issued"]["metrics"]["collective.bytes"] == 2 * 4096
        for one in totals.values():
            assert one["tags"]["collective.backend"] == "nccl"
            assert one["tags"]["collective.time_source"] != "completion"
            assert "collective.busbw_gbps" not in one["metrics"] or one["tags"]["collective.time_source"] != "issue"
            metrics = one["metrics"]
            assert metrics["collective.group_launched"] == metrics["collective.group_seen"] == 9


CAPTURE = """
    import sys
    if "with" in sys.argv:
        import ddtrace_pytorch
        ddtrace_pytorch.patch()
    import json, os
    import torch, torch.distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    ones = torch.ones(1024, device="cuda")
    dist.all_reduce(ones)
    torch.cuda.synchronize()
    events = []
    made = torch.cuda.Event.__new__
    torch.cuda.Event.__new__ = lambda *args, **named: (events.append(1), made(*args, **named))[1]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        twice = ones * 2
        dist.all_reduce(twice)
    nodes = ctypes.c_size_t()
    cudart = ctypes.CDLL(next(name for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so") if _there(name)))
    raw = graph.raw_cuda_graph()
    assert cudart.cudaGraphGetNodes(ctypes.c_void_p(raw), None, ctypes.byref(nodes)) == 0
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    said = {"rank": dist.get_rank(), "nodes": nodes.value, "events": len(events), "value": twice[0].item()}
    os.write(1, json.dumps(said).encode() + b"\\n")  # in one go: the ranks share their output
    del graph  # or NCCL waits for it for ever
    dist.destroy_process_group()
"""
THERE = """
    import ctypes

    def _there(name):
        try:
            ctypes.CDLL(name)
            return True
        except OSError:
            return False
"""


def test_a_graph_captured_with_a_collective_has_the_same_nodes(jobs: Jobs, tmp_path: Path) -> None:
    found = {}
    for word in ("without", "with"):
        env = environment(
            None,
            DD_PYTORCH_EXPORT="local",
            DD_PYTORCH_LOG_DIR=str(tmp_path / f"log-{word}"),
            DD_PYTORCH_NVTX="true",
        )
        result = jobs.run([*torchrun(2), jobs.script(THERE + CAPTURE), word], env).ok()
        lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        found[word] = sorted(lines, key=lambda line: line["rank"])
    assert found["with"] == found["without"]
    assert all(line["nodes"] > 0 for line in found["with"])
    assert all(line["value"] == 8.0 for line in found["with"])
