"""The verdict kind by kind, and its words."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
from harness.schedule import SECOND, Group, Run, Template, groups_of, programs

from ddtrace_pytorch.stalls.mismatch import Detail
from ddtrace_pytorch.stalls.roll import Call, GroupState, Life, Raised, RankState
from ddtrace_pytorch.stalls.telling import facts, message, ranges, record
from ddtrace_pytorch.stalls.verdict import Kind, Verdict, judge

NOW = 1_000 * SECOND
WORLD = Group("0", "dp", tuple(range(4)))
LOADING = ("/job/train.py:88 load_batch", "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py:732 __next__")


def call(key: int, operation: str = "all_reduce", age: float = 12.0, **more: object) -> Call:
    return Call(operation, key=key, since=NOW - int(age * SECOND), **{"shape": (4,), "dtype": "float32", **more})  # type: ignore[arg-type]


def here(
    group: Group, entered: int, current: Call | None = None, recent: Iterable[Call] = (), completed: int | None = None
) -> GroupState:
    done = entered - (current is not None) if completed is None else completed
    ring = (*recent, *([current] if current is not None else []))
    return GroupState(group.name, group.label, group.ranks, "gloo", entered, done, current, ring)


def rank_in(rank: int, *groups: GroupState, **more: object) -> RankState:
    waits = any(group.current for group in groups)
    known = {"doing": "collective" if waits else "user", "as_of": NOW, "host": "host-a", "moves": False, **more}
    return RankState(rank, groups={group.name: group for group in groups}, **known)  # type: ignore[arg-type]


def waits(rank: int, key: int = 5, **more: object) -> RankState:
    return rank_in(rank, here(WORLD, key, call(key, **more)))  # type: ignore[arg-type]


def behind(rank: int, **more: object) -> RankState:
    return rank_in(rank, here(WORLD, 4), **more)


def judged(*states: RankState, world: int = 4, **more: object) -> Verdict | None:
    return judge({state.rank: state for state in states}, range(world), NOW, **more)  # type: ignore[arg-type]


def verdict_of(*states: RankState, world: int = 4, **more: object) -> Verdict:
    verdict = judged(*states, world=world, **more)
    assert verdict is not None
    return verdict


def test_of_a_group_whose_ranks_are_not_known_nothing_is_said_and_of_others_all() -> None:
    unknown = Group("7", "huge", ())
    there = [rank_in(rank, here(unknown, 5, call(5))) for rank in range(4)]
    assert judged(*there) is None
    verdict = verdict_of(behind(0), *(replace(one, groups=one.groups | waits(one.rank).groups) for one in there[1:]))
    assert (verdict.kind, verdict.ranks) == (Kind.ABSENT, (0,))


def issued(rank: int, size: int, life: Life = Life.DEAD) -> RankState:
    """Torch itself issued a call of `size` bytes there since the rank's last beat."""
    last = Call("all_reduce", key=5, bytes=size, since=NOW)
    return rank_in(rank, replace(here(WORLD, 5, recent=[last], completed=4), issued=last), life=life)


def test_who_died_after_what_torch_itself_issued_may_have_been_the_odd_one() -> None:
    small = call(5, age=0.1, bytes=4, shape=None)
    caller = rank_in(0, here(WORLD, 5, small), life=Life.DEAD)
    others = [rank_in(rank, here(WORLD, 5, small)) for rank in (2, 3)]
    for life in (Life.DEAD, Life.ALIVE):
        verdict = verdict_of(caller, issued(1, 400, life), *others)
        assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.SIZE, (1,))
    alike = verdict_of(issued(1, 4), *[rank_in(rank, here(WORLD, 5, call(5, bytes=4))) for rank in (0, 2, 3)])
    assert (alike.kind, alike.ranks) == (Kind.GONE, (1,))


def loading(moves: bool = True) -> RankState:
    return behind(
        3, host="host-b", gpu="GPU-3", doing="data", step=517, frames=LOADING, moves=moves, as_of=NOW - 4 * 10**8
    )


LEFT = replace(waits(3), groups={"0": here(WORLD, 5, completed=4)}, doing="user")

KINDS = {
    "absent": (loading(), Kind.ABSENT, None),
    "dead": (behind(3, life=Life.DEAD), Kind.GONE, None),
    "dead in the call": (replace(waits(3), life=Life.DEAD), Kind.GONE, None),
    "ended": (behind(3, life=Life.ENDED), Kind.GONE, None),
    "left by its own exception": (replace(LEFT, raised=Raised("0", call(5), "ValueError: no")), Kind.GONE, None),
    "frozen": (behind(3, life=Life.SILENT), Kind.FROZEN, None),
    "frozen in the call": (replace(waits(3), life=Life.SILENT), Kind.FROZEN, None),
    "unreachable": (RankState(3, host="host-b", life=Life.UNREACHABLE), Kind.UNREACHABLE, None),
    "another operation": (waits(3, operation="broadcast"), Kind.MISMATCH, Detail.OPERATION),
    "another shape": (waits(3, shape=(8,)), Kind.MISMATCH, Detail.SHAPE),
    "another type": (waits(3, dtype="int64"), Kind.MISMATCH, Detail.DTYPE),
    "dead of another type": (replace(waits(3, dtype="int64"), life=Life.DEAD), Kind.MISMATCH, Detail.DTYPE),
}


