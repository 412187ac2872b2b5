"""Which calls are recorded by themselves: the same on every rank, whatever level each has come to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.sampling import chosen, following, level_for

levels = st.integers(0, 20)


@given(st.integers(0, 10_000), levels)
def test_one_call_of_each_block_is_chosen(block: int, level: int) -> None:
    assert block << level <= chosen(block, level) < (block + 1) << level


@given(st.integers(0, 100_000), levels, levels)
def test_what_a_higher_level_chooses_every_lower_one_does_too(number: int, one: int, other: int) -> None:
    low, high = sorted((one, other))
    call = following(number, high)
    assert following(call - 1, low) == call


@given(st.integers(0, 100_000), levels)
def test_the_next_is_the_least_that_is_chosen(number: int, level: int) -> None:
    call = following(number, level)
    assert number < call <= number + (2 << level)
    blocks = range(number >> level, (call >> level) + 1)
    assert call == min(one for block in blocks if (one := chosen(block, level)) > number)


@given(st.integers(0, 10**9), st.integers(1, 100))
def test_the_level_keeps_to_the_share(calls: int, share: int) -> None:
    level = level_for(calls, share)
    assert calls / 2**level <= share
    assert level == 0 or calls / 2 ** (level - 1) > share


def test_a_step_of_sixteen_calls_does_not_always_show_the_same_one() -> None:
    places = {chosen(block, 4) % 16 for block in range(200)}
    assert len(places) > 10
