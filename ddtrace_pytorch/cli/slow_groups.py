"""Groups that talk more slowly than others of their kind. Pure.

The member of a group that waits least for the others has, in its time in collectives, little but the talking itself. So
of groups that are alike (one label, one size: the ``tp`` groups of a mesh, say) the one whose *least* time a call is
long is slow in communication, and its ranks make everybody wait who waits for them elsewhere.

The mean of a few calls differs by chance alone, and one call can be longer than all others together. So the longest
call of each is left out, and what two groups differ by has to be several times what their means may be off by: that is
the less, the more calls there are.

The field names of :class:`SlowGroup` are keys of ``report --json`` (adding is free, renaming needs a release note).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# As many times the usual time of a call has to be taken, and so much of the attempt's time to be lost by it.
NOTABLE = 1.5
WORTH_TELLING = 0.01
# In fewer calls nobody is slow; and so many times the standard errors of both means they have to be apart.
CALLS_NEEDED = 20
APART = 4


class Talk(NamedTuple):
    """One group: `ms` in collectives, and calls, of the member that waits least a call, without its longest; and the
    sum of the squares of these calls, or more."""

    label: str
    name: str
    size: int
    backend: str
    ranks: Sequence[int]
    ms: float
    calls: int
    squares: float

    @property
    def call_ms(self) -> float:
        return self.ms / self.calls

    @property
    def error(self) -> float:
        """How far the mean may be off: its squared standard error, or more."""
        return max(self.squares / self.calls - self.call_ms**2, 0.0) / self.calls


@dataclass
class SlowGroup:
    """`call_ms`: of the member that waits least, without its longest call; `usual_ms`: the median of the groups like
    it, of which there are `alike`. `lost_s`: what the group took longer than usual in all."""

    group: str
    name: str
    ranks: list[int]
    call_ms: float
    usual_ms: float
    alike: int
    lost_s: float


def slow_among(groups: Iterable[Talk], seconds: float) -> list[SlowGroup]:
    """Those that lost a notable part of `seconds`, the one that lost most first."""
    kinds: dict[tuple[str, int, str], list[Talk]] = {}
    for one in groups:
        if one.calls >= CALLS_NEEDED and len(one.ranks) == one.size:
            kinds.setdefault((one.label, one.size, one.backend), []).append(one)
    found = []
    for alike in kinds.values():
        usual = sorted(alike, key=lambda one: one.call_ms)[(len(alike) - 1) // 2]
        for one in alike:
            more = one.call_ms - usual.call_ms
            lost = more * one.calls / 1e3
            notable = usual.ms > 0 and one.call_ms >= NOTABLE * usual.call_ms and lost >= WORTH_TELLING * seconds
            if notable and more > APART * math.sqrt(one.error + usual.error):
                ranks, kind = sorted(one.ranks), len(alike)
                found.append(SlowGroup(one.label, one.name, ranks, one.call_ms, usual.call_ms, kind, lost))
    return sorted(found, key=lambda one: (-one.lost_s, one.ranks))