@pytest.mark.parametrize(("state", "kind", "detail"), KINDS.values(), ids=KINDS)
def test_one_rank(state: RankState, kind: Kind, detail: Detail | None) -> None:
    verdict = verdict_of(waits(0), waits(1), waits(2), state)
    assert (verdict.ranks, verdict.kind, verdict.detail) == ((3,), kind, detail)
    assert verdict.waiting == (0, 1, 2)
    assert (verdict.where.group, verdict.where.operation, verdict.where.key) == ("0", "all_reduce", 5)
    assert verdict.waited == 12 * SECOND
    assert verdict.is_error is not (state.doing == "data")


def test_a_missing_rank_is_unreachable() -> None:
    verdict = verdict_of(waits(0), waits(1), waits(2), hosts={3: "host-b"})
    assert (verdict.ranks, verdict.kind, verdict.culprits[0].host) == ((3,), Kind.UNREACHABLE, "host-b")


def test_all_came_and_nothing_ends() -> None:
    verdict = verdict_of(*map(waits, range(4)))
    assert (verdict.kind, verdict.ranks, verdict.is_error) == (Kind.STUCK, (0, 1, 2, 3), True)


def test_the_late_one_has_just_come() -> None:
    assert judged(waits(0), waits(1), waits(2), waits(3, age=1.0)) is None


def test_it_is_ending() -> None:
    """What is read of some is a beat older than what is read of the others."""
    assert judged(waits(0), waits(1), waits(2), rank_in(3, here(WORLD, 5))) is None


@pytest.mark.parametrize("age", [0.0, 3.0, 7.9])
def test_a_young_call_is_no_stall(age: float) -> None:
    assert judged(waits(0, age=age), waits(1, age=age), behind(2), behind(3)) is None


def test_shorter_thresholds() -> None:
    assert verdict_of(waits(0, age=2.0), waits(1), waits(2), behind(3), threshold=2 * SECOND).ranks == (3,)


def test_a_shape_that_is_only_arranged_otherwise_is_none() -> None:
    verdict = verdict_of(waits(0), waits(1), waits(2, shape=(2, 2)), behind(3))
    assert (verdict.kind, verdict.ranks) == (Kind.ABSENT, (3,))


def test_where_many_groups_disagree_none_tells_who_is_wrong_in_another() -> None:
    pairs = [Group(f"p{at}", "tp", (2 * at, 2 * at + 1)) for at in range(12)]

    def states(wrong: set[int]) -> list[RankState]:
        made = []
        for pair in pairs:
            for rank in pair.ranks:
                if wrong.isdisjoint(pair.ranks):
                    made.append(rank_in(rank, here(pair, 9, None, ring("aaaaaaaaa"))))
                else:
                    last = call(9, "broadcast" if rank in wrong else "all_reduce")
                    made.append(rank_in(rank, here(pair, 9, last, ring("aaaaaaaa"))))
        return made

    one = verdict_of(*states({3}), world=24)
    assert (one.kind, one.ranks) == (Kind.MISMATCH, (3,))
    many = verdict_of(*states({*range(1, 18, 2)}), world=24)
    assert (many.kind, many.ranks) == (Kind.MISMATCH, tuple(range(18)))


def test_two_against_two_names_all() -> None:
    verdict = verdict_of(waits(0), waits(1), waits(2, dtype="int64"), waits(3, dtype="int64"))
    assert (verdict.kind, verdict.detail, verdict.ranks, verdict.usual) == (
        Kind.MISMATCH,
        Detail.DTYPE,
        (0, 1, 2, 3),
        None,
    )


def ring(operations: str, first: int = 1) -> list[Call]:
    names = {"a": "all_reduce", "b": "broadcast", "g": "all_gather_into_tensor"}
    return [call(first + at, names[one]) for at, one in enumerate(operations)]


def after(rank: int, operations: str, waiting: bool = True) -> RankState:
    calls = ring(operations)
    return rank_in(rank, here(WORLD, len(calls), calls[-1] if waiting else None, calls[:-1] if waiting else calls))


@pytest.mark.parametrize(
    ("usual", "odd", "detail"),
    [
        ("abgabg", "abgag", Detail.SKIPPED),  # where the others go on to
        ("abgab", "abgag", Detail.SKIPPED),  # what the others did next in the step before
        ("abgab", "abgaab", Detail.EXTRA),
        ("aab", "aag", Detail.OPERATION),
    ],
)
def test_rings(usual: str, odd: str, detail: Detail) -> None:
    verdict = verdict_of(*(after(rank, usual) for rank in range(3)), after(3, odd))
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, detail, (3,))


