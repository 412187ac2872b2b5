"""The report's table of stalls."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ddtrace_pytorch.cli.stalls import MOST, Stall
from ddtrace_pytorch.cli.summary import Attempt
from ddtrace_pytorch.cli.tables import line, row, show, span, table
from ddtrace_pytorch.stalls.telling import in_words

ROWS = 10


def render_stalls(attempt: Attempt, console: Console) -> None:
    """The longest, in order of time; nothing where there was none."""
    stalls = attempt.stalls
    if not stalls:
        return
    line(console, "")
    line(console, f"Stalls: {len(stalls):,}", style="bold")
    drawn = table("At", "Collective", "Waited", "Why", "Went on", right=("Waited",), yielding=("Collective", "Why"))
    for one in longest(stalls, ROWS):
        row(drawn, began(one), call(one), span(one.waited_s * 1e3), why(one), went_on(one))
    show(console, drawn)
    if len(stalls) > ROWS:
        line(console, f"… {len(stalls) - ROWS:,} shorter ones (--json lists all)")
    if attempt.stalls_uncounted:
        line(console, uncounted(attempt))
    line(console, "`ddtrace-pytorch diagnose` tells what became of them.")


def uncounted(attempt: Attempt) -> str:
    return f"{attempt.stalls_uncounted:,} more records are of stalls beyond the first {MOST:,}"


def longest(stalls: Sequence[Stall], many: int) -> Sequence[Stall]:
    """So many, in the order in which they came."""
    kept = sorted(range(len(stalls)), key=lambda at: (-stalls[at].waited_s, at))[:many]
    return [stalls[at] for at in sorted(kept)]


def began(one: Stall) -> str:
    return one.at[11:19] if one.at else "?"


def call(one: Stall) -> str:
    number = f" #{one.key}" if one.key is not None else ""
    return f"{one.operation}{number} of {one.group}"


def why(one: Stall) -> str:
    return f"{in_words(one.ranks)} {one.kind}" if one.ranks else "nobody found out"


def went_on(one: Stall) -> str:
    if not one.over:
        return "not known" if one.unsure else "no"
    return "yes" if one.over == one.waiting else f"on {one.over:,} of {one.waiting:,}"
