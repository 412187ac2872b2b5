"""Steps of real jobs: what the run log, the Agent and Datadog's native tracer hear of them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness.agent import Agent
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone, environment, torchrun
from harness.log import of_type, rank_spans
from harness.native import built
from harness.waiting import until

pytestmark = pytest.mark.dist

ON = {"DD_PATCH_MODULES": "pytorch:true"}

# Each rank waits for data (a loader), for the other (an all_reduce that rank 1 comes late to), and trains.
TRAIN = """
    import sys, time
    import torch, torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as DDP

    kind, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    net = DDP(torch.nn.Linear(4, 4))
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
    else:
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        if dist.get_rank() == 1:
            time.sleep(0.02)
        dist.all_reduce(torch.ones(1))
        optimizer.step()
    dist.destroy_process_group()
"""


def env_of(log: Path, **settings: str) -> dict[str, str]:
    return environment(None, **ON, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log), **settings)


@pytest.mark.parametrize("kind", ["SGD", "zero"])
def test_every_step_is_in_the_run_log(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(TRAIN), kind, "12"], env_of(log)).ok()
    steps = of_type(log, "step")
    for rank in (0, 1):
        of_rank = [one for one in steps if f"rank-{rank:05d}" in one["_file"]]
        assert [one["step"] for one in of_rank] == list(range(1, 13))
        assert [one["relative_step"] for one in of_rank] == list(range(1, 13))
        # One begins where the one before ended.
        assert all(a["start"] + a["duration"] == b["start"] for a, b in zip(of_rank, of_rank[1:], strict=False))
    assert [span["metrics"]["pytorch.steps"] for span in rank_spans(log)] == [12, 12]
    for summary in [one for one in of_type(log, "summary") if one["name"] == "pytorch.steps"]:
        facts = summary["metrics"]
        assert facts["pytorch.steps"] == 12
        assert facts["step.time_ms.p50"] <= facts["step.time_ms.p95"] <= facts["step.time_ms.max"]
        shares = {name: value for name, value in facts.items() if name.startswith("step.share.")}
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)
        assert summary["resource"] == "ddp"
    waited = {rank: sum(one["metrics"].get("collective_ns", 0) for one in steps if f"rank-{rank:05d}" in one["_file"])
              for rank in (0, 1)}  # fmt: skip
    assert waited[0] > waited[1]  # rank 1 is the late one


SAMPLED = """
    import time
    import torch
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(1, 61):
        net(torch.ones(2, 4)).sum().backward()
        time.sleep(0.2 if step == 33 else 0.003)
        optimizer.step()
"""


def test_one_step_in_so_many_the_slow_ones_and_the_last_have_spans(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Agent(tmp_path) as agent:
        # Slow is what takes three times as long as the steps that were told of before: a beat has to have passed.
        script = jobs.script(SAMPLED.replace("range(1, 61)", "range(1, 1_061)").replace("== 33", "== 933"))
        env = environment(agent.url, **ON, DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(log),
                          DD_PYTORCH_STEP_SAMPLE="500")  # fmt: skip
        jobs.run([*DDTRACE_RUN, *PYTHON, script], env).ok()
        spans = {int(span["metrics"]["step"]): span for span in agent.spans("pytorch.step")}
        (rank,) = agent.spans("pytorch.rank")
        (summary,) = agent.spans("pytorch.steps")
        assert agent.check_failures() == ""
    assert {500, 933, 1000, 1060} <= spans.keys()
    assert len(spans) <= 20, "others were slow on a busy machine, but not many"
    assert all((span["trace_id"], span["parent_id"]) == (rank["trace_id"], rank["span_id"]) for span in spans.values())
    slow = spans[933]
    assert slow["metrics"]["step.time_ms"] == pytest.approx(slow["duration"] / 1e6)
    assert slow["metrics"]["step.time_ms"] >= 200
    assert summary["metrics"]["pytorch.steps"] == 1060
    assert len(of_type(log, "step")) == 1060


@pytest.mark.once
@pytest.mark.parametrize(("kind", "steps"), [("SGD", 0), ("SGD", 1), ("Adam", 2), ("AdamW", 7)])
def test_the_native_tracer_is_told_of_each_step(jobs: Jobs, tmp_path: Path, kind: str, steps: int) -> None:
    tracer, signals = built("step_signals", tmp_path), tmp_path / "signals"
    place = {"LD_PRELOAD": str(tracer), "STEP_SIGNALS": str(signals), "DD_TRAINING_STEP_PROFILING": "true"}
    env = alone(tmp_path / "log", **ON, **place)
    jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(TRAIN), kind, str(steps)], env).ok()
    (file,) = tmp_path.glob("signals.*")
    assert file.read_text() == "be" * (steps + 1)


@pytest.mark.once
def test_it_is_told_nothing_unless_that_is_asked_for(jobs: Jobs, tmp_path: Path) -> None:
    place = {"LD_PRELOAD": str(built("step_signals", tmp_path)), "STEP_SIGNALS": str(tmp_path / "signals")}
    jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(TRAIN), "SGD", "3"], alone(tmp_path / "log", **ON, **place)).ok()
    assert not list(tmp_path.glob("signals.*"))


FORKED = """
    import os
    import torch
    import ddtrace_pytorch
    from torch.optim import optimizer as hooks

    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        net(torch.ones(1)).sum().backward()
        optimizer.step()

    ddtrace_pytorch.patch()
    step()
    child = os.fork()
    if not child:
        assert hooks._global_optimizer_post_hooks
        step()
        ddtrace_pytorch.unpatch()
        assert not hooks._global_optimizer_post_hooks and not hooks._global_optimizer_pre_hooks
        step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    step()