def test_a_ring_that_is_one_ahead_tells_who_skipped() -> None:
    """Where the wrong calls went through, as some do, and the others wait for the last one in the end."""
    verdict = verdict_of(*(after(rank, "abgabga") for rank in range(3)), after(3, "abgbga", waiting=False))
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.SKIPPED, (3,))


def test_a_long_gone_difference_is_no_reason() -> None:
    """A shape that differed in a call that ended well has nothing to do with the rank that is late now."""
    calls = [call(1), call(2), call(3), call(4)]
    other = [call(1), call(2, shape=(8,)), call(3), call(4)]
    states = [rank_in(rank, here(WORLD, 5, call(5), other if rank == 1 else calls)) for rank in range(3)]
    verdict = verdict_of(*states, rank_in(3, here(WORLD, 4, recent=calls)))
    assert (verdict.kind, verdict.ranks) == (Kind.ABSENT, (3,))


def over(key: int, size: int) -> Call:
    """A call that came to its end: no more than this is kept of it."""
    return Call("all_reduce", key, size)


def stuck_after(sizes: dict[int, Iterable[int]], age: float = 12.0) -> list[RankState]:
    """All are in the call after those of so many bytes, by rank."""
    states = []
    for rank, made in sizes.items():
        calls = [over(key, size) for key, size in enumerate(made, start=1)]
        states.append(rank_in(rank, here(WORLD, len(calls) + 1, call(len(calls) + 1, "barrier", age), calls)))
    return states


def test_a_size_that_differed_is_why_all_are_stuck_later() -> None:
    """NCCL lets such a call end, with rubbish in it, and the next one never does."""
    usual, odd = (64, 32, 64, 32), (64, 16, 64, 32)
    verdict = verdict_of(*stuck_after({0: usual, 1: usual, 2: odd, 3: usual}))
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.SIZE, (2,))
    assert "rank 2 (host-a) has made all_reduce #2 of 16 bytes, the others all_reduce #2 of 32 bytes" in message(
        verdict
    )


def test_a_size_that_differs_again_and_again_is_no_reason() -> None:
    """As it went well all the time."""
    usual, odd = (64, 32, 64, 32), (64, 16, 64, 16)
    assert verdict_of(*stuck_after({0: usual, 1: usual, 2: odd, 3: usual})).kind is Kind.STUCK


def test_a_size_that_differed_is_no_stall_by_itself() -> None:
    usual, odd = (64, 32), (64, 16)
    assert judged(*stuck_after({0: usual, 1: usual, 2: odd, 3: usual}, age=1.0)) is None


TP, DP = Group("1", "tp", (0, 1)), Group("2", "dp", (1, 3))


def test_a_chain_over_groups() -> None:
    """0 waits for 1 in tp, which waits for 3 in dp, which loads data."""
    chain = rank_in(0, here(TP, 7, call(7))), rank_in(1, here(TP, 6), here(DP, 9, call(9)))
    verdict = verdict_of(*chain, rank_in(3, here(DP, 8), doing="data"), rank_in(2))
    assert (verdict.kind, verdict.ranks, verdict.waiting) == (Kind.ABSENT, (3,), (0, 1))
    assert (verdict.where.label, verdict.where.key) == ("dp", 9)


def test_each_in_another_group() -> None:
    """Both called what the other hasn't come to, and nobody can say who was to go first."""
    one, other = rank_in(1, here(TP, 6), here(DP, 9, call(9))), rank_in(3, here(DP, 8), here(TP, 7, call(7)))
    pair = replace(TP, ranks=(1, 3))
    verdict = verdict_of(one, replace(other, groups={**other.groups, "1": here(pair, 7, call(7))}))
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.ORDER, (1, 3))


def test_who_only_issued_a_call_and_loads_data_is_not_held_by_it() -> None:
    """On a GPU a call is in flight long after its caller went on."""
    pair = Group("1", "tp", (1, 3))
    one = rank_in(1, here(pair, 6), here(DP, 9, call(9)))
    other = rank_in(3, here(pair, 7, call(7)), here(DP, 8), doing="data")
    verdict = verdict_of(one, other)
    assert (verdict.kind, verdict.ranks) == (Kind.ABSENT, (3,))


def test_two_independent_reasons() -> None:
    left, right = Group("1", "tp", (0, 1)), Group("2", "tp", (2, 3))
    verdict = verdict_of(
        rank_in(0, here(left, 7, call(7))),
        rank_in(1, here(left, 6)),
        rank_in(2, here(right, 7, call(7))),
        rank_in(3, here(right, 6), life=Life.DEAD),
    )
    assert [(one.rank, one.kind) for one in verdict.culprits] == [(3, Kind.GONE), (1, Kind.ABSENT)]
    assert verdict.kind is Kind.GONE


def test_a_root_that_went_on_is_not_waited_for() -> None:
    """Rank 0 broadcast and went on; 1 is still in it, and 2, through which the data comes, never came."""
    root = rank_in(0, here(WORLD, 5, recent=[call(5, "broadcast", peer=0)]))
    verdict = verdict_of(
        root, waits(1, operation="broadcast", peer=0), behind(2), waits(3, operation="broadcast", peer=0)
    )
    assert (verdict.kind, verdict.ranks) == (Kind.ABSENT, (2,))


