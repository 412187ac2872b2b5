"""Percentiles out of powers of two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.histogram import BUCKETS, percentile


def counted(times: list[int]) -> list[int]:
    buckets = [0] * BUCKETS
    for time in times:
        buckets[time.bit_length()] += 1
    return buckets


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_within_a_factor_of_two_of_the_real_one(times: list[int], share: float) -> None:
    real = sorted(times)[max(0, -(-len(times) * int(share * 100) // 100) - 1)]
    found = percentile(counted(times), share, max(times))
    assert real / 2 <= found <= real * 2


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50))
def test_they_rise_and_never_pass_the_longest(times: list[int]) -> None:
    found = [percentile(counted(times), share, max(times)) for share in (0.0, 0.5, 0.95, 0.99, 1.0)]
    assert found == sorted(found)
    assert found[-1] <= max(times)


def test_nothing_counted_is_the_longest() -> None:
    assert percentile([0] * BUCKETS, 0.5, 7) == 7


def test_an_even_spread() -> None:
    times = list(range(1, 100_001))
    assert percentile(counted(times), 0.5, 100_000) == pytest.approx(50_000, rel=0.1)
