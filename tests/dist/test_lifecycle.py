"""When rank spans open and close, and what they carry: one process is enough to see it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness.agent import Agent, Span, free_port
from harness.job import DDTRACE_RUN, PYTHON, Jobs, environment, torchrun
from harness.log import of_type, rank_spans, records
from harness.look import HOOKS

pytestmark = pytest.mark.dist


def alone(agent_url: str | None, **settings: str) -> dict[str, str]:
    """The environment of a job of one rank, started by hand."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return environment(agent_url, **{"DD_PATCH_MODULES": "pytorch:true", **place, **settings})


def reasons(spans: list[Span]) -> list[str]:
    return [span["meta"]["pytorch.end_reason"] for span in spans]


# Rank 0 goes on alone: gloo cannot shrink, so its backend is one that says it can.
SHRINKS = """
    import os
    from datetime import timedelta
    from types import SimpleNamespace
    import torch, torch.distributed as dist
    from ddtrace_pytorch import hooks

    c10d = dist.distributed_c10d
    groups = []
    hooks.register_process_group_hook(lambda group, name: groups.append(group))
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(1))

    def shrink(excluded, flags, options):
        store = dist.PrefixStore("shrunk", c10d._get_default_store())
        return dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=30))

    c10d._validate_shrink_backend_requirements = lambda group: SimpleNamespace(shrink=shrink)
    if dist.get_rank() == 0:
        shrunk = dist.shrink_group([1])
        assert shrunk is dist.group.WORLD
        assert dist.get_world_size() == 1
        assert groups[1:] == [shrunk]
        for _ in range(2):
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=shrunk)
        del groups[:], shrunk
        dist.destroy_process_group()
"""


@pytest.mark.skipif(not hasattr(torch.distributed, "shrink_group"), reason="process groups shrink from torch 2.10 on")
def test_a_default_group_that_shrinks_has_a_session_of_its_own(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = environment(None, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log))
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(SHRINKS)], env).ok()
    facts = [
        (span["metrics"]["rank"], span["metrics"]["world_size"], span["metrics"]["pytorch.collective_calls"])
        for span in rank_spans(log)
    ]
    assert facts == [(0, 2, 3), (0, 1, 3), (1, 2, 3)]
    counts = {
        (one["metrics"]["collective.group_size"], one["resource"]): one["metrics"]["collective.count"]
        for one in of_type(log, "summary")
    }
    assert counts == {(2, "all_reduce"): 3, (1, "all_reduce"): 3}


# One process, one life after another. `before` binds the functions before anything is patched.
LIVES = """
    from torch.distributed import destroy_process_group, init_process_group
    import os, sys, threading
    import torch, torch.distributed as dist
    import ddtrace_pytorch
    ddtrace_pytorch.patch()

    def ours():
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("ddtrace_pytorch"))

    def elsewhere(call):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    init_process_group("gloo")
    try:
        dist.init_process_group("gloo")
        sys.exit("a second init over a living group should fail")
    except (ValueError, RuntimeError):  # 2.1 raises the latter
        pass
    assert ours(), "the living group's session goes on"
    destroy_process_group(dist.group.WORLD)
    assert not ours(), ours()

    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
    subgroup = dist.new_group([0])
    dist.destroy_process_group(subgroup)
    assert ours(), "the default group is still up"
    elsewhere(dist.destroy_process_group)
    assert not ours(), ours()

    elsewhere(lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1))
    dist.destroy_process_group()
    assert not ours(), ours()

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.distributed_c10d.destroy_process_group()
    assert not ours(), ours()

    # What a process that leaves by os._exit sent is there already.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    os._exit(0)
"""


