"""Whether what a rank has not said yet may change a verdict. Pure.

A rank that dies in a collective may have been ended by what a peer sent it. That peer hears of it at the same moment as
all others, and until it has written what it was in nobody knows that it was in the same call.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddtrace_pytorch.stalls.roll import Life, RankState
from ddtrace_pytorch.stalls.verdict import Kind, Verdict


def may_change(verdict: Verdict, states: Mapping[int, RankState], since: int) -> bool:
    """Whether a culprit died in a call of which a peer, that lives, may still say that it was another one: it has not
    said anything since then (ns), and of what it said before that call is not a part."""
    return any(
        not _has_said(states[rank], here.name, here.current.key, since)
        for one in verdict.culprits
        if one.kind is Kind.GONE and one.state is not None and one.life is Life.DEAD
        for here in one.state.groups.values()
        if here.current is not None and here.current.key
        for rank in here.ranks
        if rank != one.rank and rank in states and states[rank].life is Life.ALIVE
    )


def _has_said(state: RankState, group: str, key: int, since: int) -> bool:
    here, raised = state.groups.get(group), state.raised
    came = here is not None and here.entered >= key
    came = came or (raised is not None and (raised.group, raised.call.key) == (group, key))
    # What a thread is in is written when it enters it.
    return came or state.as_of >= since or any(one.current is not None for one in state.groups.values())
