"""How often kernels are sampled, so that it costs no more than it may. Pure.

A sampled step is compared with the steps around it that aren't: what it takes longer, spread over the steps from one
sampled to the next, is what sampling costs. Where that is more than the budget, the interval doubles; where half the
interval would cost less than half of the budget, it is halved again, down to what was asked for. Intervals are the one
that was asked for times a power of two, so that ranks which sample at different ones still share steps.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# Steps of each kind that are compared, and how many there have to be.
_COMPARED, _FEW = 31, 8
_LONGEST = 1024


class SamplingBudget:
    """`asked`: every how many steps one is sampled, 0: never; `share`: what that may cost, of the time of all steps."""

    def __init__(self, asked: int, share: float) -> None:
        self.asked = asked
        self._share = share
        self._factor = 1
        self._sampled: deque[int] = deque(maxlen=_COMPARED)
        self._others: deque[int] = deque(maxlen=_COMPARED)

    @property
    def every(self) -> int:
        return self.asked * self._factor

    def is_due(self, number: int) -> bool:
        """Whether the step of that number is to be sampled."""
        return self.asked > 0 and number % self.every == 0

    def add(self, sampled: bool, took: int) -> None:
        """A step took so long, in any unit."""
        (self._sampled if sampled else self._others).append(took)

    @property
    def added(self) -> float | None:
        """What a sampled step takes longer, as a share of one that isn't; None where it isn't known yet."""
        sampled, others = tuple(self._sampled), tuple(self._others)
        if len(sampled) < _FEW or len(others) < _FEW:
            return None
        usual = median(others)
        return max(median(sampled) - usual, 0) / usual if usual else None

    @property
    def cost(self) -> float | None:
        """What sampling costs of the time of all steps; None where it isn't known yet."""
        added = self.added
        return added / self.every if added is not None and self.every else None

    def settle(self) -> bool:
        """Change the interval if that is called for; whether it was changed."""
        cost = self.cost
        if cost is None:
            return False
        if cost > self._share and self._factor < _LONGEST:
            self._factor *= 2
        elif self._factor > 1 and cost * 2 < self._share / 2:
            self._factor //= 2
        else:
            return False
        # What it costs now has to show in steps of now.
        self._sampled.clear()
        return True
