"""What the page of a report is made of, apart from logs and browsers."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtrace_pytorch.cli.page import heat, traffic
from ddtrace_pytorch.cli.page.bins import MOST, Bins
from ddtrace_pytorch.cli.page.gathering import RankView, View
from ddtrace_pytorch.cli.page.heat import Row
from ddtrace_pytorch.cli.page.html import data, own, tag
from ddtrace_pytorch.cli.page.plots import plots
from ddtrace_pytorch.cli.page.series import MOST_NAMES, AllSeries, Numbers
from ddtrace_pytorch.cli.page.traffic import RankTraffic
from ddtrace_pytorch.stalls.history import History
from ddtrace_pytorch.visible import visible

MS = 1_000_000
T0 = 1_790_000_000 * 10**9


class Parsed(HTMLParser):
    """`elements` with their attributes, and all `text`, as a browser takes it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_data(self, text: str) -> None:
        self.text += text


@given(st.text())
def test_whatever_text_is_it_stays_text(text: str) -> None:
    shown = "\n".join(visible(line) for line in text.split("\n"))
    parsed = Parsed(tag("b", text, "|", title=text))
    assert parsed.elements == [("b", {"title": shown})]
    assert parsed.text == shown + "|"


@settings(max_examples=50)
@given(st.recursive(st.text(), lambda some: st.lists(some) | st.dictionaries(st.text(), some)))
def test_data_comes_back_and_ends_no_element(value: Any) -> None:
    written = data({"it": value})
    assert not {"<", ">", "&"} & set(written)
    assert json.loads(written) == {"it": value}


def test_only_what_is_our_own_is_not_escaped() -> None:
    assert tag("p", own("<i>"), "<i>", None, tag("br")) == "<p><i>&lt;i&gt;<br></p>"
    assert tag("input", checked=True, disabled=False, data_of="a\"'b") == '<input checked data-of="a&quot;&#x27;b">'


@given(st.lists(st.tuples(st.integers(-(10**6), 10**9), st.integers(-1000, 1000)), min_size=1), st.integers(0, 40))
def test_bins_that_are_poured_together_are_as_if_all_were_in_one(added: list[tuple[int, int]], at: int) -> None:
    together, first, second = (Bins(Numbers) for _ in range(3))
    for number, (place, value) in enumerate(added):
        together.at(place).add(value)
        (first if number < at else second).at(place).add(value)
    first.pour(second)
    assert first == together
    assert max(together.cells) - min(together.cells) < MOST
    assert sum(cell.count for cell in together.cells.values()) == len(added)
    assert sum(cell.total for cell in together.cells.values()) == sum(value for _, value in added)


def step(began_ms: float, ms: float, **parts: float) -> dict[str, Any]:
    metrics = {f"{name}_ns": round(part * MS) for name, part in parts.items()}
    return {"type": "step", "start": T0 + round(began_ms * MS), "duration": round(ms * MS), "metrics": metrics}


def row(*steps: dict[str, Any]) -> Row:
    made = Row()
    for one in steps:
        made.add(one)
    return made


def values(layer: heat.Layer) -> list[float | None]:
    levels = base64.b64decode(layer.levels)
    return [layer.least * (layer.most / layer.least) ** ((level - 1) / 254) if level else None for level in levels]


