"""The steps in a report: how long they took, and who makes them longer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.story import T0, write_rank
from rich.console import Console

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.cli.step_tables import render_steps
from ddtrace_pytorch.cli.steps import RankSteps, Steps, slow_among

MS = 1_000_000


def write(root: Path, rank: int, steps: list[dict[str, Any]]) -> None:
    write_rank(root, rank, ({"type": "step", "ts": T0, **step} for step in steps))


def step(number: int, ms: float, **parts: float) -> dict[str, Any]:
    metrics = {f"{name}_ns": round(part * MS) for name, part in parts.items()}
    return {"step": number, "relative_step": number, "start": T0, "duration": round(ms * MS), "metrics": metrics}


def report(root: Path, *options: str) -> str:
    result = CliRunner().invoke(cli, ["report", str(root), *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_rank_whose_loader_is_slow_is_named_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, 0, [step(n, 100, data=60, collective=1, optimizer=5) for n in range(1, 101)])
    write(tmp_path, 1, [step(n, 100, data=2, collective=59, optimizer=5) for n in range(1, 101)])
    assert "rank 0 takes 58ms more of each step than the others: data loading (+58ms)" in report(tmp_path)
    (attempt,) = json.loads(report(tmp_path, "--json"))["attempts"]
    assert attempt["steps"]["slow"] == [
        {"rank": 0, "ms": 58.0, "part": "data", "part_ms": 58.0, "parts": {"data": 58.0}}
    ]
    first = attempt["steps"]["ranks"][0]
    assert (first["steps"], first["first_step"], first["last_step"], first["max_ms"]) == (100, 1, 100, 100.0)
    assert first["p50_ms"] == pytest.approx(100, rel=0.07)
    assert first["per_second"] == pytest.approx(10)
    assert sum(first[f"share_{part}"] for part in ("data", "collective", "optimizer", "compute")) == pytest.approx(1)


def test_what_is_damaged_or_unfinished_is_no_step(tmp_path: Path) -> None:
    odd: list[dict[str, Any]] = [
        step(3, 1e300),
        {**step(4, 5), "unfinished": True},
        {**step(5, 5), "duration": "long"},
        {**step(6, 5), "metrics": [1], "step": "six"},
        {**step(7, 5), "metrics": {"data_ns": float("nan"), "collective_ns": -5}},
    ]
    write(tmp_path, 0, [step(1, 10, data=5), *odd])
    write(tmp_path, 1, [])
    (attempt,) = json.loads(report(tmp_path, "--json"))["attempts"]
    (one,) = attempt["steps"]["ranks"]
    assert (one["steps"], one["first_step"], one["last_step"]) == (3, 1, 7)
    assert one["share_data"] == pytest.approx(0.25)


def test_without_steps_nothing_is_said_of_them(tmp_path: Path) -> None:
    write(tmp_path, 0, [])
    assert "Steps" not in report(tmp_path)


def of(rank: int, data: float, collective: float, optimizer: float = 0.1) -> RankSteps:
    compute = 1 - data - collective - optimizer
    return RankSteps(
        rank, 10, None, 1, 10, 10.0, 100.0, 100.0, 100.0, 100.0, 100.0, data, collective, optimizer, compute
    )


@pytest.mark.parametrize(
    ("ranks", "slow"),
    [
        ([of(0, 0.1, 0.1), of(1, 0.1, 0.1)], []),
        ([of(0, 0.1, 0.1)], []),
        ([of(rank, 0.1, 0.5) for rank in range(7)] + [of(7, 0.1, 0.1)], [(7, "compute")]),
        (
            [of(rank, 0.1, 0.5) for rank in range(3)] + [of(3, 0.1, 0.1, 0.5), of(4, 0.5, 0.0)],
            [(4, "data"), (3, "optimizer")],
        ),
        # The others wait for it in the backward pass.
        ([of(0, 0.01, 0), of(1, 0.6, 0)], [(1, "data")]),
        ([of(0, 0.01, 0), of(1, 0.6, 0), of(2, 0.01, 0), of(3, 0.01, 0)], [(1, "data")]),
        # Where nobody's collectives are seen everybody seems to be on its own all the time.
        ([of(rank, 0.1, 0.0) for rank in range(4)], []),
    ],
)
def test_who_is_slow(ranks: list[RankSteps], slow: list[tuple[int, str]]) -> None:
    assert [(one.rank, one.part) for one in slow_among(ranks)] == slow


def test_what_a_slow_rank_takes_longer_adds_up() -> None:
    ranks = [of(rank, 0.1, 0.1) for rank in range(3)] + [of(3, 0.6, 0.0), of(4, 0.2, 0.0, 0.2)]
    ranks[3].mean_ms = 110.0
    slow = slow_among(ranks)
    assert [(one.rank, list(one.parts)) for one in slow] == [(3, ["data", "optimizer"]), (4, ["data", "optimizer"])]
    assert all(sum(one.parts.values()) == pytest.approx(one.ms) for one in slow)
    assert all(one.parts[one.part] == one.part_ms for one in slow)
    told = io.StringIO()
    render_steps(Steps(ranks, slow), Console(file=told, width=80))
    assert "rank 3 takes 56ms more of each step than the others: data loading (+56ms)" in told.getvalue()
    assert (
        "rank 4 takes 20ms more of each step than the others: data loading (+10ms), the optimizer (+10ms)"
        in " ".join(told.getvalue().split())
    )


def test_communication_is_the_reason_where_steps_are_longer_and_their_own_part_is_not(tmp_path: Path) -> None:
    for rank in range(3):
        slow = 30 * (rank == 2)
        write(tmp_path, rank, [step(n, 100 + slow, data=5, collective=20 + slow, optimizer=5) for n in range(1, 21)])
    assert "rank 2 takes 30ms more of each step than the others: communication (+30ms)" in report(tmp_path)
    (attempt,) = json.loads(report(tmp_path, "--json"))["attempts"]
    assert [(one["rank"], one["part"], one["ms"]) for one in attempt["steps"]["slow"]] == [
        (2, "collective", pytest.approx(30))
    ]


def test_the_first_step_says_nothing_about_the_others(tmp_path: Path) -> None:
    for rank in (0, 1):
        own = {"data": 30 * rank, "collective": 30 * (1 - rank)}
        first = {**step(1, 12_300, collective=12_000 * rank), "first": True}
        write(tmp_path, rank, [first, *(step(n, 40, **own) for n in range(2, 21))])
    write(tmp_path, 2, [{**step(1, 12_300, data=123), "first": True}])
    told = report(tmp_path)
    assert "rank 1 takes 30ms more of each step than the others: data loading (+30ms)" in told
    assert "12.3s" in told
    (attempt,) = json.loads(report(tmp_path, "--json"))["attempts"]
    one, _, by_itself = attempt["steps"]["ranks"]
    assert (one["steps"], one["first_ms"], one["max_ms"], one["share_collective"]) == (20, 12_300.0, 40.0, 0.75)
    assert (one["first_step"], one["mean_ms"], one["per_second"]) == (1, 40.0, 25.0)
    assert (by_itself["steps"], by_itself["max_ms"], by_itself["share_data"]) == (1, 12_300.0, 0.01)


def test_a_hiccup_is_told_as_one_and_no_part_of_each_step(tmp_path: Path) -> None:
    """In step 31 the others wait for rank 2, seen in collectives on rank 0, as computing on rank 1; and all are long in
    step 40, which is nobody's."""
    for rank, waits in enumerate(("collective", "compute", "data")):
        steps = [step(n, 40, data=1) for n in range(1, 61)]
        steps[30] = step(31, 60_040, **({waits: 60_000} if waits != "compute" else {}))
        steps[39] = step(40, 900, data=1)
        write(tmp_path, rank, steps)
    told = report(tmp_path)
    assert "more of each step" not in told
    assert [one for one in told.splitlines() if " took " in one] == [
        "rank 2 took 1m00s more than the others in step 31: data loading (+1m00s)"
    ]
    (attempt,) = json.loads(report(tmp_path, "--json"))["attempts"]
    (hiccup,) = attempt["steps"]["hiccups"]
    assert (hiccup["step"], hiccup["rank"], hiccup["part"]) == (31, 2, "data")
    assert attempt["steps"]["ranks"][2]["max_ms"] == 60_040


