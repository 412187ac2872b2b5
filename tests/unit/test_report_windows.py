"""What a report makes of profiler windows."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from ddtrace_pytorch.cli.window_tables import COUNTED, PROFILED, late_in_words, render_windows
from ddtrace_pytorch.cli.windows import Gathering, Late, Windows

# By rank, and by the first step of a window: how long collectives took, and how many there were.
Spent = dict[int, dict[int, tuple[float, int]]]


def window(step: int, ms: float, calls: int, state: str = "complete") -> dict[str, Any]:
    return {
        "type": "profile", "ts": step, "step": step, "steps": 2, "state": state, "of": "kernels",
        "duration": 100_000_000,
        "metrics": {"busy_share": 0.5, "idle_longest_ms": 7.0, "communication_ms": ms, "communication_calls": calls,
                    "communication_overlap": 0.25},
        "kernels": [{"name": "gemm", "count": 2, "total_ns": 40_000_000, "max_ns": 20_000_000},
                    {"name": "ncclDevKernel", "count": calls, "total_ns": int(ms * 1e6), "max_ns": int(ms * 1e6)}],
    }  # fmt: skip


def told(spent: Spent, state: str = "complete") -> Windows:
    gathered = Gathering()
    for rank, windows in spent.items():
        of_rank = Gathering()
        for step, (ms, calls) in windows.items():
            of_rank.add(rank, window(step, ms, calls, state))
        gathered.pour(of_rank)
    return gathered.told()


@pytest.mark.parametrize(
    ("spent", "late"),
    [
        # The one whose collectives are the shortest, in both windows together.
        ({0: {500: (30, 4), 1000: (10, 4)}, 1: {500: (8, 4), 1000: (12, 4)}, 2: {500: (32, 4), 1000: (9, 4)}},
         Late(1, 10.0, 20.25, 2)),
        # As little as that is no lateness.
        ({0: {500: (20, 4)}, 1: {500: (16, 4)}}, None),
        # What isn't of the same step, or not of as many collectives, can't be compared.
        ({0: {500: (30, 4)}, 1: {1000: (1, 4)}}, None),
        ({0: {500: (30, 4)}, 1: {500: (1, 3)}}, None),
        ({0: {500: (0, 0)}, 1: {500: (0, 0)}}, None),
        ({0: {500: (30, 4)}}, None),
    ],
)  # fmt: skip
def test_the_late_rank_has_the_shortest_collectives(spent: Spent, late: Late | None) -> None:
    assert told(spent).late == late
    assert told(spent, "cut short").late is None


def test_windows_are_shown_rank_by_rank() -> None:
    gathered = Gathering()
    gathered.add(0, window(500, 40.0, 4))
    gathered.add(0, window(1000, 20.0, 4))
    gathered.add(1, {"type": "profile", "ts": 1, "step": 500, "state": "skipped", "why": "nsys"})
    gathered.add(1, {"type": "profile", "ts": 1})
    console = Console(width=100)
    with console.capture() as captured:
        render_windows(gathered.told(), PROFILED, console)
    shown = captured.get()
    assert [line.split() for line in shown.splitlines()[4:6]] == [
        ["0", "2", "50%", "7ms", "30ms", "25%", "gemm", "(80ms)"],
        ["1", "0", "–", "–", "–", "–"],
    ]
    assert "without a result: 1 unknown, 1 skipped" in shown
    assert late_in_words(Late(3, 1.0, 20.0, 1), PROFILED) == (
        "rank 3 is late: in a profiler window, collectives took 1ms each time on it, and 20ms on the others, which "
        "waited for it there"
    )
    with console.capture() as captured:
        render_windows(Windows(), PROFILED, console)
    assert captured.get() == ""


def test_steps_whose_kernels_were_counted_are_shown_alike_where_few_were_seen_one_by_one() -> None:
    gathered = Gathering(each_step=True)
    for step in (50, 100):
        counted = window(step, 10.0 * (1 + step // 100), 4) | {"type": "kernels", "steps": 1 + step // 100}
        if step == 100:
            del counted["kernels"], counted["metrics"]["busy_share"], counted["metrics"]["communication_overlap"]
        gathered.add(0, counted)
    gathered.add(1, window(50, 40.0, 4) | {"type": "kernels", "steps": 1})
    told = gathered.told()
    console = Console(width=100)
    with console.capture() as captured:
        render_windows(told, COUNTED, console)
    lines = captured.get().splitlines()
    assert lines[1] == "GPU kernels"
    assert lines[4].split() == ["0", "3", "50%", "7ms", "10ms", "25%", "gemm", "(40ms)"]
    assert told.late == Late(0, 10.0, 40.0, 1)
    assert late_in_words(told.late, COUNTED).startswith("rank 0 is late: in a step whose kernels were counted, coll")
