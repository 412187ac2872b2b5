"""Who waits for whom: calls of all ranks, joined by what they have in common."""

from __future__ import annotations

import math
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.cli.collective_tables import CLEARLY
from ddtrace_pytorch.cli.stragglers import CALLS_NEEDED, Lateness, Stragglers, Waiting, by_chance

# DeepSpeed's bug report: joined by sequence number, the lateness that rank 0 suffered sums to 4 ms.
RANK_0 = [3, 1, 2, 4, 1.5]
RANK_1 = [1, 3, 2.5, 2, 4]


def calls(took_ms: list[float], **fields: Any) -> list[dict[str, Any]]:
    return [
        {"op": "all_reduce", "key": key, "duration": round(ms * 1e6), "source": "completion", **fields}
        for key, ms in enumerate(took_ms, 1)
    ]


def join(*by_rank: list[dict[str, Any]]) -> Stragglers | None:
    waiting = Waiting()
    for rank, records in enumerate(by_rank):
        for record in records:
            waiting.add(rank, record)
    return waiting.told("world", "0")


def told(*by_rank: list[dict[str, Any]]) -> Stragglers:
    found = join(*by_rank)
    assert found is not None
    return found


def test_the_rank_that_waits_least_is_the_late_one() -> None:
    found = told(calls(RANK_0), calls(RANK_1))
    assert found == Stragglers(
        group="world",
        name="0",
        calls=5,
        first_step_calls=0,
        unmatched=0,
        late_rank=0,
        # Each without its longest: 2.5 ms of 4.5 ms.
        late_share=pytest.approx(5 / 9),
        # Three calls of five are not much more than half: exp(-5 * (0.6 ln 1.2 + 0.4 ln 0.8)), of either rank.
        late_by_chance=1.0,
        # Rank 0 waited 4 ms for rank 1, and rank 1 waited 5 ms for rank 0.
        ranks=[Lateness(0, 5.0, 4.0, 3, 2.0), Lateness(1, 4.0, 5.0, 2, 2.0)],
    )


def test_calls_are_joined_by_their_key_in_whatever_order_they_are_written() -> None:
    expected = told(calls(RANK_0), calls(RANK_1))
    shuffled = random.Random(7)
    for _ in range(20):
        ranks = calls(RANK_0), calls(RANK_1)
        for records in ranks:
            shuffled.shuffle(records)
        assert told(*ranks) == expected