def test_of_a_root_that_has_not_come_nobody_else_is_needed() -> None:
    verdict = verdict_of(behind(0), waits(1, operation="broadcast", peer=0), behind(2), behind(3))
    assert (verdict.kind, verdict.ranks) == (Kind.ABSENT, (0,))


def transfer(operation: str, peer: int) -> Call:
    return Call(operation, peer=peer, since=NOW - 12 * SECOND)


PIPE = Group("3", "pp", (0, 1, 2, 3))


def stage(rank: int, operation: str | None = None, peer: int = 0, **more: object) -> RankState:
    return rank_in(rank, here(PIPE, 0, transfer(operation, peer) if operation else None, completed=0), **more)


def test_a_pipeline_waits_for_its_head() -> None:
    verdict = verdict_of(stage(0, moves=True), *(stage(rank, "recv", rank - 1) for rank in (1, 2, 3)))
    assert (verdict.kind, verdict.ranks, verdict.is_error) == (Kind.ABSENT, (0,), False)
    assert verdict.waiting == (1, 2, 3)
    assert (verdict.where.operation, verdict.where.ranks) == ("recv", (1, 0))


def test_both_ends_are_there() -> None:
    verdict = verdict_of(stage(0, "send", 1), stage(1, "irecv", 0))
    assert (verdict.kind, verdict.ranks) == (Kind.STUCK, (0, 1))


@pytest.mark.parametrize(("ago", "kind"), [(1.0, None), (3.0, Kind.GONE)])
def test_a_peer_that_has_just_ended(ago: float, kind: Kind | None) -> None:
    """It may have met the other end, which has not said so yet."""
    peer = stage(1, life=Life.ENDED, as_of=NOW - int(ago * SECOND))
    verdict = judged(stage(0, "recv", 1), peer)
    assert (verdict and verdict.kind) == kind


def test_a_late_root_and_one_that_died_after_its_part() -> None:
    """The ones that ended did theirs as well, and had no reason to die with it."""
    root = waits(0, operation="gather", peer=0)
    done = [rank_in(rank, here(WORLD, 5), life=Life.ENDED) for rank in (1, 2)]
    assert verdict_of(root, *done, rank_in(3, here(WORLD, 5), life=Life.DEAD)).ranks == (3,)


def test_both_receive() -> None:
    verdict = verdict_of(stage(0, "recv", 1), stage(1, "recv", 0))
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.ORDER, (0, 1))


def test_a_barrier_without_a_number() -> None:
    inside = [rank_in(rank, here(WORLD, 4, call(0, "monitored_barrier"), completed=4)) for rank in range(3)]
    assert verdict_of(*inside, behind(3)).ranks == (3,)


def test_a_group_that_a_rank_has_not_made_yet() -> None:
    assert verdict_of(waits(0), waits(1), waits(2), rank_in(3)).ranks == (3,)


def test_late_and_in_a_call_that_has_just_begun_is_moving() -> None:
    fresh = rank_in(3, here(DP, 9, call(9, age=0.3)), here(WORLD, 4))
    verdict = verdict_of(waits(0), waits(1), waits(2), fresh)
    assert (verdict.kind, verdict.ranks, verdict.is_error) == (Kind.ABSENT, (3,), False)


@pytest.mark.parametrize("states", [[], [behind(rank, moves=False) for rank in range(4)]])
def test_nobody_waits(states: list[RankState]) -> None:
    assert judged(*states) is None


def test_the_silent_store_silences_everybody() -> None:
    """Host b has the store: ranks of host c can't be heard, whether they are well or not."""
    hosts = {1: "host-b", 2: "host-c", 3: "host-c"}
    verdict = verdict_of(waits(0), hosts=hosts, store_host="host-b")
    assert (verdict.kind, verdict.ranks, verdict.store_host) == (Kind.UNREACHABLE, (1,), "host-b")
    assert verdict_of(waits(0), hosts=hosts, store_host="host-a").ranks == (1, 2, 3)


ECHO = "RuntimeError: [gloo] Connection closed by peer"


def aborted(rank: int, error: str = ECHO, life: Life = Life.DEAD, **more: object) -> RankState:
    return rank_in(rank, here(WORLD, 5, completed=4), raised=Raised("0", call(5, **more), error, NOW), life=life)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("culprit", "kind"),
    [
        (behind(3, life=Life.DEAD), Kind.GONE),
        (behind(3), Kind.ABSENT),
        (aborted(3, "OutOfMemoryError: no"), Kind.GONE),
        (aborted(3, dtype="int64"), Kind.MISMATCH),
    ],
)
def test_after_everybody_raised(culprit: RankState, kind: Kind) -> None:
    verdict = verdict_of(aborted(0), aborted(1), aborted(2, life=Life.ENDED), culprit)
    assert (verdict.kind, verdict.ranks) == (kind, (3,))


def test_after_a_time_out_on_all() -> None:
    assert verdict_of(*(aborted(rank, "RuntimeError: Timed out") for rank in range(4))).kind is Kind.STUCK


