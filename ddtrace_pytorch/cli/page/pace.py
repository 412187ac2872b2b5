"""How fast ranks stepped, when, and who was slow. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ddtrace_pytorch.cli.collective_tables import blame, hides_waiting
from ddtrace_pytorch.cli.page.heat import DATA, OWN, STEP, HeatMap
from ddtrace_pytorch.cli.page.html import Html, join, tag
from ddtrace_pytorch.cli.page.parts import NO_SCRIPT, fold, more, say, section, table
from ddtrace_pytorch.cli.step_tables import HIDDEN, SIGNS, hiccup_in_words, reasons, shares
from ddtrace_pytorch.cli.steps import NOTABLE, RankSteps, SlowRank
from ddtrace_pytorch.cli.summary import Attempt, Rank
from ddtrace_pytorch.cli.tables import duration, span
from ddtrace_pytorch.cli.untimed import Untimed

SLOW_ROWS = 24
HICCUPS_SHOWN = 8
# By what a rank is slow with, the picture in which it shows.
_SHOWS = {"data": DATA, "collective": STEP}
RANK_ROWS = 2048


def heat(name: str, drawn: HeatMap | None, slow: Sequence[SlowRank]) -> Html | None:
    """The picture's place, called `name`. Where ranks wait for each other all steps are as long: who is `slow` shows in
    what they do on their own; and where they wait in the backward pass, only in what it is slow with."""
    if drawn is None:
        return None
    first = _SHOWS.get(slow[0].part, OWN) if slow else drawn.layers[0].name
    choice = [
        tag("label", tag("input", type="radio", name=f"{name}-layer", checked=layer.name == first), f" {layer.name}")
        for at, layer in enumerate(drawn.layers)
    ]
    canvas = tag("canvas", role="img", aria_label="Step time of each rank over the time")
    longest = max(drawn.rows, key=len)
    together = f" A row is {len(longest):,} ranks: the slowest of them." if len(longest) > 1 else ""
    return section(
        "Step time, rank by rank",
        say(f"Ranks from top to bottom, time from left to right, {span(drawn.width_ns / 1e6)} a column.{together} Each "
            "host's clock is its own. Point at it for numbers."),
        tag("div", *choice, class_="choice"),
        tag("div", canvas, NO_SCRIPT, class_="picture", id=name),
    )  # fmt: skip


def heat_data(attempt: Attempt, drawn: HeatMap) -> dict[str, Any]:
    """What the page's script paints it from; times in ms, of this machine's clock."""
    hosts = {rank.rank: rank.host for rank in attempt.ranks}
    start = drawn.start_ns / 1e9
    offset = datetime.fromtimestamp(start).astimezone().utcoffset()
    return {
        "kind": "heat",
        "start": (start + (offset.total_seconds() if offset is not None else 0.0)) * 1e3,
        "width": drawn.width_ns / 1e6,
        "columns": drawn.columns,
        "rows": drawn.rows,
        "hosts": [_host(hosts, those) for those in drawn.rows],
        "layers": [vars(layer) for layer in drawn.layers],
    }


def _host(hosts: Mapping[int, str], ranks: list[int]) -> str:
    names = {hosts.get(rank, "") for rank in ranks}
    return names.pop() if len(names) == 1 else ""


def slow(attempt: Attempt) -> Html | None:
    """Who makes steps longer, and with what."""
    if not attempt.steps.ranks and not attempt.stragglers:
        return None
    known = {rank.rank: rank for rank in attempt.ranks}
    rows = []
    for one in attempt.steps.slow[:SLOW_ROWS]:
        ms, why = reasons(one)
        rank = known[one.rank]
        rows.append((str(one.rank), f"+{span(ms)}", why, rank.host, rank.device or ""))
    said = [tag("p", sentence, class_="bad") for sentence in blame(attempt)]
    said += [tag("p", hiccup_in_words(one), class_="bad") for one in attempt.steps.hiccups[:HICCUPS_SHOWN]]
    nobody = None
    if not rows and not said:
        nobody = say(f"Nobody makes steps longer by more than {NOTABLE:.0%}, and nobody is late to collectives.")
    hidden = say(HIDDEN) if hides_waiting(attempt) and not attempt.steps.slow else None
    return section(
        "Slowest ranks, and why",
        table(("Rank", "Each step", "Because of", "Host", "GPU"), rows, ("Rank", "Each step")),
        more(len(rows), len(attempt.steps.slow), "slow ranks"),
        *said,
        nobody,
        hidden,
    )


def ranks(attempt: Attempt) -> Html | None:
    """Every rank, folded away."""
    steps = {one.rank: one for one in attempt.steps.ranks}
    columns = ("Rank", "Host", "GPU", "Duration", "Steps", "Per s", "p50", "p95", "Max", "Data", "Comm.", "Optim.",
               "Compute", "Dropped", "Ended")  # fmt: skip
    shown = attempt.ranks[:RANK_ROWS]
    rows = [_cells(rank, steps.get(rank.rank), attempt.steps.untimed) for rank in shown]
    drawn = table(columns, rows, columns[3:14] + columns[:1], [rank.ended_badly for rank in shown])
    return section(
        "All ranks",
        fold(
            f"{len(attempt.ranks):,} rank{'' if len(attempt.ranks) == 1 else 's'}",
            join(drawn),
            more(len(shown), len(attempt.ranks), "ranks"),
        ),
    )


def _cells(rank: Rank, steps: RankSteps | None, untimed: Untimed | None) -> list[str]:
    told = [""] * 9
    if steps is not None:
        told = [
            f"{steps.steps:,}",
            f"{steps.per_second:.3g}",
            *(span(ms) for ms in (steps.p50_ms, steps.p95_ms, steps.max_ms)),
            *shares(steps, untimed, SIGNS),
        ]
    return [
        str(rank.rank),
        rank.host,
        rank.device or "",
        duration(rank.duration_s),
        *told,
        f"{sum(rank.dropped.values()):,}",
        rank.end_reason or "no end recorded",
    ]