def test_a_bin_has_the_length_of_the_step_that_one_is_in() -> None:
    rows = {
        3: row(*(step(at * 100, 100, data=20, collective=50) for at in range(20))),
        5: row(*(step(at * 100, 100, data=60, collective=10) for at in range(10)), step(1_500, 500)),
    }
    drawn = heat.draw(rows)
    assert drawn is not None
    assert drawn.rows == [[3], [5]]
    assert drawn.columns <= MOST
    assert drawn.start_ns <= T0 < drawn.start_ns + drawn.width_ns
    whole, own_time, waiting = (values(layer) for layer in drawn.layers)
    one, other = whole[: drawn.columns], whole[drawn.columns :]
    assert {value and round(value) for value in one[1:-1]} == {100}
    # From 1 s to 1.5 s there was no step; then one that fills all bins that it lasts over.
    at = [(T0 + place * MS - drawn.start_ns) // drawn.width_ns for place in (900, 1_250, 1_510, 1_990)]
    assert [value and round(value) for value in map(other.__getitem__, at)] == [100, None, 500, 500]
    assert {value and round(value) for value in own_time[1 : drawn.columns - 1]} == {50}
    assert [waiting[at[0]], waiting[drawn.columns + at[0]]] == pytest.approx([20.0, 60.0], rel=0.02)


def test_many_ranks_share_rows_and_the_slowest_is_seen() -> None:
    ranks = {rank: row(step(0, 300 if rank == 1_501 else 100)) for rank in range(2_500)}
    drawn = heat.draw(ranks)
    assert drawn is not None
    assert len(drawn.rows) <= heat.MOST_ROWS
    assert [rank for those in drawn.rows for rank in those] == list(range(2_500))
    whole = values(drawn.layers[0])
    slow = next(at for at, those in enumerate(drawn.rows) if 1_501 in those)
    assert {round(value) for value in whole[slow * drawn.columns :][: drawn.columns] if value} == {300}
    assert {round(value) for value in whole[: drawn.columns] if value} == {100}


@pytest.mark.parametrize(
    "odd",
    [{"duration": -5}, {"duration": "long"}, {"start": None}, {"duration": 1 << 70}, {"unfinished": True},
     {"duration": 0}],
)  # fmt: skip
def test_what_is_no_step_is_not_in_the_picture(odd: dict[str, Any]) -> None:
    assert heat.draw({0: row({**step(0, 100), **odd})}) is None
    assert heat.draw({0: row({**step(0, 100), "metrics": [1]}), 1: Row()}) is not None


def told(*groups: tuple[str, str, int, int]) -> RankTraffic:
    """Of each group: torch's name, the operation, the group's size, bytes."""
    made = RankTraffic()
    for name, operation, size, moved in groups:
        tags = {"collective.group_name": name, "collective.group": f"<{name}>", "collective.op": operation}
        made.add({"tags": tags, "metrics": {"collective.group_size": size, "collective.bytes": moved}})
    return made


def cells(drawn: traffic.Matrix) -> dict[tuple[int, int], float]:
    many = len(drawn.blocks)
    levels = base64.b64decode(drawn.levels)
    return {
        (at // many, at % many): drawn.least * (drawn.most / drawn.least) ** ((level - 1) / 254)
        for at, level in enumerate(levels)
        if level
    }


def test_a_ranks_bytes_go_to_the_others_of_its_group() -> None:
    drawn = traffic.draw({
        0: told(("w", "all_reduce", 3, 200), ("p", "isend", 2, 900)),
        1: told(("w", "all_reduce", 3, 200), ("p", "irecv", 2, 900)),
        2: told(("w", "unseen", 3, 200), ("w", "send", 3, 50), ("alone", "all_reduce", 1, 70)),
    })  # fmt: skip
    assert drawn is not None
    expected = {(0, 1): 1_000, (0, 2): 100, (1, 0): 100, (1, 2): 100, (2, 0): 100, (2, 1): 100}
    assert cells(drawn) == pytest.approx(expected, rel=0.02)
    assert drawn.unplaced == {"<w>": 50}
    assert drawn.total == 200 * 3 + 900 + 50 + 70


def test_of_many_ranks_blocks_talk_to_blocks() -> None:
    ranks = {rank: told(("w", "all_reduce", 1_024, 1_023), (f"pair{rank // 2}", "broadcast", 2, 10**6))
             for rank in range(1_024)}  # fmt: skip
    drawn = traffic.draw(ranks)
    assert drawn is not None
    assert len(drawn.blocks) <= traffic.MOST_BLOCKS
    found = cells(drawn)
    size = len(drawn.blocks[0])
    assert found[0, 1] == pytest.approx(size * size, rel=0.1)
    assert found[5, 5] == pytest.approx(size * 10**6, rel=0.1)


def test_two_that_were_the_same_rank_count_together() -> None:
    view = View()
    for rank, moved in ((0, 100), (0, 300), (1, 50)):
        view.add(rank, RankView(History(rank, {}), traffic=told(("w", "all_reduce", 2, moved))))
    drawn = traffic.draw(view.traffic)
    assert drawn is not None
    assert cells(drawn) == pytest.approx({(0, 1): 400, (1, 0): 50}, rel=0.02)
    assert drawn.total == 450


def test_nobody_who_says_anything_makes_no_picture() -> None:
    assert traffic.draw({0: RankTraffic(), 1: told(("w", "barrier", 2, 0))}) is None
    assert traffic.draw({}) is None


def scalar(step: int | None, **metrics: Any) -> dict[str, Any]:
    return {"type": "scalar", "ts": T0 + (step or 0), "metrics": metrics} | ({} if step is None else {"step": step})


def test_numbers_are_binned_by_step_and_what_is_not_finite_is_marked() -> None:
    series, other = AllSeries(), AllSeries()
    for at in range(1, 5_001):
        series.add(scalar(at, loss=1.0 / at))
        other.add(scalar(at, loss=3.0 / at))
    series.add(scalar(2_500, loss=float("nan"), odd="text", truth=True, huge=10**400))
    series.pour(other)
    bins = series.series["loss"].by_step
    assert len(bins.cells) <= MOST
    assert sum(cell.count for cell in bins.cells.values()) == 10_000
    assert sum(cell.odd for cell in bins.cells.values()) == 1
    assert set(series.series) == {"loss", "huge"}
    drawn = plots(series, ["huge", "loss", "nowhere"])
    assert drawn is not None
    parsed = Parsed(drawn)
    assert [attributes["aria-label"] for name, attributes in parsed.elements if name == "svg"] == [
        "huge: no finite number",
        "loss: 0.0002 to 3",
    ]
    assert sum(attributes.get("class") == "odd" for _, attributes in parsed.elements) == 2
    assert "step 1" in parsed.text


def test_names_beyond_what_can_be_plotted_are_counted() -> None:
    series = AllSeries()
    for number in range(MOST_NAMES + 7):
        series.add(scalar(None, **{f"n{number}": 1.0}))
        series.add(scalar(None, **{f"n{number}": 2.0}))
    assert len(series.series) == MOST_NAMES
    assert series.left_out == 7
    drawn = plots(series, [f"n{number}" for number in range(MOST_NAMES + 7)])
    assert drawn is not None
    assert "7 more names" in Parsed(drawn).text


@example([0.0, 5e-324])
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=5))
def test_whatever_the_numbers_are_a_plot_is_drawn_of_ones_that_are_finite(numbers: list[float]) -> None:
    series = AllSeries()
    for at, value in enumerate(numbers):
        series.add(scalar(at, loss=value))
    drawn = plots(series, ["loss"])
    assert drawn is not None
    for name, attributes in Parsed(drawn).elements:
        for where in ("points", "x1", "x2", "y1", "y2", "cx", "cy"):
            for one in (attributes.get(where) or "").replace(",", " ").split():
                assert 0 <= float(one) <= 300, (name, attributes)
