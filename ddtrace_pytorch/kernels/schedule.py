"""Which steps a profiler window takes. Pure.

Counted in steps of the whole training, so that all ranks take the same ones, after a resume too: every 500 steps means
the steps 500, 1,000, 1,500, whenever this process came in.
"""

from __future__ import annotations

from typing import NamedTuple


class Plan(NamedTuple):
    """A window over the `active` steps from `first` on, with so many `warmup` steps before them."""

    first: int
    active: int
    warmup: int = 0

    @property
    def warms_up_at(self) -> int:
        return self.first - self.warmup

    @property
    def ends_before(self) -> int:
        """The first step that is no part of it any more."""
        return self.first + self.active

    def begins_with(self, step: int) -> bool:
        """Whether it can be begun as `step` begins, and still have all of its active steps."""
        return self.warms_up_at <= step <= self.first


class Schedule(NamedTuple):
    """A window every so many steps: `every` is 0 where there is none."""

    every: int
    warmup: int
    active: int

    @property
    def overlaps(self) -> bool:
        """Whether a window would begin before the last one has ended: nobody can keep to that."""
        return 0 < self.every < self.warmup + self.active

    def plan_at(self, step: int) -> Plan | None:
        """The window that can be begun as `step` begins."""
        if self.every <= 0:
            return None
        first = (step + self.warmup) // self.every * self.every
        if step > first or first <= 0:
            return None
        return Plan(first, self.active, self.warmup)

    def idle_until(self, step: int) -> int:
        """The first step after `step` with which another window can be begun than the one that can be with it."""
        if self.every <= 0:
            return step + 1
        first = max((step + self.warmup) // self.every, 0) * self.every
        return max(first + self.every - self.warmup, step + 1)

    def again(self, failed: Plan) -> Plan | None:
        """Where to try once more what one window has missed: the same on all ranks, and out of the next one's way."""
        if self.every <= 0:
            return None
        first = failed.ends_before + self.every // 4 + self.warmup
        again = Plan(first, failed.active, self.warmup)
        next_one = (failed.first // self.every + 1) * self.every - self.warmup
        return again if again.ends_before <= next_one else None