@pytest.mark.parametrize("life", [Life.ALIVE, Life.DEAD])
def test_what_all_ranks_were_refused_is_no_stall(life: Life) -> None:
    assert judged(*(aborted(rank, "ValueError: no such operation", life) for rank in range(4))) is None


def test_what_a_rank_was_refused_after_the_others_had_ended_is_no_stall() -> None:
    ended = [behind(rank, life=Life.ENDED) for rank in range(3)]
    assert judged(*ended, aborted(3, "TypeError: no such operation", Life.ALIVE)) is None
    assert verdict_of(*ended, aborted(3, ECHO, Life.ALIVE)).ranks == (3,)  # one call too many


def test_after_a_watchdog_ended_those_who_waited() -> None:
    dead = [replace(waits(rank), life=Life.DEAD) for rank in range(3)]
    verdict = verdict_of(*dead, loading())
    assert (verdict.kind, verdict.ranks, verdict.waiting) == (Kind.ABSENT, (3,), (0, 1, 2))


def test_an_exception_that_was_dealt_with() -> None:
    old = rank_in(0, here(WORLD, 5), raised=Raised("0", call(5), "ValueError: no", NOW - 90 * SECOND))
    newer = rank_in(1, here(WORLD, 6), raised=Raised("0", call(5), "ValueError: no", NOW))
    assert judged(old, newer, behind(2), behind(3)) is None


REFUSED = "TypeError: no tensor"


def refused(state: RankState, error: str = REFUSED, ago: float = 12.5, of: str = "0", **more: object) -> RankState:
    """`state` of a rank whose broadcast raised so long ago."""
    raised = Raised(of, call(5, "broadcast", ago, **more), error, NOW - int(ago * SECOND))  # type: ignore[arg-type]
    return replace(state, raised=raised)


def caught(state: RankState, *raised: object, **more: object) -> RankState:
    """The same, of a rank that has caught it."""
    state = refused(state, *raised, **more)  # type: ignore[arg-type]
    assert state.raised is not None
    return replace(state, raised=replace(state.raised, caught=True))


@pytest.mark.parametrize("of", ["0", "another"])
@pytest.mark.parametrize("key", [4, 5, 6], ids=["before it", "of its number", "after it"])
@pytest.mark.parametrize("who", [(0, 1, 2, 3), (0,), (3,)])
def test_what_was_refused_and_caught_counts_for_nothing(who: tuple[int, ...], key: int, of: str) -> None:
    """A call that is refused is not counted: the next one has its number."""
    states = [*(waits(rank, key) for rank in range(3)), rank_in(3, here(WORLD, key - 1))]
    verdict = verdict_of(*(caught(one, of=of) if one.rank in who else one for one in states))
    assert (verdict.kind, verdict.ranks, verdict.waiting) == (Kind.ABSENT, (3,), (0, 1, 2))
    assert verdict.waited == 12 * SECOND


def test_a_transfer_that_was_refused_and_caught_is_not_one_that_was_met() -> None:
    pair = Group("9", "pair", (0, 1))
    receives = rank_in(0, here(pair, 0, Call("recv", peer=1, since=NOW - 12 * SECOND)))
    sent = Raised("9", Call("send", peer=0, since=NOW - 13 * SECOND), REFUSED, NOW - 13 * SECOND, caught=True)
    verdict = verdict_of(receives, rank_in(1, here(pair, 0), raised=sent), behind(2), behind(3))
    assert (verdict.kind, verdict.ranks, verdict.waiting) == (Kind.ABSENT, (1,), (0,))


def test_what_all_were_refused_and_caught_is_no_stall() -> None:
    assert judged(*(caught(behind(rank)) for rank in range(4))) is None


def test_who_died_after_it_had_caught_something_died_of_another_thing() -> None:
    verdict = verdict_of(waits(0), waits(1), waits(2), caught(behind(3, life=Life.DEAD)))
    assert (verdict.kind, verdict.ranks, verdict.culprits[0].error) == (Kind.GONE, (3,), None)


@pytest.mark.parametrize(("ago", "kind"), [(1.2, Kind.GONE), (9.0, Kind.GONE), (11.0, None)])
def test_what_another_rank_was_the_reason_of_is_asked_for_though_it_was_caught(ago: float, kind: Kind | None) -> None:
    verdict = judged(*(caught(behind(rank), ECHO, ago) for rank in range(3)), behind(3, life=Life.DEAD))
    assert (verdict and verdict.kind) is kind


def test_what_a_peer_sent_is_known_though_it_caught_what_came_of_it() -> None:
    odd = caught(behind(3), ECHO, 1.2, dtype="int64")
    verdict = verdict_of(*(aborted(rank, operation="broadcast") for rank in range(3)), odd)
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.DTYPE, (3,))


def test_who_tries_again_waits_there() -> None:
    """And not in what it tried first, which had been another call."""
    again = [caught(waits(rank, age=4.0), ECHO, 5.0) for rank in range(3)]
    verdict = verdict_of(*again, behind(3), threshold=5 * SECOND)
    assert (verdict.kind, verdict.ranks, verdict.where.operation) == (Kind.ABSENT, (3,), "all_reduce")
    assert verdict.waited == 4 * SECOND