def test_a_rank_that_is_slow_in_each_step_is_named_beside_its_hiccup(tmp_path: Path) -> None:
    for rank in (0, 1):
        own, waits = ("data", "collective") if rank else ("collective", "data")
        steps = [step(n, 100, **{own: 30, waits: 1}) for n in range(1, 61)]
        if rank:
            steps[30] = step(31, 5_000, data=4_930)
        write(tmp_path, rank, steps)
    told = report(tmp_path)
    assert "rank 1 takes 29ms more of each step than the others: data loading (+29ms)" in told
    assert "rank 1 took 4.93s more than the others in step 31: data loading (+4.93s)" in told


def test_what_is_piped_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, [step(n, 123.4, data=60, collective=1, optimizer=5) for n in range(1, 101)])
    monkeypatch.delenv("COLUMNS", raising=False)
    header = next(one for one in report(tmp_path).splitlines() if "Optim." in one)
    assert header.split() == "Rank Steps First Per s p50 p95 Max Data Collect. Optim. Compute".split()


def test_of_a_thousand_ranks_the_slow_ones_are_shown(tmp_path: Path) -> None:
    ranks = [of(rank, 0.1, 0.1 if rank == 777 else 0.5) for rank in range(1_000)]
    told = io.StringIO()
    render_steps(Steps(ranks, slow_among(ranks)), Console(file=told, width=80))
    lines = told.getvalue().splitlines()
    assert lines[4].split()[0] == "777"
    assert any("984 more ranks" in one for one in lines)
    assert max(map(len, lines)) <= 80
