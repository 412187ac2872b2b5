"""Whom everybody waits for: the roll in, the verdict out. Pure.

Ranks wait in places (:mod:`~ddtrace_pytorch.stalls.waits`), and places lack ranks, which may wait elsewhere: along this
graph every way ends at a rank that waits for nobody, at a place that lacks nobody, or in a circle. These ends are the
fewest that explain everything, and nobody else is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ddtrace_pytorch.stalls import got_over
from ddtrace_pytorch.stalls.aligned import aligned
from ddtrace_pytorch.stalls.astray import astray
from ddtrace_pytorch.stalls.graph import dead_ends, on_every_circle
from ddtrace_pytorch.stalls.kin import kin
from ddtrace_pytorch.stalls.mismatch import Detail, Oddity, among_more, lasting, oddity, ring_of
from ddtrace_pytorch.stalls.roll import Call, Life, RankState
from ddtrace_pytorch.stalls.waits import FRESH, Place, Spot, faulty_in, places_of, waits_in

THRESHOLD = 10 * 10**9
# One fault makes ranks disagree in few groups. Where there are more, none is compared with all others: among a thousand
# ranks that takes minutes.
UNDECIDED = 8


class Kind(Enum):
    """What is wrong with a culprit, the gravest first."""

    MISMATCH = "mismatch"  # it is in another operation than the others, or of another shape or type: see the detail
    GONE = "gone"  # its process is dead, or ended, or it left the collective by an exception
    UNREACHABLE = "unreachable"  # its host doesn't answer
    FROZEN = "frozen"  # its process lives and doesn't beat
    STUCK = "stuck"  # everybody came and nobody came out: network or GPU
    ABSENT = "absent"  # it hasn't come


@dataclass(frozen=True)
class Where:
    """A call that ranks wait in. `key`: its number on the group, 0 if it has none; `ranks`: all of the group, or the
    two of a transfer: who waits, and for whom."""

    group: str
    label: str
    operation: str
    key: int
    ranks: tuple[int, ...]

    @property
    def between_two(self) -> bool:
        return len(self.ranks) == 2 and ("send" in self.operation or "recv" in self.operation)


@dataclass(frozen=True)
class Culprit:
    """One rank that is the reason. `where`: the call in which it is missed; `call`: of a mismatch, the odd one that it
    made; `moves`: it is only late, computes, and will come; `error`: by what exception it left a collective; `state`:
    None if nothing was heard of it."""

    rank: int
    kind: Kind
    where: Where
    host: str = ""
    state: RankState | None = None
    detail: Detail | None = None
    call: Call | None = None
    moves: bool = False
    error: str | None = None

    @property
    def doing(self) -> str | None:
        return self.state.doing if self.state is not None else None

    @property
    def life(self) -> Life | None:
        return self.state.life if self.state is not None else None


@dataclass(frozen=True)
class Verdict:
    """Why `where` waits since `waited` ns. `kind` and `detail` are those of the first culprit, the gravest; `waiting`
    are all ranks that wait for the culprits, there or along the chain, without these; `usual`: of a mismatch, the call
    of the majority; `store_host`: the store's, if a culprit is on it; `at`: when this was found, ns."""

    where: Where
    waited: int
    culprits: tuple[Culprit, ...]
    waiting: tuple[int, ...]
    usual: Call | None = None
    store_host: str | None = None
    at: int = 0

    @property
    def kind(self) -> Kind:
        return self.culprits[0].kind

    @property
    def detail(self) -> Detail | None:
        return self.culprits[0].detail

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(culprit.rank for culprit in self.culprits))

    @property
    def moves(self) -> bool:
        """Whether all culprits are only late."""
        return all(culprit.moves for culprit in self.culprits)

    @property
    def is_error(self) -> bool:
        return not self.moves


# What a main thread can't be at while it is held by a collective, whatever the group's state says is in flight.
_ELSEWHERE = ("data", "compile", "checkpoint")

