"""The report's table of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from ddtrace_pytorch.cli.steps import PARTS, AllSteps, Hiccup, RankSteps, SlowRank, Steps
from ddtrace_pytorch.cli.tables import line, row, show, span, table
from ddtrace_pytorch.cli.untimed import Untimed

RANK_ROWS = 16
SLOW_ROWS = 3
SHARES = {"data": "data", "collective": "communication", "optimizer": "optimizer", "compute": "compute"}
# What there is to say before the two that nobody can tell apart where communication is not timed.
SIGNS = {"collective": "≥", "compute": "≤"}
BOUNDS = {"collective": "at least ", "compute": "at most "}
# Of what a slow rank takes longer.
TOLD = 0.05
HIDDEN = (
    "Ranks also wait for each other in collectives that torch issues by itself, as in DDP's backward pass. Nobody "
    "times that, it counts as computing: whether one of them computes longer than the others can't be told. Profiler "
    "windows tell it: set DD_PYTORCH_PROFILE_EVERY=500, or call `ddtrace-pytorch profile` while the job runs."
)


def render_steps(steps: Steps, console: Console, waiting_is_hidden: bool = False) -> None:
    """How long steps took, rank by rank, and who makes them longer; nothing where nobody stepped. `waiting_is_hidden`:
    ranks wait for each other where nobody sees it."""
    if not steps.ranks:
        return
    line(console, "")
    line(console, "Steps", style="bold")
    if steps.all is not None:
        line(console, in_words(steps.all, steps.untimed))
    shown = _most_telling(steps)
    right = ("Rank", "Steps", "First", "Per s", "p50", "p95", "Max", "Data", "Collect.", "Optim.", "Compute")
    drawn = table(*right, right=right, gap=1)
    for one in shown:
        row(
            drawn,
            str(one.rank),
            f"{one.steps:,}",
            span(one.first_ms),
            f"{one.per_second:.3g}",
            *(span(ms) for ms in (one.p50_ms, one.p95_ms, one.max_ms)),
            *shares(one, steps.untimed, SIGNS),
        )
    show(console, drawn)
    if len(steps.ranks) > len(shown):
        line(console, f"… {len(steps.ranks) - len(shown):,} more ranks (--json lists all)")
    if any(one.first_ms is not None and one.steps > 1 for one in steps.ranks):
        line(console, "The first step is left out of what follows it: something is still made or compiled in it.")
    if steps.untimed is not None:
        line(console, untimed_in_words(steps.untimed, len(steps.ranks)))
    for slow in steps.slow[:SLOW_ROWS]:
        line(console, slow_in_words(slow), style="yellow")
    if len(steps.slow) > SLOW_ROWS:
        line(console, f"… {len(steps.slow) - SLOW_ROWS:,} more slow ranks (--json lists all)", style="yellow")
    for hiccup in steps.hiccups[:SLOW_ROWS]:
        line(console, hiccup_in_words(hiccup), style="yellow")
    if len(steps.hiccups) > SLOW_ROWS:
        line(console, f"… {len(steps.hiccups) - SLOW_ROWS:,} more such steps (--json lists all)", style="yellow")
    if waiting_is_hidden and not steps.slow:
        line(console, HIDDEN)


def shares(steps: RankSteps | AllSteps, untimed: Untimed | None, bounds: Mapping[str, str]) -> list[str]:
    """As percentages; where communication is part of what seems to be computing, with what `bounds` say of these."""
    said = bounds if untimed is not None else {}
    return [f"{said.get(part, '')}{getattr(steps, f'share_{part}'):.0%}" for part in SHARES]


def untimed_in_words(untimed: Untimed, ranks: int) -> str:
    """Why shares are no more than bounds."""
    if untimed.calls is None or untimed.of is None:
        return "What collectives took is part of compute: DD_PYTORCH_COLLECTIVES was off, and nobody timed them."
    return (
        f"Of {round(untimed.of / ranks):,} collectives of a rank nobody timed {round(untimed.calls / ranks):,}, which "
        "torch issued by itself, as for DDP: what a rank waits in them is part of compute."
    )


def in_words(steps: AllSteps, untimed: Untimed | None) -> str:
    """What a person wants to know first."""
    times = f"p50 {span(steps.p50_ms)}, p95 {span(steps.p95_ms)}, p99 {span(steps.p99_ms)}, max {span(steps.max_ms)}"
    parts = ", ".join(" ".join(one) for one in zip(SHARES.values(), shares(steps, untimed, BOUNDS), strict=True))
    return f"{steps.per_second:.3g} steps/s: {times}; {parts}"


def reasons(slow: SlowRank) -> tuple[float, str]:
    """How much longer each step is for it, in ms, and with what, in words."""
    # What is next to nothing of it would only be read as a reason.
    told = [(part, ms) for part, ms in slow.parts.items() if ms >= TOLD * slow.ms]
    return sum(ms for _, ms in told), ", ".join(f"{PARTS[part]} (+{span(ms)})" for part, ms in told)


def slow_in_words(slow: SlowRank) -> str:
    ms, why = reasons(slow)
    return f"rank {slow.rank} takes {span(ms)} more of each step than the others: {why}"


def hiccup_in_words(hiccup: Hiccup) -> str:
    ms, why = reasons(hiccup)
    return f"rank {hiccup.rank} took {span(ms)} more than the others in step {hiccup.step}: {why}"


def _most_telling(steps: Steps) -> Sequence[RankSteps]:
    """All ranks, or the slow ones first."""
    if len(steps.ranks) <= RANK_ROWS:
        return steps.ranks
    place = {slow.rank: at for at, slow in enumerate(steps.slow)}
    return sorted(steps.ranks, key=lambda one: (place.get(one.rank, len(place)), one.rank))[:RANK_ROWS]
