"""Groups that talk more slowly than others of their kind. Pure.

The member of a group that waits least for the others has, in its time in collectives, little but the talking itself. So
of groups that are alike (one label, one size: the ``tp`` groups of a mesh, say) the one whose *least* time a call is
long is slow in communication, and its ranks make everybody wait who waits for them elsewhere.

The field names of :class:`SlowGroup` are keys of ``report --json`` (adding is free, renaming needs a release note).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

# As many times the usual time of a call has to be taken, and so much of the attempt's time to be lost by it.
NOTABLE = 1.5
WORTH_TELLING = 0.01


class Talk(NamedTuple):
    """One group: `ms` in collectives, and calls, of the member that waits least a call."""

    label: str
    name: str
    size: int
    backend: str
    ranks: Sequence[int]
    ms: float
    calls: int


@dataclass
class SlowGroup:
    """`call_ms`: of the member that waits least; `usual_ms`: the median of the groups like it, of which there are
    `alike`. `lost_s`: what the group took longer than usual in all."""

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
        if one.calls > 0 and len(one.ranks) == one.size:
            kinds.setdefault((one.label, one.size, one.backend), []).append(one)
    found = []
    for alike in kinds.values():
        usual = median_low(one.ms / one.calls for one in alike)
        for one in alike:
            call = one.ms / one.calls
            lost = (call - usual) * one.calls / 1e3
            if usual > 0 and call >= NOTABLE * usual and lost >= WORTH_TELLING * seconds:
                found.append(SlowGroup(one.label, one.name, sorted(one.ranks), call, usual, len(alike), lost))
    return sorted(found, key=lambda one: (-one.lost_s, one.ranks))