def test_each_life_of_a_process_group_is_one_span_of_one_job(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    env = alone(agent.url, DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    jobs.run([*PYTHON, jobs.script(LIVES), str(tmp_path / "store")], env).ok()
    lives = agent.ranks()
    assert reasons(lives) == ["destroyed"] * 5
    assert {span["error"] for span in lives} == {0}
    assert len({span["meta"]["training_job.id"] for span in lives}) == 1
    assert {span["meta"]["training_job.id.source"] for span in lives} == {"generated"}
    assert len({span["meta"]["pytorch.incarnation"] for span in lives}) == 5
    # On disk the same, each incarnation in a file of its own.
    on_disk = rank_spans(tmp_path / "log")
    assert [span["span_id"] for span in on_disk] == [str(span["span_id"]) for span in lives]
    assert len({span["_file"] for span in on_disk}) == 5
    assert {record["type"] for record in records(tmp_path / "log")} >= {"identity", "span"}


RENDEZVOUS = """
    import datetime, os, socket, sys
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch.distributed as dist

    def fails(*args, **kwargs):
        try:
            dist.init_process_group(*args, **kwargs)
        except Exception as error:
            print("RAISED", type(error).__module__, type(error).__qualname__, flush=True)
            return error
        sys.exit("this init should have failed")

    # The peer never comes.
    fails("gloo", rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{sys.argv[1]}",
          timeout=datetime.timedelta(seconds=1))
    # The store's port is somebody else's.
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        os.environ.update(RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(busy.getsockname()[1]))
        fails("gloo")
    # No such backend.
    fails("smoke_signals", store=dist.HashStore(), rank=0, world_size=1)
    # The user's own store raises: theirs is what they get.
    class Mine(Exception):
        pass

    mine = Mine("out of stock")

    class Store(dist.Store):
        def set(self, key, value):
            raise mine

    error = fails("gloo", store=Store(), rank=0, world_size=1)
    assert error is mine, repr(error)
    # Nobody said which rank this is.
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    fails("gloo")
    # And then it works.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
"""


def test_a_failed_rendezvous_leaves_a_span_that_says_who_and_why(agent: Agent, jobs: Jobs) -> None:
    port = free_port()
    env = environment(agent.url, TORCH_DISTRIBUTED_DEBUG="OFF")
    output = jobs.run([*PYTHON, jobs.script(RENDEZVOUS), str(port)], env).ok().stdout
    raised = re.findall(r"RAISED (\S+) (\S+)", output)
    spans = sorted(agent.spans("pytorch.rank"), key=lambda span: int(span["start"]))
    *failed, good = spans
    assert reasons(failed) == ["exception"] * 5
    assert reasons([good]) == ["destroyed"]
    assert [span["error"] for span in failed] == [1] * 5
    told = [name if module == "builtins" else f"{module}.{name}" for module, name in raised]
    assert [span["meta"]["error.type"] for span in failed] == told
    assert all(span["meta"]["error.message"] and "init_process_group" in span["meta"]["error.stack"] for span in failed)
    absent, busy, unknown_backend, mine, unknown_rank = failed
    assert (absent["metrics"]["rank"], absent["metrics"]["world_size"]) == (1, 2)
    assert (absent["meta"]["pytorch.master_addr"], absent["metrics"]["pytorch.master_port"]) == ("127.0.0.1", port)
    assert absent["meta"]["torch.distributed.backend"] == "gloo"
    assert (busy["metrics"]["rank"], busy["metrics"]["world_size"]) == (0, 3)
    assert busy["meta"]["pytorch.master_addr"] == "127.0.0.1"
    assert busy["metrics"]["pytorch.master_port"] > 0
    assert unknown_backend["meta"]["torch.distributed.backend"] == "smoke_signals"
    assert (mine["meta"]["error.type"], mine["meta"]["error.message"]) == ("__main__.Mine", "out of stock")
    assert "rank" not in unknown_rank["metrics"]
    assert "world_size" not in unknown_rank["metrics"]


ONE_PROCESS = """
    import threading
    import torch
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert not [t for t in threading.enumerate() if t.name.startswith("ddtrace_pytorch")], "before training"
    for _ in range(3):
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
"""


def test_training_in_a_single_process_has_a_span(agent: Agent, jobs: Jobs) -> None:
    env = environment(agent.url, DD_PATCH_MODULES="pytorch:true")
    jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(ONE_PROCESS)], env).ok()
    (span,) = agent.ranks()
    assert reasons([span]) == ["exit"]
    assert span["error"] == 0
    assert (span["metrics"]["rank"], span["metrics"]["world_size"]) == (0, 1)
    assert "torch.distributed.backend" not in span["meta"]
    assert span["service"] == "pytorch"


DISABLED = """
    import threading
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    print("THREADS", [t.name for t in threading.enumerate()])
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("switch", [{"DD_TRACE_ENABLED": "false"}, {"DD_PYTORCH_EXPORT": "none"}])
def test_switched_off_nothing_runs_and_nothing_is_written(
    agent: Agent, jobs: Jobs, tmp_path: Path, switch: dict[str, str]
) -> None:
    env = alone(agent.url, DD_PYTORCH_LOG_DIR=str(tmp_path / "log"), TMPDIR=str(tmp_path), **switch)
    result = jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(DISABLED)], env).ok()
    assert "ddtrace_pytorch" not in result.stdout.partition("THREADS")[2]
    assert agent.received("pytorch.rank") == []
    assert list(tmp_path.rglob("rank-*")) == []
    assert not (tmp_path / "log").exists()


EVERY_TAG = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.destroy_process_group()
"""

