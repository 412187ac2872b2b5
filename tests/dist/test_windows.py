"""Profiler windows of real ranks, with what a CPU does in them: on a schedule, by hand, and beside the user's own."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness.agent import Agent
from harness.job import BIN, DDTRACE_RUN, PYTHON, Jobs, alone, environment, torchrun
from harness.log import of_type
from harness.waiting import until

pytestmark = [pytest.mark.dist, pytest.mark.once]

RANKS = """
    import glob, os, time
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.profiler import record_function
    import ddtrace_pytorch

    dist.init_process_group("gloo")
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    net = DDP(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # Resumed in the midst of what would have been a window.
    for step in range(11, 33):
        ddtrace_pytorch.set_step(step)
        with record_function(f"own range {step}"):
            time.sleep(0.02 * dist.get_rank())  # the second rank is late
            net(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        deadline = time.monotonic() + 30
        mine = f"{os.environ['DD_PYTORCH_LOG_DIR']}/*/*/profiles/rank-{dist.get_rank():05d}*"
        while step == 25 and not glob.glob(mine) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not torch.autograd.profiler._is_profiler_enabled
    dist.destroy_process_group()
"""


def ranges(path: str) -> list[str]:
    """The user's own ranges in a trace, by their start."""
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    mine = [one for one in events if one["ph"] == "X" and one["name"].startswith("own range")]
    return [one["name"] for one in sorted(mine, key=lambda one: float(one["ts"]))]


def test_each_rank_takes_the_same_steps(jobs: Jobs, tmp_path: Path, agent: Agent) -> None:
    log = tmp_path / "log"
    env = environment(
        agent.url,
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="both",
        DD_PYTORCH_LOG_DIR=str(log),
        DD_PYTORCH_STEP_SAMPLE="0",
        DD_PYTORCH_PROFILE_EVERY="10",
        DD_PYTORCH_PROFILE_ACTIVE="2",
    )
    result = jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(RANKS)], env).ok()
    assert "profiler_st" not in result.stderr
    assert "WARNING ddtrace_pytorch" not in result.stderr
    told = of_type(log, "profile")
    assert [(one["step"], one["steps"], one["state"], one["how"]) for one in told] == 2 * [
        (20, 2, "complete", "schedule"), (30, 2, "complete", "schedule"),
    ]  # fmt: skip
    folder = next(log.glob("*/*/profiles"))
    names = [f"rank-0000{rank}_dp{rank}_step-0000{step}.json.gz" for rank in (0, 1) for step in (20, 30)]
    assert sorted(path.name for path in folder.iterdir()) == names
    for one, name in zip(told, names, strict=True):
        assert one["path"] == str(folder / name)
        assert one["bytes"] == (folder / name).stat().st_size
        assert ranges(one["path"]) == [f"own range {step}" for step in (one["step"], one["step"] + 1)]
        trace = json.loads(gzip.decompress(Path(one["path"]).read_bytes()))
        assert trace["distributedInfo"] == {"rank": int(name[9]), "world_size": 2, "backend": "gloo"}
        assert one["metrics"]["communication_calls"] == 2
        assert 0 < one["metrics"]["communication_ms"] <= one["metrics"]["busy_ms"] <= one["duration"] / 1e6
        assert {"aten::addmm", "gloo:all_reduce"} <= {kernel["name"] for kernel in one["kernels"]}
    _as_spans(agent, told)
    steps = of_type(log, "step")
    assert {one["step"] for one in steps if "profile" in one.get("tags", ())} == {20, 21, 30, 31}
    report = jobs.run([str(BIN / "ddtrace-pytorch"), "report", str(log)], environment(None)).ok().stdout
    assert "Profiler windows" in report
    assert "note:" not in report
    assert "rank 1 is late: in 2 profiler windows, collectives took" in report
    assert "can't be told" not in report


def _as_spans(agent: Agent, told: list[dict[str, Any]]) -> None:
    windows, kernels = agent.spans("pytorch.profile"), agent.spans("pytorch.kernel")
    steps = {one["span_id"]: one for one in agent.spans("pytorch.step")}
    assert sorted(one["meta"]["profile.path"] for one in windows) == sorted(one["path"] for one in told)
    for one in windows:
        around = steps[one["parent_id"]]
        assert (around["metrics"]["step"], around["trace_id"]) == (one["metrics"]["step"], one["trace_id"])
        mine = [kernel for kernel in kernels if kernel["parent_id"] == one["span_id"]]
        assert 40 < len(mine) <= 50
        assert all(one["start"] <= kernel["start"] < one["start"] + one["duration"] for kernel in mine)
        assert 0 < one["metrics"]["profile.busy_share"] < 1
        assert json.loads(one["meta"]["profile.top"])
    assert {rank["metrics"]["pytorch.profile.windows"] for rank in agent.ranks()} == {2}