def test_who_tries_something_else_in_the_handler_waits_there() -> None:
    """All are refused; three fall back to the call that another one hasn't come to."""
    verdict = verdict_of(*(refused(waits(rank)) for rank in range(3)), behind(3))
    assert (verdict.kind, verdict.ranks, verdict.waiting) == (Kind.ABSENT, (3,), (0, 1, 2))
    assert (verdict.where.operation, verdict.waited) == ("all_reduce", 12 * SECOND)
    assert judged(*(refused(waits(rank, age=1.0), ago=1.5) for rank in range(3)), behind(3)) is None


TOLD = {
    "absent": "rank 3 (host-b, GPU-3) has not entered it; it is at train.py:88 load_batch, step 517, data loading, "
    "last beat 0.4 s ago",
    "dead": "rank 3 (host-a) has died; it: last beat 0.0 s ago",
    "ended": "rank 3 (host-a) has ended; it: last beat 0.0 s ago",
    "unreachable": "rank 3 (host-b) is unreachable: nothing answers on host-b",
    "left by its own exception": "rank 3 (host-a) has left it by ValueError: no; it: last beat 0.0 s ago",
    "another operation": "rank 3 (host-a) is in broadcast #5 of shape [4] float32, the others in all_reduce #5 of "
    "shape [4] float32; it is in a collective, last beat 0.0 s ago",
}


@pytest.mark.parametrize("which", TOLD)
def test_in_words(which: str) -> None:
    verdict = verdict_of(waits(0), waits(1), waits(2), KINDS[which][0])
    assert message(verdict) == f"all_reduce #5 of group `dp` has waited 12 s: {TOLD[which]}; ranks 0-2 wait"


def test_many_in_words() -> None:
    verdict = verdict_of(waits(0), behind(1), behind(2, step=7), behind(3))
    assert message(verdict) == (
        "all_reduce #5 of group `dp` has waited 12 s: ranks 1-3 have not entered it; rank 1: last beat 0.0 s ago; "
        "rank 2 is in step 7, last beat 0.0 s ago; rank 3: last beat 0.0 s ago; rank 0 waits"
    )


def test_transfers_and_circles_in_words() -> None:
    assert message(verdict_of(stage(0, "recv", 1), stage(1, as_of=0))) == (
        "recv between ranks 0 and 1 of group `pp` has waited 12 s: rank 1 (host-a) has not entered it; rank 0 waits"
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 4, 5, 9], "0-2,4-5,9"), (range(0, 40, 2), "0,2,4,6,8,10,12,14 and 12 more")],
)
def test_ranges(ranks: Iterable[int], text: str) -> None:
    assert ranges(ranks) == text


@pytest.mark.parametrize("which", KINDS)
def test_as_facts(which: str) -> None:
    verdict = verdict_of(waits(0), waits(1), waits(2), KINDS[which][0])
    told = facts(verdict)
    assert all(isinstance(value, str | int | float) and value != "" for value in told.values())
    assert (told["stall.kind"], told["stall.ranks"], told["stall.key"]) == (verdict.kind.value, "3", 5)
    written = json.loads(json.dumps(record(verdict)))
    assert written["culprits"][0]["rank"] == 3
    assert written["ranks"] == [3]


def test_the_facts_of_the_culprit() -> None:
    told = facts(verdict_of(waits(0), waits(1), waits(2), loading()))
    assert {
        name: told[name] for name in ("stall.doing", "stall.moves", "stall.at", "stall.step", "stall.waited_s")
    } == {
        "stall.doing": "data",
        "stall.moves": "true",
        "stall.at": "train.py:88 load_batch",
        "stall.step": 517,
        "stall.waited_s": 12.0,
    }
    assert told["stall.frames.3"] == "\n".join(LOADING)


