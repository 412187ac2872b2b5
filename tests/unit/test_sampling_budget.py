"""How often kernels are sampled: what it costs decides, as far as it was asked for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.kernels.sampling_budget import SamplingBudget


def train(budget: SamplingBudget, steps: int, added: float, begin: int = 0, usual: int = 50_000_000) -> int:
    """A training whose sampled steps take `added` of their time longer; gives the number of the next step."""
    noise = random.Random(0)
    for number in range(begin, begin + steps):
        sampled = budget.is_due(number)
        took = usual * noise.uniform(0.97, 1.03) * (1 + added * sampled)
        budget.add(sampled, int(took))
        if number % 20 == 19:
            budget.settle()
    return begin + steps


def test_what_costs_too_much_is_done_less_often_and_as_asked_again_once_it_does_not() -> None:
    budget = SamplingBudget(2, 0.01)
    reached = train(budget, 2_000, added=0.2)
    assert budget.every == 32
    assert budget.cost is not None
    assert 0.005 < budget.cost <= 0.01
    train(budget, 20_000, added=0.0, begin=reached)
    assert budget.every == 2


def test_by_default_a_step_in_fifty_may_cost_five_percent_more() -> None:
    budget = SamplingBudget(50, 0.01)
    train(budget, 5_000, added=0.05)
    assert budget.every == 50


def test_off_is_off() -> None:
    budget = SamplingBudget(0, 0.01)
    assert not any(map(budget.is_due, range(1_000)))
    assert budget.settle() is False


@pytest.mark.parametrize("asked", [1, 3, 50])
@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 20))
def test_ranks_at_different_intervals_share_steps(asked: int, mine: int, theirs: int, times: int) -> None:
    budgets = []
    for doubled in (mine, theirs):
        budget = SamplingBudget(asked, 0.0)
        for _ in range(doubled):
            for _ in range(8):
                budget.add(True, 10)
                budget.add(False, 5)
            assert budget.settle()
        budgets.append(budget)
    number = times * max(budget.every for budget in budgets)
    assert all(budget.is_due(number) for budget in budgets)


def test_few_steps_prove_nothing() -> None:
    budget = SamplingBudget(1, 0.01)
    for _ in range(7):
        budget.add(True, 100)
        budget.add(False, 50)
    assert budget.cost is None
    assert budget.settle() is False
