"""Whose child a span is: the user's of the rank span, the rank span of Ray's, and whose sampling rules hold."""

from __future__ import annotations

import pytest
from harness.agent import Agent, Span
from harness.job import PYTHON, Jobs, environment

pytestmark = pytest.mark.dist

USER_SPANS = """
    import asyncio, concurrent.futures, threading
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch.distributed as dist
    from ddtrace.trace import tracer

    with tracer.trace("before.any.session"):
        pass
    with tracer.trace("around.the.opening") as around:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with tracer.trace("inside.the.users.own"):
            pass
    assert tracer.current_span() is None

    def work(name):
        with tracer.trace(name):
            with tracer.trace(name + ".child"):
                pass

    work("on.main")
    thread = threading.Thread(target=work, args=["on.thread"])
    thread.start()
    thread.join()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(work, ["in.pool"]))

    async def task():
        work("in.task")

    asyncio.run(task())
    for number in range(3):
        tracer.trace("wanted", resource="keep me").finish()
        tracer.trace("unwanted", resource="drop me").finish()
    dist.destroy_process_group()
    with tracer.trace("after.destroy"):
        pass
"""


def named(spans: list[Span], name: str) -> Span:
    (span,) = (span for span in spans if span["name"] == name)
    return span


def low(trace_id: int) -> int:
    return trace_id & (1 << 64) - 1


def linked(span: Span) -> list[tuple[int, int]]:
    """The (trace id, span id) of each span link, as v0.4 of the Agent's API has them (in v0.5 they are text)."""
    return [(low(int(link["trace_id"])), int(link["span_id"])) for link in span.get("span_links", [])]


def test_user_spans_of_any_thread_are_children_and_sampled_by_the_users_own_rules(agent: Agent, jobs: Jobs) -> None:
    env = environment(
        agent.url,
        DD_TRACE_SAMPLING_RULES='[{"resource": "drop me", "sample_rate": 0}, {"sample_rate": 1}]',
        DD_TRACE_API_VERSION="v0.4",
    )
    jobs.run([*PYTHON, jobs.script(USER_SPANS)], env).ok()
    spans = agent.spans()
    (rank,) = agent.ranks()
    for name in ("on.main", "on.thread", "in.pool", "in.task"):
        span, child = named(spans, name), named(spans, name + ".child")
        assert (low(span["trace_id"]), span["parent_id"]) == (low(rank["trace_id"]), rank["span_id"]), name
        assert child["parent_id"] == span["span_id"], name
    for name in ("before.any.session", "around.the.opening", "after.destroy"):
        span = named(spans, name)
        assert not span.get("parent_id"), name
        assert low(span["trace_id"]) != low(rank["trace_id"]), name
    # The span that was active stays the user's: linked to, and parent of what they start inside.
    around = named(spans, "around.the.opening")
    assert named(spans, "inside.the.users.own")["parent_id"] == around["span_id"]
    assert not rank.get("parent_id")
    assert linked(rank) == [(low(around["trace_id"]), around["span_id"])]
    # One decision for each of the user's traces, although they share the rank span's trace id.
    decisions = {
        name: {span["metrics"]["_sampling_priority_v1"] for span in spans if span["name"] == name}
        for name in ("wanted", "unwanted", "pytorch.rank")
    }
    assert all(priority > 0 for priority in decisions["wanted"] | decisions["pytorch.rank"]), decisions
    assert decisions["unwanted"], "a dropped trace still reaches the Agent, which counts it"
    assert all(priority <= 0 for priority in decisions["unwanted"]), decisions


# The spans of ddtrace's Ray integration carry its component tag, and are active on the thread that runs the task.
# Ray Train trains on another thread; there the job's span is only in the environment.
RAY = """
    import os, threading
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch.distributed as dist
    from ddtrace.trace import tracer

    def train():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        thread = threading.Thread(target=lambda: tracer.trace("on.thread").finish())
        thread.start()
        thread.join()
        dist.destroy_process_group()

    with tracer.trace("task.execute", service="my-ray-job") as task:
        task.set_tag("component", "ray")
        train()
        with tracer.trace("users.own"):
            train()
    os.environ["traceparent"] = "00-0000000000000000000000000000abcd-0000000000001234-01"
    train()
    os.environ["_RAY_SUBMISSION_ID"] = "raysubmit_1"
    train()
"""


def test_under_ray_the_rank_span_is_a_child_of_rays(agent: Agent, jobs: Jobs) -> None:
    jobs.run([*PYTHON, jobs.script(RAY)], environment(agent.url, DD_TRACE_API_VERSION="v0.4")).ok()
    spans = agent.spans()
    task, users = named(spans, "task.execute"), named(spans, "users.own")
    in_task, in_users, not_ray, by_environment = agent.ranks()
    assert (low(in_task["trace_id"]), in_task["parent_id"]) == (low(task["trace_id"]), task["span_id"])
    assert linked(in_task) == []
    assert (low(in_users["trace_id"]), in_users["parent_id"]) == (low(task["trace_id"]), task["span_id"])
    assert linked(in_users) == [(low(users["trace_id"]), users["span_id"])]
    assert not not_ray.get("parent_id"), "a traceparent alone is no sign of Ray"
    assert (low(by_environment["trace_id"]), by_environment["parent_id"]) == (0xABCD, 0x1234)
    assert by_environment["meta"]["ray.submission_id"] == "raysubmit_1"
    children = [span for span in spans if span["name"] == "on.thread"]
    assert [child["parent_id"] for child in children] == [
        span["span_id"] for span in (in_task, in_users, not_ray, by_environment)
    ]