@pytest.mark.parametrize(("bytes_of_2", "told"), [(64, (Kind.MISMATCH, Detail.SIZE, (2,))), (16, None)])
def test_who_died_where_another_call_was_made_need_not_have_waited(
    bytes_of_2: int, told: tuple[Kind, Detail, tuple[int, ...]] | None
) -> None:
    """gloo ends who gets too much at once, and torchrun the others before one of them has heard of that."""
    there = {rank: here(WORLD, 5, call(5, age=0.1, shape=None, bytes=16)) for rank in (1, 3)}
    there[2] = here(WORLD, 5, call(5, age=0.1, shape=None, bytes=bytes_of_2))
    over = here(WORLD, 5, recent=[call(5, age=0.2, shape=None, bytes=16)])
    states = [rank_in(0, over), *(rank_in(rank, one) for rank, one in there.items())]
    verdict = judged(*(replace(one, life=Life.DEAD) if one.rank == 1 else one for one in states))
    assert (verdict and (verdict.kind, verdict.detail, verdict.ranks)) == told


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ((5, 6, 6, 6), (Detail.SKIPPED, (1,))),
        ((5, 6, 5, 6), (Detail.SKIPPED, (1,))),
        ((5, 6, 5, 5), (Detail.ORDER, (0, 1))),
        ((5, 5, 5, 5), (Detail.ORDER, (0, 1))),
        ((None, None, None, None), (Detail.ORDER, (0, 1))),
        ((None, 6, 6, 6), (Detail.ORDER, (0, 1))),
    ],
)
def test_who_is_in_a_later_step_than_who_waits_for_it_has_left_a_call_out(
    steps: tuple[int | None, ...], told: tuple[Detail, tuple[int, ...]]
) -> None:
    """Rank 0 sends to all, and rank 1, which left that out, waits for it in the next step; the others have got it."""
    world = Group("0", "world", tuple(range(4)))
    tp, dp = Group("1", "tp", (0, 1)), {0: Group("2", "dp", (0, 2)), 1: Group("3", "dp", (1, 3))}
    sends, next_one = call(8, "broadcast", peer=0), call(9)
    states = (
        rank_in(0, here(world, 8, sends), here(tp, 8), here(dp[0], 8), step=steps[0]),
        rank_in(1, here(world, 7), here(tp, 9, next_one), here(dp[1], 8), step=steps[1]),
        rank_in(2, here(world, 8), here(dp[0], 9, next_one), step=steps[2]),
        rank_in(3, here(world, 8), here(dp[1], 9, next_one), step=steps[3]),
    )
    verdict = verdict_of(*states)
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, *told)
    if verdict.detail is Detail.SKIPPED:
        assert message(verdict) == (
            "broadcast #8 of group `world` has waited 12 s: rank 1 (host-a) has left it out, and is in a later step "
            "than who waits for it; it is in step 6, in a collective, last beat 0.0 s ago; ranks 0, 2-3 wait"
        )


def test_a_thousand_in_a_circle() -> None:
    """The dearest of all: everybody sends to the next one."""
    world = tuple(range(1024))
    states = {
        rank: rank_in(rank, here(replace(PIPE, ranks=world), 0, transfer("send", (rank + 1) % 1024), completed=0))
        for rank in world
    }
    began = time.perf_counter()
    verdict = judge(states, world, NOW)
    took = time.perf_counter() - began
    print(f"1024 ranks in a circle: {took * 1e3:.0f} ms")
    assert verdict is not None
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.ORDER, world)
    assert "1024" not in message(verdict)


@pytest.mark.parametrize(("tp", "dp", "pp"), [(4, 4, 4), (8, 32, 4)])
def test_large_worlds(tp: int, dp: int, pp: int) -> None:
    templates = [Template("tp", "all_reduce"), Template("pp", "pass"), Template("dp", "reduce_scatter_tensor")]
    templates += [Template("dp", "all_gather_into_tensor"), Template("world", "all_reduce")]
    made = programs(groups_of(tp, dp, pp), templates, steps=5, seed=1)
    late = len(made) // 3
    run = Run({**made, late: made[late][: len(made[late]) // 2]})
    now = run.last + 12
    roll = run.roll(now)
    roll[late] = replace(run.state(late, now), doing="data", moves=False)
    began = time.perf_counter()
    verdict = judge(roll, run.programs, int(now * SECOND))
    took = time.perf_counter() - began
    print(f"{len(made)} ranks, {len(run.waiting())} waiting: {took * 1e3:.0f} ms")
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (Kind.ABSENT, (late,))
    assert set(verdict.waiting) == run.waiting()
    assert message(verdict)


@pytest.mark.parametrize(("ago", "kind"), [(1.0, None), (11.0, Kind.STUCK)])
def test_who_was_sent_to_just_now_is_not_stuck(ago: float, kind: Kind | None) -> None:
    """The others have got the root's message and gone on; this rank's last words are older than that, or are not."""
    passed = replace(here(WORLD, 5), completed_at=NOW - int(ago * SECOND))
    others = [rank_in(rank, passed) for rank in (0, 1, 2)]
    verdict = judged(*others, waits(3, operation="broadcast", peer=0, age=40.0))
    assert (verdict and verdict.kind) is kind


PAIR = Group("4", "tp", (2, 3))
NARROW = {"bytes": 8448, "shape": (2112,), "dtype": "float32"}
WIDE = {"bytes": 16896, "shape": (2112,), "dtype": "float64"}


def in_pair(rank: int, age: float, life: Life = Life.ALIVE, **more: object) -> RankState:
    """As the part in C wrote it when the call was entered, since its last beat."""
    return rank_in(rank, here(WORLD, 4), here(PAIR, 7, call(7, age=age, **more)), life=life)  # type: ignore[arg-type]


def left_pair(rank: int, **more: object) -> RankState:
    raised = Raised(PAIR.name, call(7, age=0.3, **more), ECHO, NOW)  # type: ignore[arg-type]
    return rank_in(rank, here(WORLD, 4), here(PAIR, 7, completed=6), raised=raised)


@pytest.mark.parametrize(
    "other", [in_pair(2, 0.3, **WIDE), left_pair(2, **WIDE)], ids=["still in it", "has just raised"]
)
def test_whom_another_type_aborts_is_not_the_reason(other: RankState) -> None:
    """gloo ends who gets more than it has room for; those who wait for that one elsewhere hear it first."""
    verdict = verdict_of(aborted(0, life=Life.ALIVE), aborted(1), in_pair(3, 0.3, Life.DEAD, **NARROW), other)
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.DTYPE, (2, 3))
    assert (verdict.where.label, verdict.where.key) == ("tp", 7)
    assert verdict.waiting == (0, 1)


def test_who_may_as_well_be_wrong_is_named_with_it() -> None:
    """Nobody has waited for 2 alone, nor for both."""
    hears = Raised(DP.name, call(5), ECHO, NOW)
    one = rank_in(1, here(WORLD, 4), here(DP, 5, completed=4), raised=hears)
    dead = in_pair(3, 0.3, Life.DEAD, **NARROW)
    verdict = verdict_of(rank_in(0, here(WORLD, 4)), one, dead, in_pair(2, 0.3, **WIDE))
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.DTYPE, (2, 3))
    assert (verdict.where.label, verdict.where.key) == ("tp", 7)


def test_who_died_in_a_call_like_its_peer_is_the_reason() -> None:
    verdict = verdict_of(aborted(0), aborted(1), in_pair(3, 0.3, Life.DEAD, **NARROW), in_pair(2, 0.3, **NARROW))
    assert (verdict.kind, verdict.ranks) == (Kind.GONE, (3,))


def test_the_stages_of_a_pipeline_are_not_compared() -> None:
    """3 leaves out its last call of `tp` and waits in the world's, and 2 waits for it: that the ranks of the other
    stage have made no such call in theirs is as it should be."""
    templates = [Template("tp", "all_reduce"), Template("tp", "all_reduce"), Template("tp", "all_reduce", stage=1)]
    templates = [Template("pp", "pass"), *templates, Template("world", "all_reduce")]
    made = programs(groups_of(2, 1, 2), templates, steps=1, seed=1)
    run = Run({**made, 3: [*made[3][:3], made[3][4]]})
    now = run.last + 12
    verdict = judge(run.roll(now), run.programs, int(now * SECOND))
    assert verdict is not None
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.ORDER, (2, 3))


