"""What ranks said to each other. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ddtrace_pytorch.cli.collective_tables import (
    CALL_COLUMNS,
    CALL_FIGURES,
    FIGURES,
    MEANING,
    cells_of,
    cells_of_call,
    said_of,
    title_of,
    torchs_own,
)
from ddtrace_pytorch.cli.collectives import Group
from ddtrace_pytorch.cli.page.html import Html, join, tag
from ddtrace_pytorch.cli.page.parts import NO_SCRIPT, fold, more, say, section, table
from ddtrace_pytorch.cli.page.traffic import Matrix
from ddtrace_pytorch.cli.summary import Attempt
from ddtrace_pytorch.cli.tables import size
from ddtrace_pytorch.stalls.telling import in_words

GROUPS_OPEN = 6
GROUPS_SHOWN = 64


def collectives(attempt: Attempt) -> Html | None:
    """A table for each group, those that took longest first."""
    groups = attempt.collectives
    off = "off" in attempt.collectives_setting.split(", ")
    times = Counter(group.group for group in groups)
    # Of groups of the same label the one that took longest, which comes first, stands for the others.
    by_label = {group.group: group for group in reversed(groups)}
    first = [group for group in groups if group is by_label[group.group]][:GROUPS_OPEN]
    opened = set(map(id, first))
    others = [group for group in groups if id(group) not in opened][:GROUPS_SHOWN]
    calls = table(CALL_COLUMNS, map(cells_of_call, attempt.slowest_calls), CALL_FIGURES)
    return section(
        "Collectives",
        say("They were not counted: DD_PYTORCH_COLLECTIVES was off.", "bad") if off else None,
        say(MEANING) if groups else None,
        *(_group(one, times[one.group]) for one in first),
        fold(f"{len(others):,} more groups", *(_group(one, times[one.group]) for one in others)),
        more(len(first) + len(others), len(groups), "groups"),
        fold(f"The slowest of {attempt.single_calls:,} calls told of one by one", calls),
    )


def _group(group: Group, alike: int) -> Html:
    # Those of the same label are told apart by what torch calls them.
    which = f" ({group.name}, one of {alike:,} groups)" if alike > 1 else ""
    return join(
        tag("h3", title_of(group) + which),
        *(say(torchs_own(unseen, group.ranks_told)) for unseen in group.unseen),
        table(("Operation", *FIGURES), map(cells_of, group.operations), FIGURES),
        *(say(said) for said in said_of(group.operations)),
    )


def matrix(name: str, drawn: Matrix | None, attempt: Attempt) -> Html | None:
    """The picture's place, called `name`."""
    if drawn is None:
        return None
    canvas = tag("canvas", role="img", aria_label="Bytes from each rank to each other")
    several = max(map(len, drawn.blocks))
    together = f" A cell is {several:,} ranks." if several > 1 else ""
    astray = [f"{size(many)} of {label}" for label, many in drawn.unplaced.items()]
    lost = say(
        f"Not in it: transfers between two ranks of larger groups ({', '.join(astray)}), for it isn't recorded which "
        "two."
    )
    cut_short = [one.rank for one in attempt.ranks if one.end_reason is None]
    partial = say(
        f"Partial: the log of {in_words(cut_short)} has no end, so what was sent from there since the last totals "
        "isn't in it."
    )
    return section(
        "Who talks to whom",
        say(f"Bytes of messages, {size(drawn.total)} in all: rows send, columns receive. Of a collective each other "
            f"rank of the group gets an equal part.{together} Torch's own are in it where their size is known."),
        tag("div", canvas, NO_SCRIPT, class_="picture", id=name) if drawn.anything else None,
        lost if astray else None,
        partial if cut_short else None,
    )  # fmt: skip


def matrix_data(drawn: Matrix) -> dict[str, Any]:
    """What the page's script paints it from."""
    return {
        "kind": "matrix",
        "blocks": drawn.blocks,
        "least": drawn.least,
        "most": drawn.most,
        "levels": drawn.levels,
    }
