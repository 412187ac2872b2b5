"""Ranks that end without a word: what is left of them, and who tells it, once and only of the dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.agent import Agent, Span, is_snapshot
from harness.hosts import Host
from harness.job import DDTRACE_RUN, PYTHON, Job, Jobs, environment, torchrun
from harness.log import of_type, rank_spans
from harness.waiting import until

from ddtrace_pytorch.stalls import last_words, places, state_file
from ddtrace_pytorch.stalls.last_words import LastWords
from ddtrace_pytorch.stalls.recovery import Fate, recover

pytestmark = pytest.mark.faults

RECOVER = (*PYTHON, "-m", "ddtrace_pytorch.cli.main", "recover")
BEAT_NS = 10**9
# What a loaded machine adds to a beat.
SLACK_NS = 10**9


def states(place: Path) -> dict[int, LastWords]:
    """What can be read of every rank that has a state below `place`, by rank."""
    found = {}
    for path in sorted(place.rglob("*.state")):
        text, _ = state_file.read(str(path))
        if text is not None:
            words = last_words.decode(text)
            found[words.identity.rank] = words
    return found


def ids(span: Span | dict[str, Any]) -> tuple[int, int]:
    """The Agent has the lower half of a trace's id."""
    trace = span["trace_id"]
    return (int(trace, 16) if isinstance(trace, str) else trace) % 2**64, int(span["span_id"])


# Each rank but 0 ends in its own way as soon as the test has read what it keeps; rank 0 waits for them in vain.
FOUR_WAYS = """
    import os, signal, sys, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    rank, go = dist.get_rank(), os.environ["GO"]
    for _ in range(100):
        dist.all_reduce(torch.ones(1))
    if rank == 1 and not os.fork():
        while not os.path.exists(go + ".over"):
            time.sleep(0.05)  # a worker that outlives its rank
        os._exit(0)
    if rank:
        while not os.path.exists(go):
            time.sleep(0.01)
        open(f"{go}.{rank}", "w").write(str(time.time_ns()))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        os._exit(1)
    if rank == 3:
        os.abort()
    dist.all_reduce(torch.ones(1))
    time.sleep(60)
"""


class Dead:
    """A job of four whose ranks 1 to 3 are dead, and what was read while they lived."""

    def __init__(self, agent: Agent, jobs: Jobs, directory: Path) -> None:
        self.place, self.log = directory / "state", directory / "log"
        go = directory / "go"
        self.over = directory / "go.over"
        self.env = environment(
            agent.url,
            DD_PATCH_MODULES="pytorch:true",
            DD_PYTORCH_EXPORT="both",
            DD_PYTORCH_LOG_DIR=str(self.log),
            DD_PYTORCH_STATE_DIR=str(self.place),
            DD_PYTORCH_SNAPSHOT_SECONDS="0.5",
            DD_PYTORCH_JOB_ID="night run",
            DD_ENV="prod",
            GO=str(go),
        )
        job = jobs.start([*DDTRACE_RUN, *torchrun(4, "--monitor-interval=3"), jobs.script(FOUR_WAYS)], self.env)
        until(self._all_counted, 60, "all ranks keep that they have entered 100 collectives")
        until(lambda: len(agent.spans("pytorch.rank")) == 4, 30, "the Agent has a snapshot of every rank")
        self.alive = states(self.place)
        go.touch()
        self.result = job.wait()
        self.died = {rank: int((directory / f"go.{rank}").read_text()) for rank in (1, 2, 3)}

    def _all_counted(self) -> bool:
        found = states(self.place)
        return len(found) == 4 and all(
            group.completed == 100 for words in found.values() for group in words.state.groups.values()
        )


@pytest.fixture(scope="module")
def dead(shared_agent: Agent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dead]:
    directory = tmp_path_factory.mktemp("dead")
    shared_agent.clear()
    jobs = Jobs(directory)
    try:
        found = Dead(shared_agent, jobs, directory)
        yield found
    finally:
        (directory / "go.over").touch()
        jobs.end()


