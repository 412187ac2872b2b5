"""Rotation and snapshots of the rank span: under fire, no gap, no overlap, no lost tag, no orphan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from harness.agent import Agent, Span, is_snapshot, version
from harness.job import DDTRACE_RUN, PYTHON, Jobs, environment
from harness.native import built
from harness.waiting import until

pytestmark = pytest.mark.dist

REPEATS = 50

# One process, one real gloo group after the other; each life is one repeat.
UNDER_FIRE = """
    import os, sys, threading, time
    import torch, torch.distributed as dist
    from ddtrace import tracer
    from ddtrace_pytorch import instrumentation
    from ddtrace_pytorch.training.frameworks import Use

    USES = [Use("ddp", ("ddp",)), Use("fsdp", ("fsdp",)), Use("tp", ("tp",), "lightning")]

    repeats, seconds = int(sys.argv[1]), float(sys.argv[2])

    def fire(stop, number, life):
        lifecycle = instrumentation._switched_on.lifecycle
        while not stop.is_set():
            with tracer.trace("fire.parent", resource=f"{life}") as parent:
                with tracer.trace("fire.child", resource=f"{life}"):
                    lifecycle.used(USES[number % 3])
            time.sleep(0.002)

    for life in range(repeats):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stop = threading.Event()
        threads = [threading.Thread(target=fire, args=(stop, number, life)) for number in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()
        dist.destroy_process_group()
        print("life", life, flush=True)
"""


def lives(pieces: list[Span]) -> Iterator[list[Span]]:
    """The pieces of each session, in order."""
    by_incarnation: dict[str, list[Span]] = {}
    for piece in sorted(pieces, key=lambda span: int(span["start"])):
        by_incarnation.setdefault(piece["meta"]["pytorch.incarnation"], []).append(piece)
    yield from by_incarnation.values()


def links(span: Span) -> list[tuple[int, int]]:
    """(low 64 bits of the trace id, span id) of each link."""
    return [(int(link["trace_id"]), int(link["span_id"])) for link in span.get("span_links") or []]


def heard(calls: Path) -> list[list[tuple[int, int]]]:
    """By life, which spans the native tracer was told of: (low 64 bits of the trace id, span id)."""
    lives: list[list[tuple[int, int]]] = [[]]
    for call, *told in (line.split("\t") for line in calls.read_text(encoding="utf-8").splitlines()):
        if call == "clear":
            lives.append([])
        elif call == "set":
            lives[-1].append((int(told[0], 16), int(told[2], 16)))
    assert lives.pop() == []
    return lives


def test_pieces_are_contiguous_and_every_childs_parent_arrives(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    env = environment(
        agent.url,
        LD_PRELOAD=str(built("parent_context", tmp_path, "-pthread")),
        PARENT_CONTEXT=str(tmp_path / "calls"),
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="agent",
        DD_PYTORCH_ROTATION_SECONDS="0.05",
        DD_TRACE_API_VERSION="v0.4",
    )
    script = jobs.script(UNDER_FIRE)
    jobs.run([*DDTRACE_RUN, *PYTHON, script, str(REPEATS), "0.3"], env, timeout=110).ok()
    everything = agent.spans()
    pieces = [span for span in everything if span["name"] == "pytorch.rank"]
    sessions = list(lives(pieces))
    assert len(sessions) == REPEATS
    for session in sessions:
        assert [piece["metrics"]["pytorch.piece"] for piece in session] == list(range(len(session)))
        assert len(session) >= 3
        for earlier, later in pairwise(session):
            assert earlier["start"] + earlier["duration"] == later["start"]
            assert links(later) == [(earlier["trace_id"], earlier["span_id"])]
            assert later["trace_id"] != earlier["trace_id"]
        assert all(piece["metrics"]["_dd.was_long_running"] == 1 for piece in session)
        # fsdp is the stronger of the two words being set: once there, it stays on every later piece.
        words = [piece["meta"]["framework"] for piece in session]
        assert words == sorted(words, key=["none", "ddp", "fsdp"].index)
        assert words[-1] == "fsdp"
        kinds = [piece["meta"].get("pytorch.parallelism", "") for piece in session]
        assert kinds == sorted(kinds, key=len)
        assert kinds[-1] == "ddp+fsdp+tp"
        assert session[-1]["meta"]["pytorch.trainer"] == "lightning"
        assert [piece["meta"].get("pytorch.end_reason") for piece in session] == [None] * (len(session) - 1) + [
            "destroyed"
        ]
        first, *rest = ({**piece["meta"]} for piece in session)
        for tags in rest:
            assert first.keys() <= tags.keys()

    # The native tracer was told of each piece before the one that came before it ended, and of none after the last.
    [calls] = tmp_path.glob("calls.*")
    told = [list(dict.fromkeys(life)) for life in heard(calls)]
    assert told == [[(piece["trace_id"], piece["span_id"]) for piece in session] for session in sessions]

    ids = {span["span_id"]: span for span in everything}
    parents = [span for span in everything if span["name"] == "fire.parent"]
    children = [span for span in everything if span["name"] == "fire.child"]
    assert len(parents) == len(children) > REPEATS * 100
    for span in (*parents, *children):
        parent = ids[span["parent_id"]]
        assert parent["name"] == ("pytorch.rank" if span["name"] == "fire.parent" else "fire.parent")
        assert parent["trace_id"] == span["trace_id"]


SLEEPER = """
    import sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_rotated_piece_is_at_the_agent_within_two_seconds_while_the_job_sleeps(agent: Agent, jobs: Jobs) -> None:
    env = environment(
        agent.url, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="agent", DD_PYTORCH_ROTATION_SECONDS="3"
    )
    jobs.start([*DDTRACE_RUN, *PYTHON, jobs.script(SLEEPER)], env)
    until(agent.ranks, 60, "the first piece")
    [piece] = agent.ranks()
    lateness = time.time() - (piece["start"] + piece["duration"]) / 1e9
    assert lateness < 2.0


def test_an_open_span_is_sent_as_a_snapshot_and_survives_sigkill(agent: Agent, jobs: Jobs) -> None:
    env = environment(
        agent.url, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="agent", DD_PYTORCH_SNAPSHOT_SECONDS="1"
    )
    job = jobs.start([*DDTRACE_RUN, *PYTHON, jobs.script(SLEEPER)], env)
    until(lambda: len(agent.received("pytorch.rank")) >= 3, 60, "three snapshots")
    job.kill()
    snapshots = sorted(agent.received("pytorch.rank"), key=version)
    assert all(is_snapshot(span) for span in snapshots)
    assert len({(span["trace_id"], span["span_id"], span["start"]) for span in snapshots}) == 1
    assert [span["duration"] for span in snapshots] == sorted(span["duration"] for span in snapshots)


def test_durations_do_not_follow_the_wall_clock(tmp_path: Path) -> None:
    from ddtrace_pytorch.rank_span import RankSpan
    from ddtrace_pytorch.spans import End

    span = RankSpan(service="s", rank=0, start=1_000, facts={})
    first = span.rotate(5_000)
    second = span.rotate(5_000)
    last = span.finish(4_000, End("destroyed"))  # a clock that went back must not give a negative duration
    assert (first.start, first.duration) == (1_000, 4_000)
    assert (second.start, second.duration) == (5_000, 0)
    assert (last.start, last.duration) == (5_000, 0)
