"""Which line of a track a span is drawn on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.timeline.lanes import InTurn, pack


def packed(*spans: tuple[int, int, object]) -> list[int]:
    return [*pack([one[0] for one in spans], [one[1] for one in spans], [one[2] for one in spans])]


def test_nested_spans_share_a_line() -> None:
    assert packed((2, 3, None), (4, 5, None), (1, 6, None), (7, 9, None)) == [0, 0, 0, 0]


def test_spans_that_overlap_and_do_not_nest_are_on_two() -> None:
    assert packed((1, 5, None), (3, 8, None), (6, 7, None)) == [0, 1, 1]


def test_a_task_keeps_its_line_while_it_has_spans_open_and_gives_it_back() -> None:
    # In the order in which they ended: a's child, all of b, a, and c when both are over.
    assert packed((2, 3, "a"), (4, 5, "b"), (1, 6, "a"), (6, 8, "c"), (7, 9, "d")) == [0, 1, 0, 0, 1]


def test_a_task_does_not_lie_in_the_spans_of_another() -> None:
    assert packed((3, 4, "b"), (1, 9, "a")) == [1, 0]


def test_what_took_no_time_and_what_took_the_same_time() -> None:
    assert packed((5, 5, "a"), (5, 5, "a"), (5, 5, "b"), (1, 5, "a"), (1, 5, "a")) == [0, 0, 0, 0, 0]


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 3)), max_size=40)


@given(spans)
def test_what_shares_a_line_nests_or_is_apart_and_overlapping_tasks_share_none(
    found: list[tuple[int, int, int]],
) -> None:
    made = sorted(((start, start + took, owner) for start, took, owner in found), key=lambda one: one[1])
    lanes = packed(*made)
    for at, (start, end, owner) in enumerate(made):
        for before, (other_start, other_end, other) in enumerate(made[:at]):
            if lanes[at] != lanes[before] or min(end, other_end) <= max(start, other_start):
                continue
            assert owner == other
            assert (start <= other_start and other_end <= end) or (other_start <= start and end <= other_end)


@given(spans)
def test_no_more_lines_than_are_needed_where_nothing_nests(found: list[tuple[int, int, int]]) -> None:
    made = sorted(((start, start + took + 1, at) for at, (start, took, _) in enumerate(found)), key=lambda one: one[1])
    at_once = max((sum(one[0] <= start < one[1] for one in made) for start, *_ in made), default=0)
    assert len({*packed(*made)}) == at_once


def test_in_turn() -> None:
    lanes = InTurn()
    assert [lanes.lane(1, 4), lanes.lane(4, 6), lanes.lane(5, 7), lanes.lane(6, 8)] == [0, 0, 1, 0]
    # Late, and before the first was over.
    assert lanes.lane(3, 9) == 2


@given(spans)
def test_nothing_in_turn_overlaps_in_whichever_order_it_comes(found: list[tuple[int, int, int]]) -> None:
    lanes = InTurn()
    made = [(start, start + took, lanes.lane(start, start + took)) for start, took, _ in found]
    for at, (start, end, lane) in enumerate(made):
        for other_start, other_end, other in made[:at]:
            assert lane != other or end <= other_start or other_end <= start


def test_lanes_take_time_in_proportion_to_the_spans_whatever_they_are() -> None:
    many = 50_000  # squared, that would not end within the test's time
    pack(range(many), range(many, 2 * many), [None] * many)
    pack(range(many), range(many, 2 * many), range(many))
    lanes = InTurn()
    assert [lanes.lane(at, at + many) for at in range(many)] == [*range(many)]
