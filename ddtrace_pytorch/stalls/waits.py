"""Who waits where, and whom a place lacks. Pure.

A *place* is one call that ranks meet in: a numbered collective of a group, a transfer between two ranks, or a barrier
without a number. A rank waits in the places it is in; a place lacks the ranks that have not come to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ddtrace_pytorch.stalls.got_over import is_echo
from ddtrace_pytorch.stalls.mismatch import differ, ring_of
from ddtrace_pytorch.stalls.roll import Call, GroupState, Life, RankState

# ns. A state file may be as old as two beats, so a younger call is not waited in yet; what it shows is still changing.
FRESH = 2 * 10**9


class Spot(NamedTuple):
    """Where ranks meet. `key`: the collective's number, or 0, and then the `operation`; `pair`: of a transfer, the two
    ranks in order where they have met, else who waits and for whom."""

    group: str
    key: int
    operation: str = ""
    pair: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wait:
    """A `rank` in a `call`, since `age` ns by its own clock. `error`: what it raised, if it is not in it any more."""

    rank: int
    group: GroupState
    call: Call
    age: int
    error: str | None = None


@dataclass
class Place:
    """`waits` there, by rank; who it `lacks`; `left`: those of them who went by an exception of their own; `runs`: all
    seems well, for everybody came, and it has only begun, or is ending."""

    spot: Spot
    waits: dict[int, Wait] = field(default_factory=dict)
    lacks: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    runs: bool = False

    @property
    def any_wait(self) -> Wait:
        return next(iter(self.waits.values()))

    @property
    def age(self) -> int:
        return max(wait.age for wait in self.waits.values())

    @property
    def raised_by_itself(self) -> bool:
        """Whether all who came raised what no other rank was the reason of."""
        return all(wait.error is not None and not is_echo(wait.error) for wait in self.waits.values())


def waits_in(roll: Mapping[int, RankState], now: int, threshold: int) -> list[Wait]:
    """Every wait of every rank. Ranks that died while they waited long are among them only if nobody lives who waits:
    then it is over, and they are those whom a time-out ended. Where a rank is dead nobody has to have waited long: not
    who is in a call that lacks it, nor it itself if it died in another call than its peers."""
    fresh = min(FRESH, threshold // 2)
    calls = {rank: list(_calls(state, now)) for rank, state in roll.items()}
    alive = [wait for rank, waits in calls.items() if roll[rank].life is Life.ALIVE for wait in waits]
    gone = [wait for rank, waits in calls.items() if roll[rank].life in (Life.DEAD, Life.ENDED) for wait in waits]
    living = [wait for wait in alive if wait.age >= fresh]
    held = living or [wait for wait in gone if wait.age >= threshold - fresh]
    dead = {rank for rank, state in roll.items() if state.life is Life.DEAD}
    if dead:
        held += [wait for wait in alive if wait.age < fresh and _is_in_vain(wait, roll, dead)]
        here = {wait.rank for wait in held}
        died = [wait for wait in gone if wait.rank in dead - here and wait.call.key]
        places = {(wait.group.name, wait.call.key): wait.group.ranks for wait in died}
        apart = {place for place, ranks in places.items() if _differ(*place, ranks, roll)}
        held += [wait for wait in died if (wait.group.name, wait.call.key) in apart]
    return held + [wait for state in roll.values() for wait in _raised(state)]


def _is_in_vain(wait: Wait, roll: Mapping[int, RankState], dead: set[int]) -> bool:
    spot = Spot(wait.group.name, wait.call.key)
    return bool(spot.key) and any(not _completed(roll[rank], spot) for rank in dead.intersection(wait.group.ranks))


def _differ(group: str, key: int, ranks: Collection[int], roll: Mapping[int, RankState]) -> bool:
    """Whether ranks made different calls in one place: by that one may have ended another."""
    rings = {rank: ring_of(roll[rank], group) for rank in ranks if rank in roll}
    return differ(rings, key)


def _calls(state: RankState, now: int) -> Iterator[Wait]:
    for group in state.groups.values():
        # Nobody knows whether what torch itself issued came to its end before the rank did.
        call = group.current or (group.issued if state.life is Life.DEAD else None)
        if call is not None:
            # What was entered since the last beat is younger than that.
            yield Wait(state.rank, group, call, max(0, age_of(call, state, now)))


def age_of(call: Call, state: RankState, now: int) -> int:
    """ns since the call was entered, by the rank's own clock, which may differ from ours; long, if that is unknown."""
    return (state.as_of or now) - call.since


def _raised(state: RankState) -> Iterator[Wait]:
    raised = state.raised
    group = state.groups.get(raised.group) if raised is not None else None
    if raised is None or group is None or state.life in (Life.SILENT, Life.UNREACHABLE):
        return
    if not 0 < raised.call.key < group.entered:
        age = raised.at - raised.call.since if raised.at and raised.call.since else 0
        yield Wait(state.rank, group, raised.call, age, raised.error)


def faulty_in(roll: Mapping[int, RankState], ranks: Collection[int], waits: Collection[Wait]) -> frozenset[int]:
    """Ranks that nothing can be expected of: unheard, frozen, or gone without having waited for others."""
    waiting = {wait.rank for wait in waits}
    return frozenset(
        rank for rank in ranks if rank not in roll or (roll[rank].life is not Life.ALIVE and rank not in waiting)
    )


