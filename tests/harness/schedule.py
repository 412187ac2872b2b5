"""Ranks that make collectives after a program each, on paper: what really would be seen of them when one goes wrong.

A world of tp × dp × pp ranks makes the same calls step after step, in groups of all sizes, with roots and between two
ranks. A call ends as it would in truth: where everybody is needed, once all have come; a broadcast's root leaves early,
and so does who only sends to a root. Calls that differ never meet. The outcome is a timeline for each rank, from which
:meth:`Run.roll` reads what the rank's state file held at any time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from ddtrace_pytorch.stalls.roll import Call, GroupState, Life, RankState

SECOND = 10**9
RING = 32
NEVER = math.inf

FROM_ROOT = ("broadcast", "scatter")
TO_ROOT = ("reduce", "gather")


@dataclass(frozen=True)
class Group:
    """`stage`: of the pipeline, that all its ranks are in."""

    name: str
    label: str
    ranks: tuple[int, ...]
    stage: int | None = None


@dataclass(frozen=True)
class Instruction:
    """One call of one rank, after it has computed for so many seconds, in that step of its training."""

    group: Group
    call: Call
    after: float = 0.0
    step: int | None = None


@dataclass(frozen=True)
class Template:
    """A call that all groups of a kind make, or those of one `stage`; `root`: which of the group's ranks, if the
    operation has one."""

    groups: str
    operation: str
    root: int = 0
    size: int = 4
    dtype: str = "float32"
    stage: int | None = None


Program = list[Instruction]


def groups_of(tp: int, dp: int, pp: int) -> list[Group]:
    """The world, and whatever is larger than one rank."""

    def rank(t: int, d: int, p: int) -> int:
        return t + tp * (d + dp * p)

    def stage_of(ranks: list[int]) -> int | None:
        stages = {rank // (tp * dp) for rank in ranks}
        return stages.pop() if len(stages) == 1 else None

    lines = {
        "world": [[rank(t, d, p) for p, d, t in product(range(pp), range(dp), range(tp))]],
        "tp": [[rank(t, d, p) for t in range(tp)] for d, p in product(range(dp), range(pp))],
        "dp": [[rank(t, d, p) for d in range(dp)] for t, p in product(range(tp), range(pp))],
        "pp": [[rank(t, d, p) for p in range(pp)] for t, d in product(range(tp), range(dp))],
    }
    return [
        Group(f"{label}{number}", label, tuple(ranks), stage_of(ranks))
        for label, several in lines.items()
        for number, ranks in enumerate(several)
        if len(ranks) > 1
    ]


def programs(groups: list[Group], templates: list[Template], steps: int, seed: int) -> dict[int, Program]:
    """What each rank does: the templates, step after step, computing for up to 0.2 s in between."""
    chance = random.Random(seed)
    world = max(rank for group in groups for rank in group.ranks) + 1
    made: dict[int, Program] = {rank: [] for rank in range(world)}
    for step, template in product(range(steps), templates):
        for group in groups:
            if group.label != template.groups or template.stage not in (None, group.stage):
                continue
            for rank, call in calls_of(group, template):
                made[rank].append(Instruction(group, call, chance.random() * 0.2, step))
    return made


def calls_of(group: Group, template: Template) -> Iterable[tuple[int, Call]]:
    if template.operation == "pass":
        # Down the pipeline: each stage receives and sends on.
        for source, target in zip(group.ranks, group.ranks[1:], strict=False):
            yield source, Call("send", peer=target)
            yield target, Call("recv", peer=source)
        return
    rooted = template.operation in FROM_ROOT + TO_ROOT
    root = group.ranks[template.root % len(group.ranks)] if rooted else None
    call = Call(template.operation, shape=(template.size,), dtype=template.dtype, peer=root)
    if template.operation == "barrier":
        call = Call("barrier")
    for rank in group.ranks:
        yield rank, call


@dataclass
class Made:
    """A call as it went: numbered, entered and over at times in seconds."""

    group: Group
    call: Call
    entered: float
    over: float = NEVER


@dataclass
class Run:
    """What became of some programs. `stops`: when ranks are halted (frozen, killed, cut off); `root_waits`: who has
    something for all others, as in a broadcast, is in it until all have got it, as over gloo."""

    programs: Mapping[int, Program]
    stops: Mapping[int, float] = field(default_factory=dict)
    latency: float = 0.001
    root_waits: bool = False
    made: dict[int, list[Made]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made = {rank: [] for rank in self.programs}
        self._there: dict[object, dict[int, Made]] = {}
        self._for_all: dict[int, float] = {}
        self._numbers: dict[tuple[int, Group], int] = {}
        ready = list(self.programs)
        while ready:
            ready = [rank for rank in self.programs if self._advance(rank)]

    def _advance(self, rank: int) -> bool:
        """One thing that the rank can do now: to come out of its call, or to make the next."""
        done = self.made[rank]
        if done and done[-1].over == NEVER:
            over = self._over(rank, done[-1]) + self.latency
            if over == NEVER:
                return False
            done[-1].over = over
            return True
        if len(done) == len(self.programs[rank]):
            return False
        following = self.programs[rank][len(done)]
        entered = (done[-1].over if done else 0.0) + following.after
        if entered >= self.stops.get(rank, NEVER):
            return False
        call = following.call
        if call.operation not in ("send", "recv"):
            key = self._numbers[rank, following.group] = self._numbers.get((rank, following.group), 0) + 1
            call = replace(call, key=key)
        made = Made(following.group, replace(call, since=int(entered * SECOND)), entered)
        done.append(made)
        self._there.setdefault(_where(rank, made, done), {})[rank] = made
        return True

    def _over(self, rank: int, mine: Made) -> float:
        """When the call of this rank ends, as far as others have come to it."""
        there = self._there[_where(rank, mine, self.made[rank])]
        members: Iterable[int] = mine.group.ranks
        root = mine.call.peer
        if not mine.call.key or (mine.call.operation in FROM_ROOT and not (self.root_waits and rank == root)):
            members = (rank, root or 0)
        elif mine.call.operation in TO_ROOT and rank != root:
            members = (rank,)
        if members is mine.group.ranks:
            return self._over_for_all(there, mine.group)
        return self._met(there, members, mine)

    def _over_for_all(self, there: dict[int, Made], group: Group) -> float:
        """The same for everybody: it is worked out once."""
        if len(there) < len(group.ranks):
            return NEVER
        if id(there) not in self._for_all:
            self._for_all[id(there)] = self._met(there, group.ranks, there[group.ranks[0]])
        return self._for_all[id(there)]

    def _met(self, there: dict[int, Made], members: Iterable[int], mine: Made) -> float:
        needed = [there.get(member) for member in members]
        if any(one is None or not _meet(one.call, mine.call) for one in needed):
            return NEVER
        at = max(one.entered for one in needed if one is not None)
        return at if all(at + self.latency < self.stops.get(member, NEVER) for member in members) else NEVER

    @property
    def last(self) -> float:
        """When the last thing happened."""
        times = [time for made in self.made.values() for one in made for time in (one.entered, one.over)]
        return max((time for time in [*times, *self.stops.values()] if time != NEVER), default=0.0)

    def waiting(self) -> set[int]:
        """Who is in a call that never ends."""
        return {rank for rank, made in self.made.items() if made and made[-1].over == NEVER}

    def finished(self, rank: int) -> bool:
        return len(self.made[rank]) == len(self.programs[rank]) and rank not in self.waiting()

    def state(self, rank: int, at: float) -> RankState:
        """What the rank said of itself at that time, in seconds."""
        made = [one for one in self.made[rank] if one.entered <= at]
        groups: dict[str, GroupState] = {}
        for group in {one.group for one in made} | {one.group for one in self.programs[rank]}:
            here = [one for one in made if one.group == group]
            current = [one.call for one in here if one.over > at]
            groups[group.name] = GroupState(
                group.name,
                group.label,
                group.ranks,
                "gloo",
                entered=max((one.call.key for one in here), default=0),
                completed=max((one.call.key for one in here if one.over <= at), default=0),
                completed_at=int(SECOND * max((one.over for one in here if one.over <= at), default=0.0)),
                current=current[0] if current else None,
                recent=tuple(one.call for one in here[-RING:]),
            )
        inside = any(group.current for group in groups.values())
        return RankState(
            rank,
            as_of=int(at * SECOND),
            doing="collective" if inside else "user",
            step=self.programs[rank][len(made) - 1].step if made else None,
            moves=not inside,
            groups=groups,
        )

    def roll(self, now: float, lag: Callable[[int], float] = lambda rank: 0.0) -> dict[int, RankState]:
        """All states, each as old as its `lag`; halted ranks have not written since. Who came to the end has left."""
        roll = {}
        for rank in self.programs:
            made = self.made[rank]
            over = made[-1].over if made and self.finished(rank) and rank not in self.stops else NEVER
            state = self.state(rank, min(now - lag(rank), over, self.stops.get(rank, NEVER) - lag(rank)))
            roll[rank] = replace(self.state(rank, over), life=Life.ENDED) if over <= now else state
        return roll


def _where(rank: int, made: Made, done: list[Made]) -> object:
    """What two ends have in common: the number, or for a transfer how many went this way before."""
    call = made.call
    if call.key:
        return made.group.name, call.key
    way = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
    before = sum((one.call.operation, one.call.peer) == (call.operation, call.peer) for one in done)
    return made.group.name, way, before


def _meet(one: Call, other: Call) -> bool:
    return not one.key or (one.operation, one.peer, one.shape, one.dtype) == (
        other.operation,
        other.peer,
        other.shape,
        other.dtype,
    )


def relabelled(roll: Mapping[int, RankState], new: Mapping[int, int]) -> dict[int, RankState]:
    """The same roll of a world whose ranks have `new` numbers."""

    def call(one: Call) -> Call:
        return one if one.peer is None else replace(one, peer=new[one.peer])

    def group(one: GroupState) -> GroupState:
        return replace(
            one,
            ranks=tuple(new[rank] for rank in one.ranks),
            current=call(one.current) if one.current else None,
            recent=tuple(map(call, one.recent)),
        )

    return {
        new[rank]: replace(
            state,
            rank=new[rank],
            groups={name: group(one) for name, one in state.groups.items()},
            raised=replace(state.raised, call=call(state.raised.call)) if state.raised else None,
        )
        for rank, state in roll.items()
    }