Graph = Mapping[int | Spot, frozenset[int] | frozenset[Spot]]


def judge(
    roll: Mapping[int, RankState],
    expected: Iterable[int],
    now: int,
    *,
    threshold: int = THRESHOLD,
    hosts: Mapping[int, str] | None = None,
    store_host: str | None = None,
) -> Verdict | None:
    """Who is the reason that ranks wait; None if none has waited in a call for about `threshold` ns or raised from one.

    `roll`: what is known, by rank; `expected`: all ranks there should be; `hosts` of ranks missing in the roll, and
    `store_host`, that of the job's store, as far as known: when it is silent nobody elsewhere can be heard.
    """
    roll = aligned({rank: got_over.without(state, now) for rank, state in roll.items()})
    # Whoever is only said not to answer is as good as missing.
    heard = {rank: state for rank, state in roll.items() if state.life is not Life.UNREACHABLE}
    waits = waits_in(heard, now, threshold)
    faulty = faulty_in(heard, {*expected, *roll}, waits)
    places = places_of(waits, heard, faulty, now, threshold)
    oddities = _oddities(places, heard)
    places = {spot: place for spot, place in places.items() if not place.runs or _explains(oddities, spot)}
    known_hosts = {**(hosts or {}), **{rank: state.host for rank, state in roll.items() if state.host}}
    case = _Case(roll, heard, faulty, places, oddities, known_hosts, store_host, now)
    long = threshold - min(FRESH, threshold // 2)
    stalled = [
        spot
        for spot, place in places.items()
        if (
            any(wait.age >= long or wait.error is not None for wait in place.waits.values())
            or _ended_one(place, _explains(oddities, spot), heard)
        )
        and not _was_refused(place, heard)
    ]
    verdict = _verdict(case, stalled)
    if verdict is None or verdict.detail is not Detail.ORDER:
        return verdict
    # In a circle; if it is the doing of one rank there, all leads to that one.
    one = astray(verdict.ranks, places.values(), heard)
    if one is None or one.group in oddities:
        return verdict
    told = Oddity(one.key, None, {one.rank: one.detail})
    return _verdict(replace(case, oddities={**oddities, one.group: told}), stalled)


def _ended_one(place: Place, odd: Oddity | None, heard: Mapping[int, RankState]) -> bool:
    """Whether a rank died where others made another call: that may have ended it, and nobody has to have waited."""
    return odd is not None and odd.key == place.spot.key and any(heard[rank].life is Life.DEAD for rank in place.waits)


def _was_refused(place: Place, heard: Mapping[int, RankState]) -> bool:
    """Whether all who came raised what no other rank was the reason of, and the others had said goodbye: nobody waits
    there, and nobody is missed."""
    return place.raised_by_itself and all(rank in heard and heard[rank].life is Life.ENDED for rank in place.lacks)


@dataclass(frozen=True)
class _Case:
    """What is known: `heard` are the ranks of the roll that answered or left a state, `oddities` are by group."""

    roll: Mapping[int, RankState]
    heard: Mapping[int, RankState]
    faulty: frozenset[int]
    places: Mapping[Spot, Place]
    oddities: Mapping[str, Oddity]
    hosts: Mapping[int, str]
    store_host: str | None
    now: int

    def oddity_of(self, spot: Spot) -> Oddity | None:
        return _explains(self.oddities, spot)

    @cached_property
    def _missed(self) -> dict[int, Place]:
        def by_age(place: Place) -> tuple[int, str, int, str]:
            return -place.age, *place.spot[:3]

        oldest_first = sorted(self.places.values(), key=by_age)
        missed: dict[int, Place] = {}
        for place in oldest_first:
            for rank in odd.odd if (odd := self.oddity_of(place.spot)) is not None else ():
                missed.setdefault(rank, place)
        for place in oldest_first:
            for rank in place.lacks:
                missed.setdefault(rank, place)
        for place in oldest_first:
            for rank in place.waits:
                missed.setdefault(rank, place)
        return missed

    def missed_in(self, rank: int) -> Place:
        """Of the places that it spoilt, or else that lack it, or that it is in, the one that has waited longest."""
        return self._missed.get(rank) or max(self.places.values(), key=lambda place: place.age)


def _explains(oddities: Mapping[str, Oddity], spot: Spot) -> Oddity | None:
    """The oddity of the place's group, if it is why ranks wait there."""
    odd = oddities.get(spot.group)
    return odd if odd is not None and spot.key >= odd.key else None


def _oddities(places: Mapping[Spot, Place], heard: Mapping[int, RankState]) -> dict[str, Oddity]:
    """The groups in which ranks made other calls than the rest."""
    waited: dict[str, list[Place]] = {}
    for spot, place in places.items():
        if spot.key:
            waited.setdefault(spot.group, []).append(place)
    rings_of = {
        name: {rank: ring_of(heard[rank], name) for rank in here[0].any_wait.group.ranks if rank in heard}
        for name, here in waited.items()
    }
    odd_in = {name: oddity(rings_of[name], [place.spot.key for place in here]) for name, here in waited.items()}
    undecided = sum(odd is not None and odd.usual is None for odd in odd_in.values())
    found = {}
    for name, here in waited.items():
        rings, odd = rings_of[name], odd_in[name]
        if odd is not None and odd.usual is None and undecided <= UNDECIDED:
            odd = among_more(odd, rings, kin(here[0].any_wait.group, odd.key, rings, heard))
        odd = odd or _beyond_the_end(here, heard)
        if odd is None and all(not place.lacks and not place.runs for place in here):
            odd = lasting(rings, min(place.spot.key for place in here))
        if odd is not None:
            found[name] = odd
    return found


def _beyond_the_end(places: list[Place], heard: Mapping[int, RankState]) -> Oddity | None:
    """Ranks that wait for the strict majority of their group, which said goodbye without that call."""
    for place in places:
        ended = all(rank in heard and heard[rank].life is Life.ENDED for rank in place.lacks)
        if ended and 2 * len(place.lacks) > len(place.any_wait.group.ranks):
            return Oddity(place.spot.key, None, dict.fromkeys(place.waits, Detail.EXTRA))
    return None


def _graph(case: _Case) -> Graph:
    """Ranks lead to the places they wait in, places to the ranks that explain them. A rank that is at fault by itself
    leads nowhere, wherever it waits."""
    graph: dict[int | Spot, frozenset[int] | frozenset[Spot]] = {}
    at_fault = set(case.faulty)
    waits_at: dict[int, set[Spot]] = {}
    for spot, place in case.places.items():
        odd = case.oddity_of(spot)
        explained_by = frozenset(odd.odd) if odd is not None else place.lacks
        graph[spot] = explained_by
        at_fault |= place.left if odd is None else explained_by
        for rank in place.waits:
            waits_at.setdefault(rank, set()).add(spot)
    graph.update({rank: frozenset(spots) for rank, spots in waits_at.items() if rank not in at_fault})
    # Without the store nobody elsewhere is heard, whether it is well or not.
    silent = frozenset(
        rank for rank in case.faulty if case.store_host is not None and case.hosts.get(rank) == case.store_host
    )
    if silent:
        graph.update({rank: silent for rank in case.faulty - silent if rank not in case.heard})
    return graph


def _verdict(case: _Case, stalled: list[Spot]) -> Verdict | None:
    graph = _graph(case)
    found: dict[int, Culprit] = {}
    for end in dead_ends(graph, stalled):
        for culprit in _culprits(case, graph, end):
            found.setdefault(culprit.rank, culprit)
    if not found:
        return None
    kinds = list(Kind)
    culprits = sorted(found.values(), key=lambda one: (kinds.index(one.kind), -case.missed_in(one.rank).age, one.rank))
    place = case.missed_in(culprits[0].rank)
    odd = case.oddity_of(place.spot) if culprits[0].kind is Kind.MISMATCH else None
    return Verdict(
        where=culprits[0].where,
        waited=place.age,
        culprits=tuple(culprits),
        waiting=tuple(sorted(_waiting(case, graph, stalled) - found.keys())),
        usual=odd.usual if odd is not None else None,
        store_host=case.store_host if any(one.host == case.store_host for one in culprits) else None,
        at=case.now,
    )


def _culprits(case: _Case, graph: Graph, end: frozenset[int | Spot]) -> list[Culprit]:
    """Who is named for one end of the ways through the graph."""
    ranks = {node for node in end if isinstance(node, int)}
    if not ranks:
        (spot,) = end
        assert isinstance(spot, Spot)
        place = case.places[spot]
        if place.raised_by_itself:
            return []  # torch refused it on all ranks alike, or all were interrupted: nobody waits
        return [_culprit(case, rank, Kind.STUCK) for rank in place.waits]
    if len(end) == 1:
        return _alone(case, *ranks)
    elsewhere = [rank for rank in ranks if case.heard[rank].doing in _ELSEWHERE]
    if elsewhere:
        return [_culprit(case, rank, Kind.ABSENT) for rank in elsewhere]
    single = {node for node in on_every_circle(graph, end) if isinstance(node, int)}
    return [_culprit(case, rank, Kind.MISMATCH, Detail.ORDER) for rank in single or ranks]


def _alone(case: _Case, rank: int) -> list[Culprit]:
    """A rank that waits for nobody; with it those who may be wrong as well."""
    place, state = case.missed_in(rank), case.heard.get(rank)
    odd = case.oddity_of(place.spot)
    if odd is not None and rank in odd.odd:
        return [_odd_one(case, one, odd) for one in ([rank] if odd.usual is not None else odd.odd)]
    if state is None:
        return [_culprit(case, rank, Kind.UNREACHABLE)]
    if rank in place.left or state.life in (Life.DEAD, Life.ENDED):
        return [_culprit(case, rank, Kind.GONE)]
    return [_culprit(case, rank, Kind.FROZEN if state.life is Life.SILENT else Kind.ABSENT)]


def _odd_one(case: _Case, rank: int, odd: Oddity) -> Culprit:
    call = ring_of(case.heard[rank], case.missed_in(rank).spot.group).get(odd.key)
    return _culprit(case, rank, Kind.MISMATCH, odd.odd[rank], call)


def _culprit(case: _Case, rank: int, kind: Kind, detail: Detail | None = None, call: Call | None = None) -> Culprit:
    place, state = case.missed_in(rank), case.roll.get(rank)
    wait = place.waits.get(rank)
    in_a_call = state is not None and any(group.current is not None for group in state.groups.values())
    waits = any(rank in other.waits for other in case.places.values())
    return Culprit(
        rank=rank,
        kind=kind,
        where=_where(case, place),
        host=case.hosts.get(rank, ""),
        state=state,
        detail=detail,
        call=call,
        # In a call, and not waiting there: that has only begun, or it is ending.
        moves=kind is Kind.ABSENT and state is not None and (bool(state.moves) or (in_a_call and not waits)),
        error=wait.error if wait is not None else None,
    )


def _where(case: _Case, place: Place) -> Where:
    odd = case.oddity_of(place.spot)
    calls = Counter(wait.call.operation for wait in place.waits.values() if odd is None or wait.rank not in odd.odd)
    operation = min(calls, key=lambda name: (-calls[name], name)) if calls else place.any_wait.call.operation
    group = place.any_wait.group
    return Where(group.name, group.label, operation, place.spot.key, place.spot.pair or group.ranks)


def _waiting(case: _Case, graph: Graph, stalled: list[Spot]) -> set[int]:
    """All ranks in the places that can be reached from there."""
    seen: set[int | Spot] = set()
    ahead: list[int | Spot] = list(stalled)
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead.extend(graph.get(node, ()))
    return {rank for node in seen if isinstance(node, Spot) for rank in case.places[node].waits}
