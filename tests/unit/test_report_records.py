"""What the user recorded, and checkpoints, in a report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.story import T0, write_rank

from ddtrace_pytorch.cli.main import cli

MS = 1_000_000


def user_span(name: str, ms: float, at: str = "train.py:3:main", **more: Any) -> dict[str, Any]:
    return {"type": "user_span", "ts": T0, "name": name, "seq": 1, "duration": round(ms * MS), "at": at, **more}


def scalar(second: int, **metrics: float) -> dict[str, Any]:
    return {"type": "scalar", "ts": T0 + second * 1_000 * MS, "metrics": metrics}


def checkpoint(second: int, op: str, ms: float, tags: dict[str, str], metrics: dict[str, float]) -> dict[str, Any]:
    told = {"checkpoint.count": 1, "checkpoint.ms": ms, **metrics}
    return {"type": "span", "ts": T0 + second * 1_000 * MS, "name": "pytorch.checkpoint", "duration": round(ms * MS),
            "error": int("error.type" in tags), "tags": {"checkpoint.op": op, **tags}, "metrics": told}  # fmt: skip


def report(root: Path, *options: str) -> str:
    result = CliRunner().invoke(cli, ["report", str(root), *options])
    assert result.exit_code == 0, result.output
    return result.output


def recorded(root: Path) -> dict[str, Any]:
    (attempt,) = json.loads(report(root, "--json"))["attempts"]
    found: dict[str, Any] = attempt["recorded"]
    return found


def cells(told: str, first: str) -> list[str]:
    return next(one.split() for one in told.splitlines() if one.split()[:1] == [first])


def test_what_each_rank_recorded_is_summed_up_by_name(tmp_path: Path) -> None:
    write_rank(
        tmp_path, 0,
        [
            *(user_span("rollout", ms) for ms in (10, 20, 30)),
            {"type": "event", "ts": T0, "name": "best", "seq": 3},
            {"type": "event", "ts": T0, "name": "stall", "tags": {"op": "all_reduce"}},
            scalar(1, loss=4.0), scalar(3, loss=1.0), scalar(4, loss=math.nan),
            checkpoint(5, "torch.save", 200, {"checkpoint.path": "a.pt"}, {"checkpoint.bytes": 1_000}),
            checkpoint(7, "torch.load", 50, {"error.type": "OSError"}, {}),
        ],
    )  # fmt: skip
    write_rank(
        tmp_path, 1,
        [
            user_span("rollout", 140, "slow.py:9:fetch", error={"type": "OSError"}),
            user_span("score", 5),
            {"type": "event", "ts": T0, "name": "best", "seq": 3},
            scalar(2, loss=9.0, lr=0.1),
            checkpoint(6, "torch.save", 400, {"checkpoint.path": "b.pt"},
                       {"checkpoint.count": 3, "checkpoint.ms": 600, "checkpoint.bytes": 9_000}),
        ],
    )  # fmt: skip
    found = recorded(tmp_path)
    rollout, score = found["spans"]
    assert (rollout["name"], rollout["count"], rollout["errors"], rollout["total_ms"]) == ("rollout", 4, 1, 200.0)
    assert (rollout["mean_ms"], rollout["max_ms"]) == (50.0, 140.0)
    assert (rollout["slowest_rank"], rollout["slowest_at"]) == (1, "slow.py:9:fetch")
    assert score["p95_ms"] == pytest.approx(5, rel=0.07)
    assert found["scalars"] == [
        {"name": "loss", "count": 4, "first": 4.0, "last": "NaN", "min": 1.0, "max": 9.0,
         "not_finite": 1, "first_not_finite_step": None, "first_not_finite_rank": 0},
        {"name": "lr", "count": 1, "first": 0.1, "last": 0.1, "min": 0.1, "max": 0.1,
         "not_finite": 0, "first_not_finite_step": None, "first_not_finite_rank": None},
    ]  # fmt: skip
    assert found["events"] == [{"name": "best", "count": 2}]
    assert found["checkpoints"] == [
        {"op": "torch.save", "count": 4, "errors": 0, "bytes": 10_000, "total_ms": 800.0, "slowest_ms": 400.0,
         "slowest_rank": 1, "last_path": "b.pt"},
        {"op": "torch.load", "count": 1, "errors": 1, "bytes": None, "total_ms": 50.0, "slowest_ms": 50.0,
         "slowest_rank": 0, "last_path": None},
    ]  # fmt: skip
    told = report(tmp_path)
    assert cells(told, "rollout")[:4] == ["rollout", "4", "1", "50ms"]
    assert cells(told, "rollout")[-3:] == ["rank", "1,", "slow.py:9:fetch"]
    assert cells(told, "loss") == ["loss", "4", "4", "NaN", "1", "9"]
    assert cells(told, "best") == ["best", "2"]
    assert cells(told, "torch.save") == "torch.save 4 0 10kB 800ms 400ms (rank 1) b.pt".split()


def test_of_many_names_the_first_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [user_span(f"s{number:02d}", 100 - number) for number in range(33)])
    told = report(tmp_path)
    assert "s19" in told
    assert "s20" not in told
    assert "… 13 more names (--json lists all)" in told
    assert len(recorded(tmp_path)["spans"]) == 33


def test_a_name_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    odd = "[red]\x1b[2J\nforged  1\r" + "x" * 300
    write_rank(
        tmp_path, 0,
        [
            user_span(odd, 1, odd), {"type": "event", "ts": T0, "name": odd, "seq": 1}, scalar(1, **{odd: 1.0}),
            checkpoint(1, odd, 1, {"checkpoint.path": odd}, {}),
        ],
    )  # fmt: skip
    told = report(tmp_path)
    assert "\x1b" not in told
    assert "\r" not in told
    assert not any(one.startswith("forged") for one in told.splitlines())
    assert told.count("[red]\\x1b[2J\\nforged") >= 4
    assert "x" * 80 not in told


def test_what_is_damaged_costs_itself_alone(tmp_path: Path) -> None:
    odd: list[Any] = [
        {"type": "user_span", "ts": T0, "name": 3, "duration": "long"},
        {"type": "user_span", "ts": T0, "name": "big", "duration": 10**400},
        {"type": "event", "ts": T0, "name": [], "seq": 1},
        {"type": "scalar", "ts": T0, "metrics": {"loss": "much", "yes": True, "large": 10**400}},
        {"type": "scalar", "ts": T0, "metrics": None},
        {"type": "span", "ts": T0, "name": "pytorch.checkpoint", "metrics": {"checkpoint.count": "x"}},
    ]
    write_rank(tmp_path, 0, [*odd, user_span("good", 1)])
    found = recorded(tmp_path)
    assert [one["name"] for one in found["spans"]] == ["good"]
    assert [(one["name"], one["last"]) for one in found["scalars"]] == [("large", "int")]
    assert [one["count"] for one in found["checkpoints"]] == [1]
    assert "good" in report(tmp_path)


def test_numbers_that_were_not_finite_in_between_are_counted_and_the_first_is_placed(tmp_path: Path) -> None:
    def loss(step: int, value: float) -> dict[str, Any]:
        return scalar(step, loss=value) | {"step": step}

    write_rank(tmp_path, 0, [loss(1, 4.0), loss(8, math.nan), loss(9, 3.0)])
    write_rank(tmp_path, 1, [loss(1, 4.0), loss(7, math.inf), loss(9, 3.0)])
    assert "loss: 2 of 6 not finite, the first of them in step 7 on rank 1" in report(tmp_path).splitlines()
    (one,) = recorded(tmp_path)["scalars"]
    assert (one["not_finite"], one["first_not_finite_step"], one["first_not_finite_rank"]) == (2, 7, 1)


def test_without_any_nothing_is_said_of_them(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [])
    told = report(tmp_path)
    assert not any(word in told for word in ("Your", "Checkpoints"))
