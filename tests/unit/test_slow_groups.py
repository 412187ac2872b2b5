"""Which groups talk slowly, of such as differ by chance and such as do not."""

from __future__ import annotations

import random
from collections import Counter

from harness.training import T0, total
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.cli.collectives import Gathering
from ddtrace_pytorch.cli.slow_groups import Talk, slow_among


def talk_of(took_ms: list[float], name: int) -> Talk:
    """As it is found of one rank's summary of these calls."""
    gathering = Gathering(0)
    for rank in (0, 1):
        record = total(T0, "all_reduce", "tp", str(name), 2, len(took_ms), 8)
        record["metrics"] |= {"collective.time_ms.total": sum(took_ms), "collective.time_ms.max": max(took_ms)}
        record["buckets"] = Counter(str(round(one * 1e6).bit_length()) for one in took_ms)
        gathering.add(rank, record)
    (told,) = gathering.told().talks
    return told


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 300), st.sampled_from([0.5, 1.0, 2.0]))
def test_of_equal_groups_none_is_called_slow_however_much_their_calls_vary(
    seed: int, groups: int, calls: int, spread: float
) -> None:
    chance = random.Random(seed)
    talks = [talk_of([chance.lognormvariate(0, spread) for _ in range(calls)], name) for name in range(groups)]
    assert slow_among(talks, 0.0) == []


@given(st.integers(0, 2**32), st.integers(3, 6), st.integers(200, 400))
def test_a_group_whose_calls_take_three_times_as_long_is_called_slow(seed: int, groups: int, calls: int) -> None:
    chance = random.Random(seed)
    took = [[chance.lognormvariate(0, 0.5) * (3 if name == 1 else 1) for _ in range(calls)] for name in range(groups)]
    # One call in which it connected.
    took[0][0] = 1_000.0
    slow = slow_among([talk_of(one, name) for name, one in enumerate(took)], 0.0)
    assert [one.name for one in slow] == ["1"]