@pytest.mark.parametrize("keep", ["rank 0 has more", "rank 1 has more"])
def test_a_call_that_one_rank_lacks_is_left_out_and_counted(keep: str) -> None:
    ranks = [calls(RANK_0), calls(RANK_1)]
    del ranks[0 if keep == "rank 1 has more" else 1][
        1
    ]  # number 2 of one of them: the lists no longer match by position
    found = told(*ranks)
    assert (found.calls, found.unmatched) == (4, 1)
    assert [(one.made_others_wait_ms, one.waited_for_others_ms) for one in found.ranks] == [(3.0, 4.0), (4.0, 3.0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_that_a_rank_has_twice_is_left_out(rank: int) -> None:
    ranks = [calls(RANK_0), calls(RANK_1)]
    ranks[rank].append({**ranks[rank][0], "duration": 9_000_000})
    found = told(*ranks)
    assert (found.calls, found.unmatched) == (4, 3)
    assert [(one.made_others_wait_ms, one.waited_for_others_ms) for one in found.ranks] == [(5.0, 2.0), (2.0, 5.0)]


def test_of_more_ranks_the_others_wait_on_average_and_each_for_itself() -> None:
    found = told(calls([10, 1]), calls([2, 5]), calls([6, 5]))
    assert found.ranks == [Lateness(0, 4.0, 8.0, 1, 4.0), Lateness(1, 6.0, 4.0, 1, 6.0), Lateness(2, 0.0, 8.0, 0, None)]
    assert found.late_rank == 1


def test_one_long_call_makes_nobody_late() -> None:
    """Rank 1 is the last in nine calls of ten; rank 0 once, and that takes longer than all others together."""
    found = told(calls([20] * 9 + [1]), calls([1] * 9 + [1000]))
    assert (found.late_rank, found.late_share) == (1, 1.0)
    assert [(one.late_calls, one.typical_wait_ms) for one in found.ranks] == [(1, 999.0), (9, 19.0)]


def names_somebody(found: Stragglers) -> bool:
    return found.are_enough and found.late_share is not None and found.late_share >= CLEARLY


def exactly(last_in: int, calls: int, ranks: int) -> float:
    """How likely it is that one rank of equal ones is the last in at least as many of the calls."""
    each = 1 / ranks
    return sum(math.comb(calls, k) * each**k * (1 - each) ** (calls - k) for k in range(last_in, calls + 1))


@given(st.data(), st.integers(2, 64), st.integers(1, 200))
def test_how_likely_chance_makes_a_rank_the_last_so_often_is_never_told_too_low(
    data: st.DataObject, ranks: int, calls: int
) -> None:
    last_in = data.draw(st.integers(0, calls))
    told = by_chance(last_in, calls, ranks)
    assert told >= min(1.0, ranks * exactly(last_in, calls, ranks)) * (1 - 1e-9)
    assert told == pytest.approx(min(1.0, ranks ** (1 - calls))) or last_in < calls, "of all calls it is known exactly"


TIMES_MS = st.floats(0.01, 10_000)


@given(st.data(), st.integers(2, 6), st.integers(1, CALLS_NEEDED - 1))
def test_of_few_calls_nobody_is_called_late_whatever_they_took(data: st.DataObject, ranks: int, many: int) -> None:
    took = data.draw(st.lists(st.lists(TIMES_MS, min_size=many, max_size=many), min_size=ranks, max_size=ranks))
    assert not names_somebody(told(*map(calls, took)))


@given(st.integers(0, 2**32), st.integers(2, 16), st.integers(CALLS_NEEDED, 200), st.sampled_from([0.1, 1.0, 3.0]))
def test_of_equal_ranks_none_is_called_late_however_much_their_times_vary(
    seed: int, ranks: int, many: int, spread: float
) -> None:
    chance = random.Random(seed)
    took = [[chance.lognormvariate(0, spread) for _ in range(many)] for _ in range(ranks)]
    assert not names_somebody(told(*map(calls, took)))


@given(st.integers(0, 2**32), st.integers(2, 16), st.integers(60, 200), st.data())
def test_a_rank_that_comes_late_to_most_calls_is_called_late(
    seed: int, ranks: int, many: int, data: st.DataObject
) -> None:
    late = data.draw(st.integers(0, ranks - 1))
    chance = random.Random(seed)
    took: list[list[float]] = [[] for _ in range(ranks)]
    for _ in range(many):
        # Who comes when, in ms; all leave together a millisecond after the last one came.
        comes = [chance.expovariate(1) + 10 * (rank == late) for rank in range(ranks)]
        for rank, at in enumerate(comes):
            took[rank].append(max(comes) + 1 - at)
    found = told(*map(calls, took))
    assert names_somebody(found)
    assert found.late_rank == late


@pytest.mark.parametrize("first_step", [100, None])
def test_calls_of_the_first_step_and_before_it_are_left_out(first_step: int | None) -> None:
    in_steps = [None, 100, 100, 101, 101]
    waiting = Waiting()
    for rank, took in enumerate((RANK_0, RANK_1)):
        one = Waiting()
        for record, step in zip(calls(took), in_steps, strict=True):
            one.add(rank, {**record, "step": step})
        if first_step is not None:
            one.began_with(first_step)
        waiting.pour(one)
    found = waiting.told("world", "0")
    assert found is not None
    assert (found.calls, found.first_step_calls, found.unmatched) == ((5, 0, 0) if first_step is None else (2, 3, 0))
    if first_step is not None:
        assert [one.made_others_wait_ms for one in found.ranks] == [2.5, 2.0]


def test_nobody_is_late_where_nobody_waits() -> None:
    found = told(calls([2, 2]), calls([2, 2]))
    assert (found.late_rank, found.late_share) == (None, None)
    assert [one.late_calls for one in found.ranks] == [0, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "issue"},
        {"source": "none"},
        {"op": "broadcast"},  # its root need not wait for anybody
        {"op": "isend"},
        {"key": None},
        {"key": "1"},
        {"duration": -1},
        {"duration": 2**70},
        {"duration": "long"},
    ],
    ids=str,
)
def test_a_call_that_tells_nothing_of_who_came_when_is_passed_over(fields: dict[str, Any]) -> None:
    assert join(calls(RANK_0, **fields), calls(RANK_1, **fields)) is None


def test_ranks_that_were_in_different_operations_are_not_compared() -> None:
    ranks = calls([1, 1]), calls([2, 2])
    ranks[1][1]["op"] = "barrier"
    assert told(*ranks).calls == 1


def test_one_rank_alone_is_compared_with_nobody() -> None:
    assert join(calls(RANK_0)) is None
    assert join() is None


def test_a_long_job_of_many_ranks_costs_a_few_bytes_a_call() -> None:
    tracemalloc.start()
    try:
        waiting = Waiting()
        for rank in range(8):
            for key in range(2_000):
                waiting.add(rank, {"op": "all_reduce", "key": key, "duration": 1000 + rank, "source": "completion"})
        found = waiting.told("world", "0")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found.calls == 2_000
    # Somewhat more than a hundred bytes for each number, once; four for each call of each rank.
    assert most < 2_000 * (190 + 8 * 4) + 50_000