def test_of_equal_groups_the_others_tell_who_leaves_out_a_call() -> None:
    """The same with the two groups of `tp` side by side."""
    templates = [Template("tp", "all_reduce"), Template("tp", "all_reduce"), Template("world", "all_reduce")]
    made = programs(groups_of(2, 2, 1), templates, steps=1, seed=1)
    run = Run({**made, 3: [made[3][0], made[3][2]]})
    now = run.last + 12
    verdict = judge(run.roll(now), run.programs, int(now * SECOND))
    assert verdict is not None
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.ORDER, (3,))
    assert (verdict.where.label, verdict.where.key, verdict.where.operation) == ("tp", 2, "all_reduce")
    assert "rank 3 is waited for in it, and in turn waits elsewhere" in message(verdict)


def test_a_call_too_many_in_words() -> None:
    """One that was never made twice in a row, nor after what one left out would have been followed by."""
    operations = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    templates = [*(Template("tp", one) for one in operations), Template("world", "barrier")]
    made = programs(groups_of(2, 2, 1), templates, steps=4, seed=1)
    run = Run({**made, 3: [*made[3][:11], made[3][10], *made[3][11:]]})
    now = run.last + 12
    verdict = judge(run.roll(now), run.programs, int(now * SECOND))
    assert verdict is not None
    assert (verdict.kind, verdict.detail, verdict.ranks) == (Kind.MISMATCH, Detail.EXTRA, (3,))
    assert "rank 3 made a call too many: is in reduce_scatter_tensor #10" in message(verdict)


def test_of_whom_only_the_size_is_known_that_is_told() -> None:
    """Three of `tp` disagree by shape; what 2 made is over, and only by its bytes do others tell that it was odd."""

    def made(rank: int, mine: Group, size: int, over: bool) -> RankState:
        shape, dtype = (None, None) if over else ((size // 4,), "float32")
        before = call(6, bytes=64, shape=None, dtype=None)
        last = call(7, bytes=size, shape=shape, dtype=dtype)
        return rank_in(rank, here(mine, 7, None if over else last, [before, last] if over else [before]))

    trios = [Group(f"tp {first}", "tp", (first, first + 1, first + 2)) for first in (0, 3, 6)]
    rest = [made(rank, one, 32, over=True) for one in trios[1:] for rank in one.ranks]
    verdict = verdict_of(
        made(0, trios[0], 16, over=False), made(1, trios[0], 32, over=False), made(2, trios[0], 16, over=True), *rest,
        world=9,
    )  # fmt: skip
    told = {one.rank: one.detail for one in verdict.culprits}
    assert (verdict.kind, told) == (Kind.MISMATCH, {0: Detail.SHAPE, 2: Detail.SIZE})
