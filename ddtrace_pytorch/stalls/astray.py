"""Of ranks that wait for each other in a circle, the one that goes another way than all others. Pure.

A rank in a circle waits in one call and is missed in another, of another group: it takes them in another order than who
misses it, or it left one out or made one too many, and by the two of them nobody can tell who is wrong. All others can,
where groups of the same label are used alike (:mod:`~ddtrace_pytorch.stalls.kin`): a rank that has come to its call of
the one label and not to its call of the other tells which of them comes first. So do the numbers of steps: a rank that
is in a later one than who waits for it, and hasn't come to that call, has left it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ddtrace_pytorch.stalls.kin import Stage, by_label, stage_of
from ddtrace_pytorch.stalls.mismatch import Detail, Ring, goes_like, ring_of, unheard_of
from ddtrace_pytorch.stalls.roll import GroupState, RankState
from ddtrace_pytorch.stalls.waits import Place

# Those who have to agree, against one: of two that disagree either may be wrong.
VOICES = 2


class Astray(NamedTuple):
    """`rank` is wrong at call `key` of `group`: in the one that it waits in, if `detail` says so, or else in the one
    that it is missed in."""

    rank: int
    group: str
    key: int
    detail: Detail


class _Call(NamedTuple):
    """One that ranks meet in: its number in groups of that label, of which `group` is one, with its `members`."""

    label: str
    key: int
    group: str
    members: tuple[int, ...]
    operation: str


def _call_of(place: Place) -> _Call:
    wait = place.any_wait
    return _Call(wait.group.label, place.spot.key, place.spot.group, wait.group.ranks, wait.call.operation)


@dataclass(frozen=True)
class _Rank:
    """One that waits. `groups`: by label, where it is in one group of that label; `rings` by the groups' names;
    `stands_in`: label and number of the only call that it is in; `step`: of the training, as it counts them."""

    groups: Mapping[str, GroupState]
    rings: Mapping[str, Ring]
    stands_in: tuple[str, int] | None
    stage: Stage
    step: int | None

    def knows(self, one: _Call, other: _Call) -> bool:
        return {one.label, other.label} <= self.groups.keys()

    def came_to(self, call: _Call) -> bool:
        return self.groups[call.label].entered >= call.key

    def is_in(self, call: _Call) -> bool:
        return self.stands_in == (call.label, call.key)

    def was_first_in(self, one: _Call, other: _Call) -> bool:
        """Whether it came to `one` before it came to `other`, if it has."""
        return self.came_to(one) and (not self.came_to(other) or self.is_in(other))

    def ring(self, label: str) -> Ring:
        return self.rings[self.groups[label].name]


def astray(circle: Iterable[int], places: Collection[Place], states: Mapping[int, RankState]) -> Astray | None:
    """Who it is, among the ranks of `circle`, if all others agree that it is this one."""
    waiting = {rank for place in places for rank, wait in place.waits.items() if wait.error is None}
    ranks = {rank: _known(states[rank]) for rank in waiting}
    numbered = sorted((place for place in places if place.spot.key), key=lambda place: (-place.age, place.spot[:2]))
    found = []
    for rank in waiting.intersection(circle):
        here = [_call_of(place) for place in numbered if rank in place.waits]
        missed = [_call_of(place) for place in numbered if rank in place.lacks]
        left_out = next((at for at in missed if _is_past(rank, at, ranks)), None)
        if left_out is not None:
            found.append(Astray(rank, left_out.group, left_out.key, Detail.SKIPPED))
            continue
        alone = ((inside, at) for inside in here for at in missed if _is_alone(rank, inside, at, ranks))
        one = next(alone, None)
        if one is not None:
            found.append(_told(rank, *one, ranks))
    return found[0] if len(found) == 1 else None


def _known(state: RankState) -> _Rank:
    groups = by_label(state)
    calls = [(here.label, here.current.key) for here in state.groups.values() if here.current is not None]
    stands = calls[0] if len(calls) == 1 and state.doing == "collective" else None
    rings = {here.name: ring_of(state, here.name) for here in groups.values()}
    return _Rank(groups, rings, stands, stage_of(state), state.step)


def _is_past(rank: int, missed: _Call, ranks: Mapping[int, _Rank]) -> bool:
    """Whether it has begun a later step than one that waits for it has, and all who have come as far came to that call
    before."""
    mine = ranks[rank]
    others = [
        (one, one.step)
        for other in missed.members
        if other != rank
        and (one := ranks.get(other)) is not None
        and one.stage == mine.stage
        and (here := one.groups.get(missed.label)) is not None
        and here.name == missed.group
        and one.step is not None
    ]
    if mine.step is None or not any(one.is_in(missed) and step < mine.step for one, step in others):
        return False
    as_far = [one.came_to(missed) for one, step in others if step >= mine.step]
    return len(as_far) >= VOICES - 1 and all(as_far)


def _is_alone(rank: int, inside: _Call, missed: _Call, ranks: Mapping[int, _Rank]) -> bool:
    """Whether all others of whom it is known were first in the one in which the rank is missed."""
    mine = ranks[rank]
    if inside.label == missed.label or not mine.knows(inside, missed) or not mine.is_in(inside):
        return False
    others = [one for other, one in ranks.items() if other != rank and one.knows(inside, missed)]
    if any(one.was_first_in(inside, missed) for one in others):
        return False
    voices = (one for one in others if one.was_first_in(missed, inside) and _goes_alike(mine, one, inside, missed))
    return len(list(islice(voices, VOICES))) == VOICES


def _goes_alike(mine: _Rank, other: _Rank, inside: _Call, missed: _Call) -> bool:
    """Whether the other rank can be compared with this one: it is in the same groups, or it runs the same program and
    has made just as many of the same calls in its own."""
    here, there = other.groups[inside.label], other.groups[missed.label]
    if (here.name, there.name) == (inside.group, missed.group):
        return True
    if mine.stage != other.stage:
        return False
    if here.name != inside.group:
        usual = inside.key if other.is_in(inside) else inside.key - 1
        if here.entered != usual or not goes_like(mine.ring(inside.label), other.ring(inside.label), inside.key):
            return False
    call = other.ring(missed.label).get(missed.key)
    return there.name == missed.group or (
        call is not None
        and call.operation == missed.operation
        and goes_like(mine.ring(missed.label), other.ring(missed.label), missed.key)
    )


def _told(rank: int, inside: _Call, missed: _Call, ranks: Mapping[int, _Rank]) -> Astray:
    others = [one for other, one in ranks.items() if other != rank and inside.label in one.groups]
    usual = any(one.came_to(inside) for one in others)
    if not usual and unheard_of(ranks[rank].ring(inside.label), inside.key):
        return Astray(rank, inside.group, inside.key, Detail.EXTRA)
    return Astray(rank, missed.group, missed.key, Detail.ORDER)
