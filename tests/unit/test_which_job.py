"""Whether a command says which job it tells of, how long ago that was, and whether another one may be meant."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from harness.dead import leave_last_words, live
from harness.story import SECOND, T0, Record, beats, ended

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.runlog.schema import encode

pytestmark = pytest.mark.once

HOUR = 3600 * SECOND
TELLING = ("diagnose", "report")


class Here:
    """A host of jobs, with a directory of run logs."""

    def __init__(self, root: Path) -> None:
        self.logs, self.state = root / "logs", root / "state"

    def log(self, job: str, ago: int, *, incarnation: str = "aaa", over: bool = True) -> None:
        """A job of one rank, which was last heard of `ago` ns before now, 20 s after it began."""
        later = time.time_ns() - ago - 20 * SECOND - T0
        story: list[Record] = [*beats(20), *([ended("destroyed", 20)] if over else [])]
        identity = {
            "type": "identity", "ts": T0, "schema": 1, "rank": 0, "world_size": 1, "host": os.uname().nodename,
            "pid": 100, "job": {"id": job, "incarnation": incarnation, "source": "SLURM_JOB_ID", "launcher": "slurm"},
        }  # fmt: skip
        folder = self.logs / job / incarnation
        folder.mkdir(parents=True)
        lines = [{**record, "ts": record["ts"] + later} for record in (identity, *story)]
        (folder / "rank-00000.jsonl").write_bytes(b"".join(map(encode, lines)))

    def run(self, command: str, *options: str) -> Result:
        env = {"COLUMNS": "500", "DD_PYTORCH_STATE_DIR": str(self.state)}
        return CliRunner().invoke(cli, [command, str(self.logs), *options], env=env)

    def heading(self, command: str, *options: str) -> str:
        return next(line for line in self.run(command, *options).stdout.splitlines() if line.startswith("Job "))

    def doubts(self, command: str, *options: str) -> list[str]:
        return [line for line in self.run(command, *options).stdout.splitlines() if line.startswith("Is ")]


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


@pytest.mark.parametrize("command", TELLING)
def test_the_heading_says_how_long_ago_the_job_ended_and_that_it_is_the_newest_here(here: Here, command: str) -> None:
    here.log("old", 50 * HOUR)
    here.log("night", 3 * HOUR)
    heading = here.heading(command)
    assert heading.startswith("Job night")
    assert ", which ended 3 h ago, at " in heading
    assert heading.endswith(f" (the newest that has a log in {here.logs})")
    named = here.heading(command, "--job", "old")
    assert ", which ended 2 days ago, at " in named
    assert "newest" not in named


@pytest.mark.parametrize("command", TELLING)
@pytest.mark.parametrize(
    ("ago", "over", "said"),
    [
        (40 * SECOND, True, ", which ended 40 s ago, at "),
        (5 * 60 * SECOND, True, ", which ended 5 min ago, at "),
        (5 * 60 * SECOND, False, ", last heard of 5 min ago, at "),
        # Another host's clock is ahead.
        (-HOUR, True, ", which ended at "),
    ],
)
def test_one_that_is_fresh_needs_no_more_than_the_time(
    here: Here, command: str, ago: int, over: bool, said: str
) -> None:
    here.log("night", ago, over=over)
    heading = here.heading(command).replace("41 s", "40 s")
    assert said in heading
    assert "newest" not in heading


def test_of_an_earlier_attempt_it_is_not_said_that_the_job_ended_then(here: Here) -> None:
    here.log("night", 3 * HOUR, incarnation="aaa")
    here.log("night", 60 * SECOND, incarnation="bbb")
    assert here.heading("diagnose", "--attempt", "1") == "Job night"
    assert ", which ended 60 s ago" in here.heading("diagnose", "--attempt", "all").replace("1 min", "60 s")


@pytest.fixture
def agent_only(here: Here) -> Iterator[Here]:
    """A job whose log is here is over, and one that has none lives."""
    here.log("old", 3 * HOUR)
    files = [live(here.state, rank, here.logs, job="new run", end=time.time_ns()) for rank in (0, 1)]
    yield here
    for file in files:
        file.remove()


@pytest.mark.parametrize("command", [*TELLING, "timeline"])
def test_a_live_job_without_a_log_here_is_told_of_in_a_line(agent_only: Here, tmp_path: Path, command: str) -> None:
    options = ("-o", str(tmp_path / "out.json")) if command == "timeline" else ()
    (doubt,) = agent_only.doubts(command, *options)
    assert doubt == (
        "Is job new run meant? Ranks 0-1 of it live on this host; no run log of it was found "
        "(DD_PYTORCH_EXPORT=both has one beside the Agent)"
    )
    assert agent_only.doubts(command, "--job", "old", *options) == []


@pytest.mark.parametrize("command", TELLING)
def test_programs_are_told_of_it_too(agent_only: Here, command: str) -> None:
    told = json.loads(agent_only.run(command, "--json").stdout)
    assert told["suspected"].startswith("Is job new run meant?")
    assert json.loads(agent_only.run(command, "--json", "--job", "old").stdout)["suspected"] is None


def test_where_the_log_of_the_other_one_is_is_said(here: Here, tmp_path: Path) -> None:
    here.log("old", 3 * HOUR)
    (tmp_path / "elsewhere" / "new" / "aaa").mkdir(parents=True)
    leave_last_words(here.state, 3, tmp_path / "elsewhere", pid=7, job="new", end=time.time_ns() - 300 * SECOND)
    (doubt,) = here.doubts("diagnose")
    assert doubt == (
        "Is job new meant? Rank 3 of it was last heard of on this host 5 min ago; "
        f"its run log is in {tmp_path / 'elsewhere' / 'new'}"
    )


def test_one_that_has_a_log_here_and_lives_while_the_newest_is_over_is_named(here: Here) -> None:
    here.log("long", 0, over=False)
    here.log("short", -30 * SECOND)
    alive = live(here.state, 0, here.logs, job="long", end=time.time_ns())
    try:
        assert here.heading("diagnose").startswith("Job short")
        assert here.doubts("diagnose") == ["Is job long meant? Rank 0 of it lives on this host; --job long tells of it"]
    finally:
        alive.remove()


def test_what_was_left_before_is_no_reason_to_doubt(here: Here) -> None:
    here.log("new", 3 * HOUR)
    leave_last_words(here.state, 3, here.logs, pid=7, job="older", end=time.time_ns() - 4 * HOUR)
    assert here.doubts("diagnose") == []


def test_of_several_others_the_newest_is_named(here: Here) -> None:
    here.log("new", 3 * HOUR)
    for number in (3, 1, 2):
        end = time.time_ns() - number * 600 * SECOND
        leave_last_words(here.state, 0, here.logs, pid=7, job=f"newer-{number}", end=end)
    (doubt,) = here.doubts("diagnose")
    assert doubt.startswith("Is job newer-1 meant? Rank 0 of it was last heard of on this host 10 min ago; ")
    assert doubt.endswith("; 2 more are newer, too")


def test_an_attempt_of_the_same_job_without_a_log_here_is_named_as_such(here: Here) -> None:
    """As where a job of a fixed id was started anew with another DD_PYTORCH_EXPORT."""
    here.log("night", 3 * HOUR, incarnation="aaa")
    files = [live(here.state, 0, here.logs, job="night", incarnation=name, end=time.time_ns()) for name in ("aaa", "b")]
    try:
        (doubt,) = here.doubts("diagnose")
    finally:
        for file in files:
            file.remove()
    assert doubt.startswith("Is attempt b of it meant? Rank 0 of it lives on this host; no run log of it was found")