"""


@pytest.mark.once
def test_a_forked_child_gives_its_optimizers_back(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs.run([*PYTHON, jobs.script(FORKED)], alone(log)).ok()
    parents = [one for one in of_type(log, "step") if one["_file"] == rank_spans(log)[0]["_file"]]
    assert [one["step"] for one in parents] == [1, 2]


ENDLESS = """
    import signal, sys, time
    import torch
    from pathlib import Path
    if sys.argv[1] == "handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(7):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    Path("there").touch()
    while True:
        time.sleep(0.01)
"""


@pytest.mark.once
@pytest.mark.parametrize(("who", "status"), [("nobody", -signal.SIGTERM), ("handler", 7)])
def test_the_last_step_before_a_signal_is_told(jobs: Jobs, tmp_path: Path, who: str, status: int) -> None:
    log = tmp_path / "log"
    with Agent(tmp_path) as agent:
        env = environment(agent.url, **ON, DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(log))
        job = jobs.start([*DDTRACE_RUN, *PYTHON, jobs.script(ENDLESS), who], env)
        until((job.directory / "there").exists, 60, "the job has stepped")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait().returncode == status
        spans = agent.spans("pytorch.step")
    assert [(span["metrics"]["step"], "step.unfinished" in span["meta"]) for span in spans] == [(7, False), (8, True)]
    assert [one["step"] for one in of_type(log, "step")] == list(range(1, 9))


RAISES = """
    import torch
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        net(torch.ones(2, 4)).sum().backward()
        if step == 3:
            raise ValueError("no")
        optimizer.step()
"""


@pytest.mark.once
def test_the_step_that_an_exception_broke_is_told_as_such(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(RAISES)], alone(log, **ON))
    told = [(one["step"], one.get("unfinished", False)) for one in of_type(log, "step")]
    assert told == [(1, False), (2, False), (3, False), (4, True)]
    assert [one["state"]["step"] for one in of_type(log, "state")] == [4]
    assert [span["metrics"]["pytorch.steps"] for span in rank_spans(log)] == [3]


# The hook runs on a thread of torch's own, in the middle of a backward pass.
IN_A_HOOK = """
    import threading
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    threads = set()

    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value * 2

        @staticmethod
        def backward(context, gradient):
            def issue():
                threads.add(threading.get_ident())
                dist.all_reduce(gradient)
            thread = threading.Thread(target=issue)
            thread.start()
            thread.join()
            return gradient

    for batch in torch.utils.data.DataLoader(torch.ones(3)):
        Elsewhere.apply(weight).sum().backward()
        optimizer.step()
    assert threading.get_ident() not in threads
    dist.destroy_process_group()
"""


@pytest.mark.once
def test_a_collective_of_another_thread_carries_the_step(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(IN_A_HOOK)], env_of(log, DD_PYTORCH_COLLECTIVES="all")).ok()
    ranks = {span["span_id"] for span in rank_spans(log)}
    spans = [one for one in of_type(log, "span") if one["name"] == "pytorch.collective"]
    assert sorted(one["metrics"]["step"] for one in spans) == [1, 1, 2, 2, 3, 3]
    assert {one["parent_id"] for one in spans} == ranks
    calls = of_type(log, "call")
    assert calls and all(one["step"] in (1, 2, 3) for one in calls)