def test_of_a_rank_that_ends_without_a_word_no_more_than_a_beat_is_lost(dead: Dead) -> None:
    assert dead.result.returncode != 0
    left = states(dead.place)
    own = left.pop(0)
    assert own.told, "rank 0 was ended by SIGTERM and told that itself; it stays for others to see where it was"
    assert sorted(left) == [1, 2, 3]
    assert not any(words.told for words in left.values())
    for rank, words in left.items():
        assert 0 <= dead.died[rank] - words.state.as_of < BEAT_NS + SLACK_NS
        (world,) = words.state.groups.values()
        assert (world.label, world.ranks, world.entered, world.completed) == ("world", (0, 1, 2, 3), 100, 100)
        assert words.state.doing == "user"
        assert any("train.py" in frame for frame in words.state.frames)


def test_the_operation_that_a_rank_was_in_is_readable_from_disk_while_it_waits(dead: Dead) -> None:
    (world,) = dead.alive[0].state.groups.values()
    assert world.current is not None
    assert (world.current.operation, world.current.key, world.entered) == ("all_reduce", 101, 101)
    assert dead.alive[0].was_in() == "all_reduce on world"


def test_fifty_recoveries_at_once_tell_of_each_dead_rank_once(dead: Dead, shared_agent: Agent) -> None:
    running = [
        subprocess.Popen(
            [*RECOVER, str(dead.log)], env=dead.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(50)
    ]
    said = [one.communicate(timeout=90) for one in running]
    assert {one.returncode for one in running} == {0}, said
    told = [line.split() for out, _ in said for line in out.splitlines() if line.split()[-1:] == ["told"]]
    assert sorted(words[0] for words in told) == ["1", "2", "3"]
    assert all("killed" in words for words in told)

    final = [span for span in shared_agent.received("pytorch.rank") if not is_snapshot(span)]
    zero, *killed = sorted(final, key=lambda span: span["metrics"]["rank"])
    assert (zero["metrics"]["rank"], zero["meta"]["pytorch.end_reason"]) == (0, "signal:SIGTERM")
    assert [span["metrics"]["rank"] for span in killed] == [1, 2, 3]
    snapshots = {span["metrics"]["rank"]: span for span in shared_agent.received("pytorch.rank") if is_snapshot(span)}
    for span in killed:
        rank = span["metrics"]["rank"]
        assert ids(span) == ids(snapshots[rank])
        assert (span["meta"]["pytorch.end_reason"], span["meta"]["error.type"], span["error"]) == (
            "killed",
            "killed",
            1,
        )
        assert "SIGKILL" in span["meta"]["error.message"]
        assert 0 <= dead.died[rank] - (span["start"] + span["duration"]) < BEAT_NS + SLACK_NS
        for name in ("runtime-id", "env", "host", "training_job.id", "pytorch.incarnation"):
            assert span["meta"][name] == snapshots[rank]["meta"][name], name
        assert span["metrics"]["process_id"] == dead.alive[rank].state.pid
    assert states(dead.place) == {}
    assert [path for path in dead.place.rglob("*") if path.is_file()] == []
    assert shared_agent.check_failures() == ""


def test_the_run_log_has_an_end_then_and_what_the_rank_wrote_is_as_it_was(dead: Dead) -> None:
    spans = rank_spans(dead.log)
    assert [(span["metrics"]["rank"], span["tags"]["pytorch.end_reason"], span["error"]) for span in spans] == [
        (0, "signal:SIGTERM", 1), (1, "killed", 1), (2, "killed", 1), (3, "killed", 1),
    ]  # fmt: skip
    for span in spans[1:]:
        assert span["_file"].endswith(f"rank-{span['metrics']['rank']:05d}.seg-00001.jsonl")
        assert [one["segment"] for one in of_type(dead.log, "identity") if one["_file"] == span["_file"]] == [1]
    report = [*PYTHON, "-m", "ddtrace_pytorch.cli.main", "report", "--json", str(dead.log)]
    done = subprocess.run(report, env=dead.env, capture_output=True, text=True, timeout=60)
    (attempt,) = json.loads(done.stdout)["attempts"]
    assert attempt["ends"] == {"killed": 3, "signal:SIGTERM": 1}
    assert json.loads(done.stdout)["notes"] == []


TRAIN = """
    import os, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    print("training", os.getpid(), flush=True)
    while not os.path.exists("go"):
        time.sleep(0.02)
    dist.destroy_process_group()
"""


def trains(job: Job) -> Job:
    until(lambda: job.stdout().endswith("\n") or job.process.poll() is not None, 60, "it trains")
    assert job.stdout() == "training 1\n", job.wait(0).describe()
    return job


def test_the_next_attempt_tells_of_the_one_before_by_itself_once_that_is_dead(agent: Agent, tmp_path: Path) -> None:
    # Each attempt is the only process of its container, so that all have the same pid.
    host = Host("host-a", tmp_path)
    place = tmp_path / "state"
    env = environment(
        agent.url,
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_JOB_ID="night run",
        DD_PYTORCH_STATE_DIR=str(place),
        DD_PYTORCH_ROTATION_SECONDS="1",
    )
    script = host.script(TRAIN)

    def attempt() -> Job:
        return trains(host.start_as_init([*DDTRACE_RUN, *PYTHON, script], env))

    def end(job: Job) -> None:
        (job.directory / "go").touch()
        job.wait().ok()

    def ends() -> list[tuple[str, str]]:
        told = [(span["meta"]["pytorch.incarnation"], span["meta"].get("pytorch.end_reason")) for span in agent.ranks()]
        return [(incarnation, reason) for incarnation, reason in told if reason]

    try:
        first = attempt()
        until(lambda: [w for w in states(place).values() if w.span.metrics["pytorch.piece"]], 10, "its span is rotated")
        os.kill(host.init_pid(first), signal.SIGSTOP)
        (words,) = states(place).values()

        second = attempt()
        end(second)
        (told,) = ends()
        assert told[1] == "destroyed", "the first is stopped, not dead"
        found = list(recover(places.roots(str(place)), lambda words: False))
        assert [one.fate for one in found] == [Fate.ALIVE]

        os.kill(host.init_pid(first), signal.SIGKILL)
        first.process.wait()
        third = attempt()
        until(lambda: len(ends()) == 2, 10, "the third attempt tells of the first while it trains itself")
        assert (words.identity.incarnation, "killed") in ends()
        (killed,) = [span for span in agent.ranks() if span["error"]]
        assert ids(killed) == (words.span.trace_id % 2**64, words.span.span_id)
        end(third)
        assert len(ends()) == 3
        final = [ids(span) for span in agent.received("pytorch.rank") if not is_snapshot(span)]
        assert len(final) == len(set(final)), "no piece is told twice"
        assert states(place) == {}
    finally:
        host.end()


@pytest.mark.parametrize(
    ("export", "place", "warnings"),
    [
        pytest.param("none", "state", 0, id="nothing is wanted"),
        pytest.param("auto", "a file", 1, id="there is no place for it"),
    ],
)
def test_without_last_words_training_goes_on(
    agent: Agent, jobs: Jobs, tmp_path: Path, export: str, place: str, warnings: int
) -> None:
    (tmp_path / "a file").touch()
    env = environment(
        agent.url,
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT=export,
        DD_PYTORCH_STATE_DIR=str(tmp_path / place),
    )
    job = jobs.start([*DDTRACE_RUN, *PYTHON, jobs.script(TRAIN)], env)
    until(lambda: "training" in job.stdout(), 60, "it trains")
    if warnings:
        until(
            lambda: "DD_PYTORCH_STATE_DIR" in (job.directory / "stderr").read_text(), 10, "it says why there are none"
        )
    (job.directory / "go").touch()
    result = job.wait().ok()
    assert result.stderr.count("there is no place for its last words") == warnings, result.describe()
    assert not list(tmp_path.rglob("*.state"))
