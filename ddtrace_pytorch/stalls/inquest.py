"""What a job died of: what each rank's log tells in, the first failure and who was the reason out. Pure.

Ranks that ended because of somebody else are looked at as they last lived, waiting; only who failed first is dead. On
this roll the verdict is found as it would have been while the job ran, where nobody found it then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ddtrace_pytorch.runlog.fields import integer, mapping, number, text
from ddtrace_pytorch.stalls import telling
from ddtrace_pytorch.stalls.doing import own_frame
from ddtrace_pytorch.stalls.got_over import is_echo, is_old, is_over
from ddtrace_pytorch.stalls.history import EXCEPTION, History, Moment, call_in_words
from ddtrace_pytorch.stalls.roll import GroupState, Life, Raised, RankState
from ddtrace_pytorch.stalls.verdict import THRESHOLD, Kind, Verdict, judge
from ddtrace_pytorch.stalls.waits import FRESH, age_of

Record = Mapping[str, Any]

# ns. Clocks of hosts differ, and a rank that dies has beaten up to a second before: what lies closer has no order.
NEAR = 2 * 10**9
# ns. A log that ends so much before another one is of a rank that was gone.
GOES_ON = 5 * 10**9
# ns. Ranks of a host that are told to end together are told within less. torchrun looks ten times a second who is gone.
ONE_BY_ONE = 10**8
# ns. A wait so long counts where a rank is known to be gone or stopped.
WAITED = 2 * FRESH

GOOD_ENDS = ("destroyed", "exit", "replaced", "unpatched")
NEVER = 1 << 63
KILLED = "killed"
# What gloo does to who gets more bytes than it asked for.
BROKEN = "ended by gloo, because a peer sent something else"
# A damaged, absurd size must not cost memory.
LARGEST_WORLD = 1 << 17

# What a rank raises that was told to end.
_TOLD_TO_END = ("KeyboardInterrupt", "SystemExit", "SignalException")


class Cause(Enum):
    """What a failure is; of those that happened at the same time the first here is the reason of the others."""

    EXCEPTION = "exception"  # of the rank's own, outside of collectives
    KILLED = "killed"  # gone without a word
    RAISED = "raised"  # a collective raised what no other rank's end explains
    FROZEN = "frozen"
    STALL = "stall"  # a collective began to wait
    LEFT = "left"  # it ended, and others went on
    ECHO = "echo"  # what another rank's end, or a long wait, has for its end
    SIGNAL = "signal"


@dataclass(frozen=True)
class Failure:
    """`ranks` failed, `at` ns since the epoch; `what`, in words that follow the rank. `frames`: where that was raised,
    innermost first, if all of them raised it there."""

    at: int
    ranks: tuple[int, ...]
    cause: Cause
    what: str
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fate:
    """How a rank `ended`, in words, and when it was there last (ns). `open`: its log has no end and ends with all the
    others, so that it may still be running."""

    ended: str
    at: int
    bad: bool
    open: bool = False


@dataclass(frozen=True)
class Overcome:
    """A stall that went on: `at` ns since the epoch, after how many `seconds`, and what was said of it while it
    lasted, of `ranks`."""

    at: int
    seconds: float
    ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class Finding:
    """What is found of one attempt. `verdict` is a record as of the run log; `rebuilt`: found only now. `end`: the last
    that is known, ns. `missing`: ranks without a log. `well`: all others ended as they should. `broken`: ranks that
    gloo ended for what another one sent; `interrupted`: when those who waited were told to end, ns;
    `overcome`: the stalls that came to a good end, in order of time."""

    end: int
    first: Failure | None
    verdict: Record | None
    rebuilt: bool
    missing: tuple[int, ...]
    fates: Mapping[int, Fate]
    states: Mapping[int, RankState]
    well: bool
    broken: tuple[int, ...] = ()
    interrupted: int | None = None
    overcome: tuple[Overcome, ...] = ()


def inquire(histories: Mapping[int, History]) -> Finding:
    """`histories` of one attempt, by rank: at least one."""
    histories = dict(sorted(histories.items()))
    known = _known_groups(histories)
    states = {rank: one.state(known) for rank, one in histories.items()}
    fates = _fates(histories)
    size = max((integer(one.identity, "world_size") or 0 for one in histories.values()), default=0)
    missing = tuple(rank for rank in range(min(size, LARGEST_WORLD)) if rank not in histories)
    end = max(one.last for one in histories.values())

    told = _told(histories)
    failures = _failures(histories, states, fates, told)
    first = _first(failures, histories, fates)
    verdict = next((one for one in told if first is not None and {*one["ranks"]} & {*first.ranks}), None)
    verdict = verdict or next(iter(told), None)
    rebuilt = None
    if verdict is None or verdict.get("kind") == Kind.GONE.value:
        rebuilt = _judged(_roll(histories, states, fates, first), missing, first)
        # Who said so while others were ending didn't know yet what these had been in.
        if verdict is not None and (rebuilt is None or rebuilt["kind"] != Kind.MISMATCH.value):
            rebuilt = None
    if rebuilt is not None:
        verdict = rebuilt
        failures = _failures(histories, states, fates, [rebuilt])
        first = _first(failures, histories, fates)
    return Finding(
        end=end,
        first=first,
        verdict=verdict,
        rebuilt=rebuilt is not None,
        missing=missing,
        fates=fates,
        states=states,
        well=first is None and verdict is None and not any(fate.bad or fate.open for fate in fates.values()),
        interrupted=_interrupted(failures, first),
        overcome=_overcome(histories),
        broken=tuple(sorted(rank for one in failures if one.what == BROKEN for rank in one.ranks)),
    )


def _known_groups(histories: Mapping[int, History]) -> dict[str, list[GroupState]]:
    """The groups, as some rank described them; else those that ranks name are whoever names them."""
    found: dict[str, dict[tuple[int, ...], GroupState]] = {}
    named: dict[str, list[int]] = {}
    for rank, one in histories.items():
        for name, here in one.said().groups.items():
            found.setdefault(name, {}).setdefault(
                here.ranks, GroupState(here.name, here.label, here.ranks, here.backend)
            )
        for name in one.names():
            named.setdefault(name, []).append(rank)
    for name in named.keys() - found.keys():
        ranks = tuple(named[name])
        label = "world" if len(ranks) == len(histories) else name
        found[name] = {ranks: GroupState(name, label, ranks, "")}
    return {name: list(several.values()) for name, several in found.items()}


def _fates(histories: Mapping[int, History]) -> dict[int, Fate]:
    said = [one.ending.at for one in histories.values() if one.ending is not None and one.ending.reason != KILLED]
    over, latest = max(said, default=0), max(one.last for one in histories.values())
    fates = {}
    for rank, one in histories.items():
        if one.ending is not None:
            error = one.ending.error
            fates[rank] = Fate(f"raised {error}" if error else one.ending.reason, one.ending.at, not _ended_well(one))
        elif one.life is Life.SILENT:
            fates[rank] = Fate("frozen", one.last, bad=True)
        elif one.life is Life.ALIVE:
            fates[rank] = Fate("still alive", one.last, bad=False, open=True)
        elif latest > one.last + GOES_ON or over > one.last:
            fates[rank] = Fate("log just ends", one.last, bad=True)
        else:
            fates[rank] = Fate("no end recorded", one.last, bad=False, open=True)
    return fates


def _ended_well(one: History) -> bool:
    return one.ending is not None and one.ending.reason in GOOD_ENDS


def _told(histories: Mapping[int, History]) -> list[Record]:
    """What ranks said while it happened, the first first; not of a culprit that was only late, nor of what is over."""

    interrupted = _first_interruption(histories)

    def is_over(verdict: Record) -> bool:
        where = _spot(verdict)
        waited = [histories[rank] for rank in verdict["waiting"] if rank in histories]
        went_on = [one.went_on(*where, interrupted) for one in waited]
        well = [one.ending.at for one in waited if one.ending is not None and _ended_well(one)]
        # What an interruption ends doesn't go on.
        return any(at is not None and at < interrupted for at in (*went_on, *well))

    found = [
        verdict
        for one in histories.values()
        for verdict in map(_sound, one.verdicts)
        if verdict["ranks"] and mapping(verdict, "tags").get("stall.moves") == "false" and not is_over(verdict)
    ]
    return sorted(found, key=lambda verdict: verdict["ts"])


def _overcome(histories: Mapping[int, History]) -> tuple[Overcome, ...]:
    """Of what was said again and again, what was said first; a call on which a rank raised went on nowhere."""
    found: dict[tuple[str, str, int], Overcome] = {}
    interrupted = _first_interruption(histories)
    said = [_sound(verdict) for one in histories.values() for verdict in one.verdicts]
    for verdict in sorted(said, key=lambda one: one["ts"]):
        where = _spot(verdict)
        waited = [histories[rank] for rank in verdict["waiting"] if rank in histories]
        over = [at for one in waited if (at := one.went_on(*where, interrupted))]
        if over and max(over) < interrupted and where not in found:
            began = verdict["ts"] - _waited(verdict)
            found[where] = Overcome(began, (max(over) - began) / 1e9, tuple(verdict["ranks"]), text(verdict, "message"))
    return tuple(found.values())


def _spot(verdict: Record) -> tuple[str, str, int]:
    tags = mapping(verdict, "tags")
    return text(tags, "stall.group_name"), text(tags, "stall.op"), integer(tags, "stall.key") or 0


def _waited(verdict: Record) -> int:
    return round((number(mapping(verdict, "tags"), "stall.waited_s") or 0.0) * 1e9)


def _first_interruption(histories: Mapping[int, History]) -> int:
    return min((at for one in histories.values() if (at := _told_to_end(one)) is not None), default=NEVER)


def _told_to_end(one: History) -> int | None:
    """When a signal or a person did, if it ended because of that, whatever its own handler made of it."""
    ending = one.ending
    if ending is not None and (ending.reason.startswith("signal:") or ending.error.startswith(_TOLD_TO_END)):
        return one.heard or ending.at
    return None if _ended_well(one) else one.heard


def _sound(verdict: Record) -> Record:
    """A record that was read, with ranks and culprits that are what they should be."""

    def listed(key: str, kind: type) -> list[Any]:
        value = verdict.get(key)
        return [one for one in value if type(one) is kind] if isinstance(value, list) else []

    culprits = [one for one in listed("culprits", dict) if type(one.get("rank")) is int]
    return {**verdict, "ranks": listed("ranks", int), "waiting": listed("waiting", int), "culprits": culprits}


def _failures(
    histories: Mapping[int, History], states: Mapping[int, RankState], fates: Mapping[int, Fate], told: Sequence[Record]
) -> list[Failure]:
    found = [
        failure for rank, one in histories.items() if (failure := _failure(one, states[rank], fates[rank])) is not None
    ]
    frozen = {one["rank"] for verdict in told for one in verdict["culprits"] if one.get("kind") == Kind.FROZEN.value}
    found = [_frozen_before(one) if frozen.issuperset(one.ranks) else one for one in found]
    victims = _waiting_on_gloo(told, states)
    found = [_broken(one) if victims.issuperset(one.ranks) else one for one in found]
    failed = {rank for failure in found for rank in failure.ranks}
    found += [_stall(one) for one in told if one.get("kind") != Kind.GONE.value or not failed & {*one["ranks"]}]
    if found and all(one.cause in (Cause.ECHO, Cause.SIGNAL) for one in found):
        before = min(one.at for one in found) + NEAR
        found += [
            Failure(fate.at, (rank,), Cause.LEFT, f"ended ({fate.ended}) while others went on")
            for rank, fate in fates.items()
            if not fate.bad and not fate.open and fate.at <= before
        ]
    return found


def _failure(one: History, state: RankState, fate: Fate) -> Failure | None:
    """What a single rank failed by."""
    ending, raised, who = one.ending, state.raised, (one.rank,)
    if raised is not None and (fate.bad or fate.open) and not _dealt_with(raised, state, fate):
        here = state.groups.get(raised.group)
        where = call_in_words(vars(raised.call), here.label if here else raised.group)
        what = f"raised {raised.error}, in {where}"
        frames = one.thrown if ending is not None and ending.error == raised.error else ()
        return Failure(raised.at or fate.at, who, _cause(raised.error, Cause.RAISED), what, frames)
    if fate.ended == "frozen":
        return Failure(fate.at, who, Cause.FROZEN, "frozen: the process is there, and does not beat")
    if not fate.bad:
        return None
    told = _told_to_end(one)
    if ending is not None and ending.reason not in (EXCEPTION, KILLED):
        return Failure(told or fate.at, who, Cause.SIGNAL, f"ended by {ending.reason.removeprefix('signal:')}")
    if told is not None:
        return Failure(told, who, Cause.SIGNAL, f"{fate.ended}, after a signal had told it to end", one.thrown)
    if ending is not None and ending.reason == EXCEPTION:
        cause = _cause(ending.error, Cause.EXCEPTION)
        return Failure(fate.at, who, cause, f"raised {ending.error or 'an exception'}", one.thrown)
    what = (
        "killed (SIGKILL, out of memory, abort() or os._exit())"
        if ending is not None
        else "the log just ends, as of a rank that is killed, or whose host is lost"
    )
    return Failure(fate.at, who, Cause.ECHO if _waited_long(state) else Cause.KILLED, what)


def _frozen_before(failure: Failure) -> Failure:
    """What a rank failed by that was said to be frozen: where it was killed, that came later."""
    if failure.cause not in (Cause.KILLED, Cause.ECHO):
        return failure
    return replace(failure, cause=Cause.FROZEN, what="frozen: without a beat from then on, and killed later")


def _waiting_on_gloo(told: Sequence[Record], states: Mapping[int, RankState]) -> set[int]:
    """Ranks that waited in a collective of which another one made an odd call."""
    return {
        rank
        for verdict in told
        if verdict.get("kind") == Kind.MISMATCH.value
        for rank in verdict["waiting"]
        if rank in states and any("gloo" in here.backend for here in states[rank].groups.values())
    }


def _broken(failure: Failure) -> Failure:
    """What a rank failed by that died while it waited where somebody else sent another number of bytes."""
    return replace(failure, cause=Cause.ECHO, what=BROKEN) if failure.cause is Cause.KILLED else failure


def _cause(error: str, own: Cause) -> Cause:
    if error.startswith(_TOLD_TO_END):
        return Cause.SIGNAL
    return Cause.ECHO if is_echo(error) else own


def _dealt_with(raised: Raised, state: RankState, fate: Fate) -> bool:
    """Whether the rank went on after it: it caught it, or lived on for long or with further collectives."""
    here = state.groups.get(raised.group)
    went_on = here is not None and 0 < raised.call.key < here.entered
    return went_on or is_over(raised, state, fate.at) or is_old(raised, fate.at)


def _waited_long(state: RankState) -> bool:
    """A time-out may have ended it."""
    calls = [group.current for group in state.groups.values() if group.current is not None]
    return any(age_of(call, state, state.as_of) >= THRESHOLD for call in calls)


def _stall(verdict: Record) -> Failure:
    began = verdict["ts"] - _waited(verdict)
    odd, whom = verdict.get("kind") == Kind.MISMATCH.value, "it" if len(verdict["ranks"]) == 1 else "them"
    what = f"another call than the others' {_where(verdict)}" if odd else f"{_where(verdict)} began to wait for {whom}"
    return Failure(began, tuple(sorted(verdict["ranks"])), Cause.STALL, what)


def _interrupted(failures: Iterable[Failure], first: Failure | None) -> int | None:
    """When a signal or a person ended ranks, if nobody failed otherwise than by a stall or what came of it."""
    if first is None or first.cause not in (Cause.STALL, Cause.FROZEN):
        return None
    after = [one for one in failures if one.cause not in (Cause.STALL, Cause.FROZEN, Cause.ECHO)]
    outside = all(one.cause is Cause.SIGNAL for one in after)
    return min((one.at for one in after), default=None) if outside else None


def _first(failures: Iterable[Failure], histories: Mapping[int, History], fates: Mapping[int, Fate]) -> Failure | None:
    in_time = sorted(failures, key=lambda one: (one.at, one.ranks))
    if not in_time:
        return None
    causes = list(Cause)
    near = [one for one in in_time if one.at <= in_time[0].at + NEAR]
    cause = min((one.cause for one in near), key=causes.index)
    if cause is Cause.ECHO and near[0].cause is Cause.SIGNAL:
        # Of whose end it is the echo.
        cause = Cause.SIGNAL
    alike = [one for one in near if one.cause is cause]
    if cause is Cause.STALL:
        return alike[0]
    if cause in (Cause.EXCEPTION, Cause.RAISED):
        alike = [one for one in alike if one.what == alike[0].what]
    if cause is Cause.SIGNAL and _ended_before(alike, histories, fates):
        alike = alike[:1]
    frames = alike[0].frames if len({own_frame(one.frames) for one in alike}) == 1 else ()
    return replace(alike[0], ranks=tuple(sorted(rank for one in alike for rank in one.ranks)), frames=frames)


def _ended_before(signals: Sequence[Failure], histories: Mapping[int, History], fates: Mapping[int, Fate]) -> bool:
    """Whether the first of them had ended, and that long before the others were told to: a launcher ends these then."""
    ranks = [one.ranks[0] for one in signals]
    return (
        len(ranks) > 1
        and len({histories[rank].host for rank in ranks}) == 1
        and fates[ranks[0]].at + ONE_BY_ONE <= signals[1].at
    )


def _roll(
    histories: Mapping[int, History], states: Mapping[int, RankState], fates: Mapping[int, Fate], first: Failure | None
) -> dict[int, RankState]:
    """The ranks as they were when the first of them failed."""
    gone: frozenset[int] = frozenset()
    if first is not None:
        singled_out = first.cause is Cause.SIGNAL and len(first.ranks) < len(states)
        gone = frozenset(first.ranks if first.cause in (Cause.EXCEPTION, Cause.KILLED) or singled_out else ())
    roll = {}
    for rank, state in states.items():
        fate, life = fates[rank], Life.ALIVE
        if _ended_well(histories[rank]) or _raised_elsewhere(histories[rank]):
            state = _out_of_calls(state)
        if histories[rank].life is Life.SILENT:
            life = Life.SILENT
        elif rank in gone:
            life = Life.DEAD
        elif not fate.bad and not fate.open:
            life = Life.ENDED
        roll[rank] = replace(state, life=life, end_reason=fate.ended if life in (Life.DEAD, Life.ENDED) else None)
    return roll


def _raised_elsewhere(one: History) -> bool:
    """By an exception that has nothing to do with a wait."""
    ending = one.ending
    if ending is None or ending.reason != EXCEPTION or _told_to_end(one) is not None:
        return False
    return _cause(ending.error, Cause.EXCEPTION) is Cause.EXCEPTION


def _out_of_calls(state: RankState) -> RankState:
    """What it was in at its last beat was over before it ended."""
    return replace(state, groups={name: replace(here, current=None) for name, here in state.groups.items()})


def _judged(roll: Mapping[int, RankState], missing: Sequence[int], first: Failure | None) -> Record | None:
    """The verdict on the roll. Ranks without a log are named only if nobody else explains it."""
    now = max(state.as_of for state in roll.values())
    certain = any(state.life in (Life.DEAD, Life.SILENT) for state in roll.values())
    threshold = WAITED if certain else THRESHOLD
    found = judge(_without(roll, frozenset(missing)), roll.keys(), now, threshold=threshold)
    unclear = found is None or all(one.kind in (Kind.STUCK, Kind.UNREACHABLE) for one in found.culprits)
    if missing and unclear:
        found = judge(roll, {*roll, *missing}, now, threshold=threshold) or found
    if found is None or (not found.is_error and first is not None):
        return None
    record = telling.record(found)
    return record | {"message": _unknown(found)} if found.kind is Kind.UNREACHABLE else record


def _without(roll: Mapping[int, RankState], missing: frozenset[int]) -> Mapping[int, RankState]:
    """As if the missing ranks were in no group."""
    if not missing:
        return roll
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}

    def there(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if ranks not in shared:
            shared[ranks] = tuple(rank for rank in ranks if rank not in missing)
        return shared[ranks]

    return {
        rank: replace(
            state, groups={name: replace(here, ranks=there(here.ranks)) for name, here in state.groups.items()}
        )
        for rank, state in roll.items()
    }


def _unknown(verdict: Verdict) -> str:
    where = call_in_words({"op": verdict.where.operation, "key": verdict.where.key}, verdict.where.label)
    waiting, lost = telling.in_words(verdict.waiting), telling.in_words(verdict.ranks)
    return (
        f"{where} waited {verdict.waited / 1e9:.0f} s ({waiting}), and no rank that left a log here is the reason; "
        f"of {lost} there is no log"
    )


def _said(verdict: Record) -> str:
    """In short: it may be said again and again."""
    return f"said that {_where(verdict)} waits for {telling.in_words(verdict['ranks'])} ({text(verdict, 'kind')})"


def _where(verdict: Record) -> str:
    tags = mapping(verdict, "tags")
    return call_in_words({"op": text(tags, "stall.op"), "key": integer(tags, "stall.key")}, text(tags, "stall.group"))


def moments(histories: Mapping[int, History], finding: Finding) -> list[tuple[int, Moment]]:
    """What happened to which rank, in order of time: calls that took too long or raised, verdicts, and the ends."""
    found: list[tuple[int, Moment]] = []
    for rank, one in histories.items():
        found += [(rank, moment) for moment in one.moments]
        found += [(rank, Moment(said["ts"], _said(said))) for said in map(_sound, one.verdicts)]
        for here in finding.states[rank].groups.values():
            if here.current is not None and here.current.since:
                where = call_in_words(vars(here.current), here.label)
                found.append((rank, Moment(here.current.since, f"entered {where}, the last it was seen in")))
        fate = finding.fates[rank]
        if one.beat:
            found.append((rank, Moment(one.beat, "last beat")))
        first = finding.first
        if first is not None and first.cause is Cause.FROZEN and rank in first.ranks and fate.ended == KILLED:
            found.append((rank, Moment(fate.at, "frozen from here on, and killed later")))
        elif not fate.open:
            found.append((rank, Moment(fate.at, f"ended: {fate.ended}")))
    return sorted(found, key=lambda one: (one[1].at, one[0]))
