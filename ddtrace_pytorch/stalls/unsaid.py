"""Whether what a rank has not said yet may change a verdict. Pure.

A rank that dies in a collective may have been ended by what a peer sent it. That peer hears of it at the same moment as
all others, and until it has written what it was in nobody knows that it was in the same call.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddtrace_pytorch.stalls.mismatch import ring_of
from ddtrace_pytorch.stalls.roll import Call, GroupState, Life, RankState
from ddtrace_pytorch.stalls.verdict import Kind, Verdict


def may_change(verdict: Verdict, states: Mapping[int, RankState], since: int) -> bool:
    """Whether a culprit died in a call of which a peer, that lives, may still say that it was another one: it has not
    said anything since then (ns), and of what it said before that call is not a part."""
    return any(
        not _has_said(states[rank], here, since)
        for here in _died_in(verdict)
        for rank in here.ranks
        if rank in states and states[rank].life is Life.ALIVE
    )


def is_seen_in_part(verdict: Verdict) -> bool:
    """Whether a culprit died in a group in which torch issues collectives itself: what its peers were in they know when
    they have looked at torch's recorder, and they do that at their end."""
    return any(here.unseen for here in _died_in(verdict))


def _died_in(verdict: Verdict) -> list[GroupState]:
    """The groups as those saw them that died in a collective of them."""
    return [
        here
        for one in verdict.culprits
        if one.kind is Kind.GONE and one.state is not None and one.life is Life.DEAD
        for here in one.state.groups.values()
        if here.later is not None or (here.current is not None and here.current.key)
    ]


def _has_said(state: RankState, died_in: GroupState, since: int) -> bool:
    here, raised = state.groups.get(died_in.name), state.raised
    key = died_in.current.key if died_in.current is not None else 0
    if died_in.unseen:
        seen = (died_in.later or died_in.current or Call("")).seen or 0
        # By the number among those that are seen where nobody knew another one, for then none is in the ring.
        there = here is not None and here.later is not None and (here.later.seen or 0) >= seen
        return there or max(ring_of(state, died_in.name), default=0) >= max(key, 1)
    came = here is not None and here.entered >= key
    came = came or (raised is not None and (raised.group, raised.call.key) == (died_in.name, key))
    # What a thread is in is written when it enters it.
    return came or state.as_of >= since or any(one.current is not None for one in state.groups.values())
