"""Ranks of one start whose group never came to be: each has an incarnation of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.cli.starts import NEAR_NS, in_order, join
from ddtrace_pytorch.runlog.reader import RankLog
from ddtrace_pytorch.runlog.schema import encode

pytestmark = pytest.mark.once


def log(rank: int, incarnation: str, began: int = 0, attempt: int | None = 1, **more: Any) -> RankLog:
    job = {"attempt": attempt, "launcher": "torchrun", "ids": more.pop("ids", {"torchelastic.run_id": "r"})}
    identity = {"ts": began, "world_size": 3, "source": "trainer", "job": job} | more
    return RankLog(".", rank, "7", incarnation, "h", identity, ())


def test_ranks_that_failed_to_connect_are_of_the_start_that_the_launcher_counted() -> None:
    first = [log(rank, "a", attempt=0) for rank in range(3)]
    second = [log(1, "b", 10), log(2, "c", 12)]
    assert join([*first, *second]) == [
        "rank 2 had no group with the others of b: taken to be of one attempt with them, for the launcher counted them "
        "alike"
    ]
    assert [one.incarnation for one in (*first, *second)] == ["a", "a", "a", "b", "b"]
    assert join([*first, *second]) == [], "they are joined already"


def test_one_that_came_late_to_a_group_of_the_others_is_one_of_them() -> None:
    found = [log(2, "x", 3), log(0, "y", 10), log(1, "y", 10)]
    assert len(join(found)) == 1
    assert {one.incarnation for one in found} == {"y"}


def test_of_two_starts_the_nearer_one_is_meant() -> None:
    found = [log(0, "a", 0), log(1, "a", 0), log(0, "b", 100), log(1, "b", 100), log(2, "c", 90)]
    join(found)
    assert found[-1].incarnation == "b"


@pytest.mark.parametrize(
    "other",
    [
        log(0, "b"),
        log(1, "b", NEAR_NS + 1),
        log(1, "b", attempt=2),
        log(1, "b", ids={"torchelastic.run_id": "s"}),
        log(1, "b", world_size=4),
        log(1, "b", source="rollout"),
    ],
)
def test_what_may_be_of_another_start_is_left_as_it_is(other: RankLog) -> None:
    assert join([log(0, "a"), other]) == []
    assert other.incarnation == "b"


@pytest.mark.parametrize("more", [{"attempt": None}, {"world_size": 1}, {"world_size": None}])
def test_without_a_count_nothing_is_joined(more: dict[str, Any]) -> None:
    found = [log(0, "a", **more), log(1, "b", **more)]
    assert join(found) == []
    assert [one.incarnation for one in found] == ["a", "b"]


def test_whole_starts_are_never_joined() -> None:
    found = [log(0, "a"), log(1, "a"), log(2, "b"), log(3, "b")]
    assert join(found) == []


def test_what_runs_beside_the_training_comes_last_and_what_began_at_once_by_its_name() -> None:
    logs = [
        log(0, "d", 9, source="reward"), log(0, "e", 1, source="rollout"), log(1, "c", 7), log(0, "b", 7),
        log(0, "c", 8), log(0, "a", 8), log(0, "beside", 0, source="rollout"), log(1, "beside", 5),
    ]  # fmt: skip
    told = in_order(logs)
    assert [start.incarnation for start in told.training] == ["beside", "b", "c", "a"]
    assert [start.incarnation for start in told.beside] == ["e", "d"]
    assert [one.rank for one in told.training[2].logs] == [1, 0]


@pytest.mark.parametrize("apart", [0, 5])
def test_all_commands_number_the_attempts_alike(tmp_path: Path, apart: int) -> None:
    """Also where a rank's span has begun before its log."""
    for number, incarnation in enumerate(("bbb", "aaa", "beside")):
        source = "rollout" if incarnation == "beside" else "trainer"
        identity = {
            "type": "identity", "ts": 100 + apart * number, "schema": 1, "rank": 0, "world_size": 1, "host": "h",
            "source": source, "job": {"id": "7", "incarnation": incarnation},
        }  # fmt: skip
        span = {"type": "span", "ts": 200, "name": "pytorch.rank", "span_id": "1", "start": 90 - 10 * number}
        folder = tmp_path / "7" / incarnation
        folder.mkdir(parents=True)
        (folder / "rank-00000.jsonl").write_bytes(encode(identity) + encode(span))

    def numbered(command: str) -> list[str]:
        told = json.loads(CliRunner().invoke(cli, [command, str(tmp_path), "--attempt", "all", "--json"]).stdout)
        return [one["incarnation"] for one in told["attempts"]]

    assert numbered("report") == numbered("diagnose") == [*(("bbb", "aaa") if apart else ("aaa", "bbb")), "beside"]