# What it says is what the user's own profilers have seen.
BESIDE = """
    import glob, json, os, time
    import torch, torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function, schedule
    import ddtrace_pytorch

    dist.init_process_group("gloo")
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen, number = {}, 0

    def train(steps, then=lambda: None):
        global number
        for _ in range(steps):
            number += 1
            ddtrace_pytorch.set_step(number)
            net(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            then()

    def keep(name, events):
        counts = {}
        for event in events:
            counts[event.name] = counts.get(event.name, 0) + 1
        seen[name] = counts

    def written(traces):
        deadline = time.monotonic() + 30
        while "DD_PYTORCH_PROFILE_EVERY" in os.environ and time.monotonic() < deadline:
            if len(glob.glob(os.environ["DD_PYTORCH_LOG_DIR"] + "/*/*/profiles/*.gz")) == traces:
                break
            time.sleep(0.01)

    CPU = [ProfilerActivity.CPU]
    # Ours are due at each multiple of 6, warm up for 2 steps, and take 3.
    train(4)  # ours warms up
    # It waits in steps 5 to 12, warms up from 13 to 18 and records from 19 to 25.
    plan = schedule(wait=8, warmup=6, active=7, repeat=1)
    with profile(activities=CPU, schedule=plan, on_trace_ready=lambda one: keep("scheduled", one.events())) as one:
        train(22, one.step)
    train(7)  # 33: ours has recorded
    written(1)
    train(2)  # 35: ours warms up
    with profile(activities=CPU) as one:
        train(1)
    keep("while ours warms up", one.events())
    train(7)  # 43: ours records
    one = torch.autograd.profiler.profile(use_kineto=True)
    with record_function("opened in ours, closed in mine"):
        net(torch.ones(8, 64))
        one.__enter__()
        net(torch.ones(8, 64))
    net(torch.ones(8, 64))
    one.__exit__(None, None, None)
    keep("while ours records", one.function_events)
    train(6)  # 49: ours records
    child = os.fork()
    if child == 0:
        os._exit(torch._C._autograd._profiler_enabled())
    seen["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    written(2)
    train(2)  # 51
    with ddtrace_pytorch.profile_window():
        net(torch.ones(8, 64))
        net(torch.ones(8, 64))
    written(3)
    train(4)  # 55: one more recorded, and the end comes in the midst of it
    print(json.dumps(seen))
"""


def test_the_users_own_profilers_see_what_they_see_without_us(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ours = {"DD_PYTORCH_PROFILE_EVERY": "6", "DD_PYTORCH_PROFILE_WARMUP": "2", "DD_PYTORCH_PROFILE_ACTIVE": "3"}
    script = jobs.script(BESIDE)
    runs = [
        jobs.start([*DDTRACE_RUN, *PYTHON, script], alone(tmp_path / name, DD_PATCH_MODULES="pytorch:true", **more))
        for name, more in (("without", {}), ("log", ours))
    ]
    without, beside = (json.loads(run.wait().ok().stdout) for run in runs)
    assert beside == without
    assert without["child"] == 0
    assert without["scheduled"]["Optimizer.step#SGD.step"] == 7
    told = sorted(of_type(log, "profile"), key=lambda one: int(one["step"]))
    yours = "a profiler of yours"
    assert [(one["step"], one["state"], one.get("why", "")) for one in told if one["how"] == "schedule"] == [
        (6, "abandoned", f"{yours} began"),
        (12, "skipped", f"{yours} is there, or a range that was opened in one"),
        (18, "skipped", f"{yours} is there, or a range that was opened in one"),
        (24, "skipped", f"{yours} is there, or a range that was opened in one"),
        (30, "complete", ""),
        (36, "abandoned", f"{yours} began"),
        (42, "abandoned", f"{yours} began"),
        (48, "cut short", "the process forked"),
        (54, "cut short", "the session ended"),
    ]
    assert not [one for one in of_type(tmp_path / "without", "profile") if one["how"] == "schedule"]
    [mine] = [one for one in told if one["how"] == "by hand"]
    assert (mine["step"], mine["state"]) == (51, "complete")
    assert Counter({one["name"]: one["count"] for one in mine["kernels"]})["aten::addmm"] == 2


# Trains until there is a trace, and nothing but run logs and traces.
UNTIL_ASKED = """
    import glob, os, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = os.environ["DD_PYTORCH_LOG_DIR"] + "/*/*/"
    deadline = time.monotonic() + 60
    while (not glob.glob(run + "profiles/*.gz") or glob.glob(run + "*.json")) and time.monotonic() < deadline:
        net(torch.ones(8, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.005)
"""


def test_a_window_is_had_for_the_asking(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = jobs.start([*DDTRACE_RUN, *PYTHON, jobs.script(UNTIL_ASKED)], alone(log, DD_PATCH_MODULES="pytorch:true"))
    until(lambda: len(of_type(log, "step")) > 10, 60, "the job trains")
    asked = jobs.run([str(BIN / "ddtrace-pytorch"), "profile", str(log), "--steps", "3"], environment(None)).ok()
    assert asked.stdout.startswith("Asked rank 0 for steps ")
    assert job.wait().ok().stderr == ""
    [told] = of_type(log, "profile")
    assert f"steps {told['step']} to {told['step'] + 2}." in asked.stdout
    assert (told["how"], told["state"], told["steps"]) == ("asked", "complete", 3)
    assert next(one["count"] for one in told["kernels"] if one["name"] == "aten::addmm") == 3
    assert not list(log.rglob("*.json"))
    again = jobs.run([str(BIN / "ddtrace-pytorch"), "profile", str(log)], environment(None))
    assert (again.returncode, "has ended" in again.stderr) == (2, True)