def places_of(
    waits: Collection[Wait], roll: Mapping[int, RankState], faulty: frozenset[int], now: int, threshold: int
) -> dict[Spot, Place]:
    """Where the ranks wait."""
    places: dict[Spot, Place] = {}
    for wait in waits:
        spot = _spot(wait, roll)
        place = places.setdefault(spot, Place(spot))
        # A rank that raised is not there any more, even if its last state says so.
        if wait.error is not None or wait.rank not in place.waits:
            place.waits[wait.rank] = wait
    for place in places.values():
        place.lacks = _lacks(place, roll, faulty)
        if not place.lacks & faulty and (left := _left(place)):
            place.lacks = place.left = left
        place.runs = _runs(place, roll, now, threshold)
    return places


def _spot(wait: Wait, roll: Mapping[int, RankState]) -> Spot:
    name, call = wait.group.name, wait.call
    if call.key:
        return Spot(name, call.key)
    if call.peer is None:
        return Spot(name, 0, call.operation)
    if any(_answers(other, wait) for other in _calls_in(roll.get(call.peer), name)):
        return Spot(name, 0, "", (min(wait.rank, call.peer), max(wait.rank, call.peer)))
    return Spot(name, 0, call.operation, (wait.rank, call.peer))


def _answers(other: Call, wait: Wait) -> bool:
    """Whether `other`, of the peer, is the other end of the transfer."""
    return not other.key and other.peer == wait.rank and sends(other) is not sends(wait.call)


def sends(call: Call) -> bool:
    """Whether a transfer between two ranks is the sending end."""
    return "send" in call.operation


def _calls_in(state: RankState | None, group: str) -> list[Call]:
    """The calls that the rank is in, or raised from."""
    if state is None:
        return []
    here, raised = state.groups.get(group), state.raised
    calls = [here.current if here else None, raised.call if raised and raised.group == group else None]
    return [call for call in calls if call is not None]


def _lacks(place: Place, roll: Mapping[int, RankState], faulty: frozenset[int]) -> frozenset[int]:
    spot, ranks, call = place.spot, place.any_wait.group.ranks, place.any_wait.call
    if spot.pair:
        return frozenset(spot.pair) & faulty if not spot.operation else frozenset(spot.pair[1:])
    came = {rank for rank in ranks if _came(roll.get(rank), spot)}
    lacks = frozenset(
        rank for rank in ranks if rank not in came or (rank in faulty and not _completed(roll.get(rank), spot))
    )
    root = call.peer if spot.key else None
    # Before the root has come nobody needs the others.
    if root is not None and root in lacks:
        return frozenset({root})
    # One that left early may have died with what the others wait for; who said goodbye had done its part.
    return lacks or frozenset(rank for rank in faulty.intersection(ranks) if not _ended(roll.get(rank)))


def _ended(state: RankState | None) -> bool:
    return state is not None and state.life is Life.ENDED


def _came(state: RankState | None, spot: Spot) -> bool:
    calls = _calls_in(state, spot.group)
    if not spot.key:
        return any(call.operation == spot.operation for call in calls)
    here = state.groups.get(spot.group) if state else None
    return max((here.entered if here else 0, *(call.key for call in calls))) >= spot.key


def _completed(state: RankState | None, spot: Spot) -> bool:
    here = state.groups.get(spot.group) if state else None
    return here is not None and 0 < spot.key <= here.completed


def _left(place: Place) -> frozenset[int]:
    """Who went by an exception of its own, so that the others wait in vain, or hear that a connection was closed."""
    raised = {rank: wait.error for rank, wait in place.waits.items() if wait.error is not None}
    own = frozenset(rank for rank, error in raised.items() if not is_echo(error))
    if own and len(own) < len(place.waits):
        return own
    return frozenset(raised) if not place.lacks and len(raised) < len(place.waits) else frozenset()


def _runs(place: Place, roll: Mapping[int, RankState], now: int, threshold: int) -> bool:
    if any(wait.error is not None for wait in place.waits.values()):
        return False
    if place.lacks:
        # A peer that has just said goodbye may have met the other, whose last word is older; not one that had raised.
        peers = [peer for rank in place.lacks if (peer := roll.get(rank)) is not None and peer.raised is None]
        fresh = [peer for peer in peers if _ended(peer) and now - peer.as_of < FRESH]
        return bool(place.spot.pair) and len(fresh) == len(place.lacks)
    group, spot = place.any_wait.group, place.spot
    done = [state.groups[spot.group] for rank in group.ranks if (state := roll.get(rank)) and _completed(state, spot)]
    if place.any_wait.call.peer is None and done:
        return True
    # With a root some go on before others. They have only just done so where these have not said anything since.
    heard = min((roll[rank].as_of or now for rank in place.waits), default=now)
    if any(one.completed_at > heard - threshold // 2 for one in done):
        return True
    members = [state for rank in spot.pair or group.ranks if (state := roll.get(rank)) is not None]
    inside = [
        age_of(call, state, now)
        for state in members
        for call in _calls_in(state, spot.group)
        if (call.key == spot.key if spot.key else call.peer is None or call.peer in spot.pair)
    ]
    # None, where there was no room to say who is in the group: nothing is known of it then.
    return min(inside, default=0) < threshold // 2
