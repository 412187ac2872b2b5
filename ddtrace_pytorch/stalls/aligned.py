"""Numbers of calls that were entered since a rank's last beat, where torch issues collectives itself. Pure.

What a rank's threads enter is written at once, with a call's number among those that came through our wrappers; how
many others there were until then is known at the next beat, which a rank that dies doesn't have. All ranks of a group
make the same calls, but for the one that is wrong: whoever is in the same call of those that are seen, and has beaten
since, knows its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ddtrace_pytorch.stalls.roll import Call, GroupState, RankState


def aligned(roll: Mapping[int, RankState]) -> dict[int, RankState]:
    """`roll` with the calls in the place of `later` ones whose number some rank knows."""
    return {rank: _of_rank(state, roll) for rank, state in roll.items()}


def _of_rank(state: RankState, roll: Mapping[int, RankState]) -> RankState:
    found = {
        name: _entered(here, here.later, key)
        for name, here in state.groups.items()
        if here.later is not None and (key := _key(here.later, name, here, roll)) is not None
    }
    return replace(state, groups={**state.groups, **found}) if found else state


def _key(later: Call, group: str, here: GroupState, roll: Mapping[int, RankState]) -> int | None:
    known = (call for rank in here.ranks if rank in roll for call in _known(roll[rank], group))
    return min((call.key for call in known if call.key and call.seen == later.seen), default=None)


def _known(state: RankState, group: str) -> Iterator[Call]:
    here, raised = state.groups.get(group), state.raised
    if here is not None and here.current is not None:
        yield here.current
    if raised is not None and raised.group == group:
        yield raised.call


def _entered(here: GroupState, later: Call, key: int) -> GroupState:
    call = replace(later, key=key)
    return replace(
        here,
        entered=key,
        completed=key - 1,
        completed_at=call.since,
        current=call,
        recent=(*(one for one in here.recent if one.key < key), call),
        later=None,
    )
