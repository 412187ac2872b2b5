"""Stalls, and what is not in the report. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtrace_pytorch.cli.page.html import Html, tag
from ddtrace_pytorch.cli.page.parts import more, say, section, table
from ddtrace_pytorch.cli.stall_tables import began, call, longest, uncounted, went_on, why
from ddtrace_pytorch.cli.summary import Attempt
from ddtrace_pytorch.cli.tables import span

STALL_ROWS = 60
NOTE_ROWS = 100


def stalls(attempt: Attempt) -> Html | None:
    """The longest, in order of time."""
    shown = longest(attempt.stalls, STALL_ROWS)
    rows = [(began(one), call(one), span(one.waited_s * 1e3), why(one), went_on(one), one.message) for one in shown]
    return section(
        "Stalls",
        table(("At", "Collective", "Waited", "Why", "Went on", "Said then"), rows, ("Waited",)),
        more(len(shown), len(attempt.stalls), "shorter stalls"),
        say(uncounted(attempt)) if attempt.stalls_uncounted else None,
    )


def left_out(attempt: Attempt, notes: Sequence[str]) -> Html | None:
    """What was dropped, not seen or not read."""
    told = [tag("li", one) for one in _gaps(attempt)]
    told += [tag("li", note) for note in notes[:NOTE_ROWS]]
    return section(
        "What is not in here",
        tag("ul", *told) if told else say("Nothing was dropped, no rank is missing, and all files could be read."),
        more(min(len(notes), NOTE_ROWS), len(notes), "notes"),
    )


def _gaps(attempt: Attempt) -> Iterator[str]:
    if attempt.ranks_missing:
        yield f"Ranks without a log: {attempt.ranks_missing}"
    if attempt.ranks_not_logged:
        yield f"Ranks that were not to write a log (DD_PYTORCH_LOG_RANKS): {attempt.ranks_not_logged}"
    for reason, many in attempt.dropped.items():
        yield f"{many:,} records dropped: {reason}"
    by_label: dict[str, list[tuple[int, int]]] = {}
    for group in attempt.collectives:
        if group.launched is not None and group.seen is not None and group.seen < group.launched:
            by_label.setdefault(group.group, []).append((group.launched, group.seen))
    for label, counts in by_label.items():
        launched, seen = map(sum, zip(*counts, strict=True))
        where = label if len(counts) == 1 else f"{len(counts):,} groups {label}"
        yield (
            f"{launched - seen:,} of {launched:,} collectives that torch launched on {where} were not seen as calls: "
            "how long they took isn't known"
        )
