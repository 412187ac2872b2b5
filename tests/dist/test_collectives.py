"""What a job's collectives look like at a real Agent and in the run log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.agent import Agent
from harness.job import DDTRACE_RUN, PYTHON, Job, Jobs, alone, environment, torchrun
from harness.log import of_type, rank_spans
from harness.waiting import until

pytestmark = pytest.mark.dist

TRAIN = """
    import os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = dist.new_group([0])
    tensor = torch.ones(256)
    for _ in range(5):
        dist.all_reduce(tensor)  # LINE
    for _ in range(3):
        dist.all_reduce(tensor, async_op=True).wait()
    dist.all_gather([torch.empty(256), torch.empty(256)], tensor)
    dist.broadcast(torch.ones(1), src=0, group=first)
    if rank == 1:
        time.sleep(0.3)
    dist.barrier()  # SLOW
    dist.destroy_process_group()
"""


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(TRAIN.splitlines(), 1) if mark in line)


def train(jobs: Jobs, agent: Agent | None, log: Path, **settings: str) -> Any:
    env = environment(
        agent.url if agent else None,
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="both",
        DD_PYTORCH_LOG_DIR=str(log),
        **settings,
    )
    return jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(TRAIN)], env).ok()


def summary(spans: list[Any], rank_id: int, operation: str, **tags: str) -> Any:
    (found,) = [
        span
        for span in spans
        if span["resource"] == operation
        and span["parent_id"] == rank_id
        and all(span["meta"][f"collective.{name.rstrip('_')}"] == value for name, value in tags.items())
    ]
    return found


def test_totals_and_slow_calls_of_each_rank(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    train(jobs, agent, log, DD_PYTORCH_SLOW_MS="150")
    script = str(tmp_path / "train.py")
    ranks = agent.ranks()
    spans = agent.spans("pytorch.collectives")
    for number, rank in enumerate(ranks):
        mine = rank["span_id"]
        assert rank["metrics"]["pytorch.collective_calls"] == (11 if number == 0 else 10)

        reduced = summary(spans, mine, "all_reduce", async_="false")
        assert reduced["service"] == "pytorch"
        assert reduced["trace_id"] == rank["trace_id"]
        assert reduced["meta"]["collective.group"] == "world"
        assert reduced["meta"]["collective.backend"] == "gloo"
        assert reduced["meta"]["collective.time_source"] == "completion"
        assert reduced["meta"]["collective.slowest_at"] == f"{script}:{line_of('LINE')}"
        metrics = reduced["metrics"]
        assert metrics["collective.count"] == 5
        assert metrics["collective.bytes"] == 5 * 1024
        assert metrics["collective.group_launched"] == metrics["collective.group_seen"] == 10
        assert metrics["collective.group_coverage"] == 1
        times = [metrics[f"collective.time_ms.{name}"] for name in ("p50", "p95", "p99", "max", "total")]
        assert 0 < times[0] and times == sorted(times)
        assert metrics["collective.busbw_gbps"] == pytest.approx(metrics["collective.algbw_gbps"])  # 2 (n-1) / n
        assert metrics["collective.algbw_gbps"] == pytest.approx(5 * 1024 / (times[-1] * 1e6))

        issued = summary(spans, mine, "all_reduce", async_="true")
        assert issued["metrics"]["collective.count"] == issued["metrics"]["collective.waits"] == 3
        assert issued["metrics"]["collective.wait_ms.total"] > 0
        assert issued["meta"]["collective.time_source"] == "issue"
        assert "collective.algbw_gbps" not in issued["metrics"]

        gathered = summary(spans, mine, "all_gather")
        assert gathered["metrics"]["collective.bytes"] == 2048
        assert gathered["metrics"]["collective.busbw_gbps"] == pytest.approx(
            gathered["metrics"]["collective.algbw_gbps"] / 2
        )
        assert "collective.algbw_gbps" not in summary(spans, mine, "barrier")["metrics"]

    assert summary(spans, ranks[0]["span_id"], "broadcast")["metrics"]["collective.group_size"] == 1
    assert not [one for one in spans if one["resource"] == "broadcast" and one["parent_id"] == ranks[1]["span_id"]]

    # Rank 0 waited for rank 1 at the barrier.
    (slow,) = [one for one in agent.spans("pytorch.collective") if one["resource"] == "barrier"]
    assert slow["parent_id"] == ranks[0]["span_id"]
    assert slow["meta"]["collective.at"] == f"{script}:{line_of('SLOW')}"
    assert slow["metrics"]["collective.time_ms"] > 150
    assert slow["duration"] == pytest.approx(slow["metrics"]["collective.time_ms"] * 1e6, rel=0.01)
    assert slow["metrics"]["collective.seq"] == 10


@pytest.mark.once
def test_the_run_log_has_the_totals_and_the_same_sampled_calls_on_every_rank(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    train(jobs, None, log)
    totals = of_type(log, "summary")
    reduced = [one for one in totals if one["resource"] == "all_reduce" and one["how"] == "waited"]
    assert [one["metrics"]["collective.count"] for one in reduced] == [5, 5]
    assert all(sum(one["buckets"].values()) == 5 for one in reduced)
    calls: dict[str, dict[tuple[str, int], str]] = {}
    for call in of_type(log, "call"):
        calls.setdefault(Path(call["_file"]).name, {})[call["group"], call["key"]] = call["op"]
        assert call["ts"] == call["start"] + call["duration"]
    (one, other) = calls.values()
    shared = one.keys() & other.keys()
    assert len(shared) == 10
    assert {key: one[key] for key in shared} == {key: other[key] for key in shared}


@pytest.mark.once
def test_each_call_has_a_span_if_asked_for(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    train(jobs, agent, tmp_path / "log", DD_PYTORCH_COLLECTIVES="all")
    assert len(agent.spans("pytorch.collective")) == 11 + 10
    one = agent.spans("pytorch.collective")[0]
    assert one["meta"]["collective.op"] == "all_reduce"
    assert one["metrics"]["collective.bytes"] == 1024
    assert one["metrics"]["collective.seq"] == 1


def test_off_means_that_nothing_is_instrumented(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    train(jobs, agent, tmp_path / "log", DD_PYTORCH_COLLECTIVES="off")
    assert len(agent.ranks()) == 2
    assert not agent.spans("pytorch.collectives")
    assert not of_type(tmp_path / "log", "summary")
    assert not of_type(tmp_path / "log", "call")


@pytest.mark.once
def test_a_word_that_is_none_of_them_costs_one_warning_that_names_them(jobs: Jobs, tmp_path: Path) -> None:
    result = train(jobs, None, tmp_path / "log", DD_PYTORCH_COLLECTIVES="banana")
    warning = "DD_PYTORCH_COLLECTIVES='banana' is not one of summary, crossnode, all, off; using 'summary'"
    assert result.stderr.count(warning) == 1, "from the first rank of the host"
    assert of_type(tmp_path / "log", "summary")


def test_totals_are_told_while_the_job_runs(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    script = """
        import os
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.ones(1)
        while not os.path.exists("stop"):
            dist.all_reduce(tensor)
            here = torch.tensor([os.path.exists("stop")], dtype=torch.float)
            dist.broadcast(here, src=0)
            if here.item():
                break
        dist.destroy_process_group()
    """
    env = environment(agent.url, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_SUMMARY_SECONDS="0.5")
    job: Job = jobs.start([*DDTRACE_RUN, *torchrun(1), jobs.script(script)], env)

    def summaries() -> list[Any]:
        return [one for one in agent.spans("pytorch.collectives") if one["resource"] == "all_reduce"]

    until(lambda: len(summaries()) >= 3, 90, "three summaries have arrived")
    (job.directory / "stop").touch()
    job.wait().ok()
    spans = summaries()
    for one, following in zip(spans, spans[1:], strict=False):
        assert one["start"] + one["duration"] == following["start"], "no call is left out or told twice"
    assert all(one["metrics"]["collective.count"] > 0 for one in spans)


@pytest.mark.once
def test_groups_that_come_and_go_by_the_hundred_are_told_and_forgotten_before_the_next_summary(
    jobs: Jobs, tmp_path: Path
) -> None:
    script = """
        import gc, time
        import torch
        import torch.distributed as dist
        from ddtrace_pytorch.ledger import Group

        dist.init_process_group("gloo")
        for _ in range(300):
            group = dist.new_group([0])
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
        del group
        deadline = time.monotonic() + 20
        while (held := sum(type(one) is Group for one in gc.get_objects())) > 150 and time.monotonic() < deadline:
            time.sleep(0.1)
        print(held)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    """
    env = alone(tmp_path / "log", DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_SUMMARY_SECONDS="3600")
    result = jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(script)], env).ok()
    assert int(result.stdout) <= 150
    summaries = of_type(tmp_path / "log", "summary")
    assert {one["resource"] for one in summaries} == {"all_reduce"}, "the making of a group is not counted"
    told = [one["metrics"] for one in summaries]
    assert (len(told), sum(one["collective.count"] for one in told)) == (301, 301)
    (span,) = rank_spans(tmp_path / "log")
    assert span["metrics"]["pytorch.collective_calls"] == 301


@pytest.mark.once
def test_a_terminated_rank_has_told_its_totals(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = """
        import time
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        while True:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.05)
    """
    env = environment(
        agent.url, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(log)
    )
    job = jobs.start([*DDTRACE_RUN, *torchrun(2), jobs.script(script)], env)

    def both_called() -> bool:
        return len({beat["_file"] for beat in of_type(log, "beat") if beat.get("calls")}) == 2

    until(both_called, 60, "both ranks have made calls")
    job.process.terminate()
    job.wait()
    told = [one for one in of_type(log, "summary") if one["resource"] == "all_reduce"]
    assert len({one["_file"] for one in told}) == 2
    ranks = agent.ranks()
    assert [rank["meta"]["pytorch.end_reason"] for rank in ranks] == ["signal:SIGTERM"] * 2
    spans = [one for one in agent.spans("pytorch.collectives") if one["resource"] == "all_reduce"]
    assert {one["parent_id"] for one in spans} == {rank["span_id"] for rank in ranks}
    for one in spans:
        assert one["metrics"]["collective.count"] > 0


# Rank 0 tries what torch refuses between the calls that both make. Then, on another group, it waits in vain.
FAILURES = """
    from datetime import timedelta
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    world, absent = dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(seconds=1))
    tensor = torch.ones(4)
    begins = {group: group._get_sequence_number_for_group() for group in (world, absent)}

    def counted(group):
        return group._get_sequence_number_for_group() - begins[group]

    def raises(call):
        try:
            call()
        except Exception:
            return
        raise SystemExit("it should have raised")

    dist.all_reduce(tensor)
    if rank == 0:
        raises(lambda: dist.all_reduce([1]))
        raises(lambda: dist.broadcast(tensor, 7))
        raises(lambda: dist.all_gather([torch.ones(4)], tensor))
        raises(lambda: dist.all_gather_object([None, None], lambda: 0))
    dist.all_gather([torch.ones(4), torch.ones(4)], tensor)
    if rank == 0:
        raises(lambda: dist.all_reduce_coalesced([tensor, 3]))
    dist.barrier()
    assert counted(world) == 3, "torch counts none that it refuses"

    if rank == 0:
        raises(lambda: dist.all_reduce(tensor, group=absent))
        assert counted(absent) == 1, "but it counts one that fails on its way"
        store.set("gave up", "1")
    else:
        store.wait(["gave up"])
    raises(lambda: dist.all_reduce(tensor, group=absent))  # and nothing works after that
    store.set(f"done {rank}", "1")
    store.wait(["done 0", "done 1"])
    dist.destroy_process_group()
"""


def test_calls_that_raised_have_no_number_so_ranks_still_agree_on_the_others(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = environment(None, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log))
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(FAILURES)], env).ok()
    for rank in (0, 1):
        mine = [one for one in of_type(log, "call") if f"rank-{rank:05}" in one["_file"]]
        assert [(one["op"], one["key"]) for one in mine] == [
            ("all_reduce", 1),
            ("all_gather", 2),
            ("barrier", 3),
        ]