# What ddtrace's built-in integration tags that a job on a CPU has: text, then numbers.
TEXT = {
    "framework": "ddp",
    "component": "pytorch",
    "training_job.id": "4242",
    "job_id": "4242",
    "launcher": "torchrun",
    "torch.distributed.backend": "gloo",
    "device.id": r".+:cpu",
    "device.kind": "cpu",
    "host": ".+",
    "torch.version": r"\d+\.\d+.*",
    "torch.cudnn.enabled": "true|false",
    "torch.cudnn.benchmark": "true|false",
    "torch.cudnn.deterministic": "true|false",
    "torch.float32_matmul_precision": "highest",
    "torch.mps.available": "false",
    "nccl.debug": "WARN",
    "nccl.socket_ifname": "lo",
    "nccl.ib_disable": "1",
    "nccl.p2p_disable": "1",
    "nccl.algo": "Ring",
    "nccl.proto": "Simple",
    "nccl.async_error_handling": "1",
    "device.cuda.visible_devices": "",
    "pytorch.master_addr": ".+",
    "ray.train.run_name": "my-train",
    "ray.submission_id": "raysubmit_1",
    "ray.metadata.team": "vision",
    "debug.level": "INFO",
    # Ours beside them.
    "pytorch.attempt": "0",
    "pytorch.incarnation": r"\d{8}T\d{6}Z-[0-9a-f]{8}",
    "pytorch.node": ".+",
    "pytorch.instrument": re.escape("in_place" + HOOKS),
    "pytorch.end_reason": "destroyed",
    "training_job.id.source": "DD_PYTORCH_JOB_ID",
    "torchelastic.run_id": ".+",
}
NUMBERS = {
    "rank": {0, 1},
    "world_size": {2},
    "pytorch.master_port": None,
    "pytorch.local_rank": {0, 1},
    "pytorch.local_world_size": {2},
    "pytorch.group_rank": {0},
    "pytorch.group_world_size": {1},
    "pytorch.piece": {0},
    "_sampling_priority_v1": {2},
}


def test_every_tag_of_the_built_in_integration_is_there(agent: Agent, jobs: Jobs) -> None:
    env = environment(
        agent.url,
        DD_TRACE_PYTORCH_ENABLED="true",
        DD_PYTORCH_JOB_ID="4242",
        DD_SERVICE="from-dd-service",
        DD_ENV="staging",
        DD_VERSION="1.2.3",
        NCCL_DEBUG="WARN",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        NCCL_ALGO="Ring",
        NCCL_PROTO="Simple",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="1",
        TORCH_DISTRIBUTED_DEBUG="INFO",
        CUDA_VISIBLE_DEVICES="",
        _RAY_JOB_NAME="my-train",
        _RAY_SUBMISSION_ID="raysubmit_1",
        _DD_RAY_RUN_METADATA='{"team": "vision"}',
    )
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(EVERY_TAG)], env).ok()
    ranks = agent.ranks()
    assert [span["metrics"]["rank"] for span in ranks] == [0, 1]
    for span in ranks:
        assert span["service"] == "from-dd-service"
        assert (span["meta"]["env"], span["meta"]["version"]) == ("staging", "1.2.3")
        wrong = {
            tag: span["meta"].get(tag)
            for tag, wanted in TEXT.items()
            if tag not in span["meta"] or not re.fullmatch(wanted, span["meta"][tag])
        }
        wrong |= {
            tag: span["metrics"].get(tag)
            for tag, wanted in NUMBERS.items()
            if tag not in span["metrics"] or (wanted and span["metrics"][tag] not in wanted)
        }
        assert wrong == {}
    assert len({span["trace_id"] for span in ranks}) == 2


UNNAMED = """
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch.distributed as dist
    from ddtrace import config
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    print("INFERRED", config._inferred_base_service)
"""


def test_without_a_service_of_ones_own_it_is_never_the_inferred_one(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    env = environment(agent.url, DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    result = jobs.run([*PYTHON, jobs.script(UNNAMED, "big_model.py")], env).ok()
    assert result.stdout.split()[1] not in ("None", "pytorch"), "ddtrace infers a service here; the test is about that"
    (span,) = agent.ranks()
    assert span["service"] == "pytorch"
    assert [record["service"] for record in of_type(tmp_path / "log", "span")] == ["pytorch"]
