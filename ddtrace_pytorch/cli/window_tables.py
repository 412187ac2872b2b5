"""The report's tables of what the GPU did: in profiler windows, and in the steps whose kernels were counted."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console

from ddtrace_pytorch.cli.tables import line, row, show, span, table
from ddtrace_pytorch.cli.windows import Late, Windows

RANK_ROWS = 16
NAME_SHOWN = 40


class Kind(NamedTuple):
    """How one of the two is called: as a heading, in its column, and one and several of it in a sentence."""

    heading: str
    column: str
    one: str
    several: str


PROFILED = Kind("Profiler windows", "Windows", "a profiler window", "profiler windows")
COUNTED = Kind("GPU kernels", "Counted", "a step whose kernels were counted", "steps whose kernels were counted")


def render_windows(windows: Windows, kind: Kind, console: Console) -> None:
    """What was seen, rank by rank; nothing where there were no windows."""
    if not windows.ranks:
        return
    line(console, "")
    line(console, kind.heading, style="bold")
    right = ("Rank", kind.column, "Busy", "Idle", "Comm.", "Hidden")
    drawn = table(*right, "Longest in all", right=right, yielding=("Longest in all",))
    for one in windows.ranks[:RANK_ROWS]:
        hidden = "–" if one.communication_overlap is None else f"{one.communication_overlap:.0%}"
        name = one.top if len(one.top) <= NAME_SHOWN else one.top[: NAME_SHOWN - 1] + "…"
        busy = "–" if one.busy_share is None else f"{one.busy_share:.0%}"
        figures = (busy, span(one.idle_longest_ms), span(one.communication_ms), hidden)
        row(
            drawn, str(one.rank), f"{one.windows:,}", *(figures if one.windows else ("–",) * len(figures)),
            f"{name} ({span(one.top_ms)})" if name else "",
        )  # fmt: skip
    show(console, drawn)
    if len(windows.ranks) > RANK_ROWS:
        line(console, f"… {len(windows.ranks) - RANK_ROWS:,} more ranks (--json lists all)")
    without: dict[str, int] = {}
    for one in windows.ranks:
        for state, many in one.without.items():
            without[state] = without.get(state, 0) + many
    if without:
        said = ", ".join(f"{many:,} {state or 'unknown'}" for state, many in sorted(without.items()))
        line(console, f"without a result: {said} (`profile` records of the run log say why)", style="yellow")


def late_in_words(late: Late, kind: Kind) -> str:
    many = f"{late.windows:,} {kind.several}" if late.windows > 1 else kind.one
    return (
        f"rank {late.rank} is late: in {many}, collectives took {span(late.ms)} each time on it, and "
        f"{span(late.others_ms)} on the others, which waited for it there"
    )
