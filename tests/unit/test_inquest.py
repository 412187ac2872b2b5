"""What a job died of, from what its ranks wrote: fault by fault."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from harness.story import BROKEN, CLOSED, RANKS, Record, at, beats, ended, raised, state_of, stated
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtrace_pytorch.stalls import telling
from ddtrace_pytorch.stalls.history import History
from ddtrace_pytorch.stalls.inquest import Cause, Finding, inquire, moments
from ddtrace_pytorch.stalls.roll import Call, GroupState, Life, Raised, RankState
from ddtrace_pytorch.stalls.verdict import judge


def history(rank: int, *records: Record, host: str = "host-a", world: int = 4) -> History:
    one = History(rank, {"host": host, "world_size": world, "pid": 100 + rank})
    for record in records:
        one.add(record)
    return one


def found(*histories: History) -> Finding:
    return inquire({one.rank: one for one in histories})


def lost_it(*, beat: float, since: float, at: float, over: float) -> list[History]:
    """All but rank 1, which they waited for `since` then; gloo told them `at` that time, and they ended."""
    words = ("RuntimeError", CLOSED.partition(": ")[2])
    return [
        history(rank, *beats(beat, 42, since=since), raised(rank, 42, at, CLOSED), ended("exception", over, words))
        for rank in (0, 2, 3)
    ]


def killed() -> list[History]:
    """Rank 1 is killed at 20.5 s; the others, who wait for it, hear of it and end."""
    last = stated(state_of(1, 41, 20, doing="user", frames=("/job/train.py:24 load",), step=7), "killed")
    return [history(1, *beats(20, 41), last, ended("killed", 20)), *lost_it(beat=22, since=19, at=22.5, over=23)]


def test_a_killed_rank_is_the_reason_though_all_the_others_raised() -> None:
    finding = found(*killed())
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks, finding.first.at) == (Cause.KILLED, (1,), at(20))
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"], finding.rebuilt) == ("gone", [1], True)
    assert finding.verdict["waiting"] == [0, 2, 3]
    assert "all_reduce #42 of group `world`" in finding.verdict["message"]
    assert "train.py:24 load" in finding.verdict["message"]
    assert not finding.well


def test_a_log_that_just_ends_while_others_go_on_is_of_a_dead_rank() -> None:
    others = [history(rank, *beats(40, 42, since=21), ended("signal:SIGTERM", 40.5)) for rank in (0, 2, 3)]
    finding = found(history(1, *beats(20, 41)), *others)
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.KILLED, (1,))
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"], finding.verdict["waiting"]) == ("gone", [1], [0, 2, 3])


def test_a_short_log_is_no_reason_if_all_logs_end_together() -> None:
    finding = found(*(history(rank, *beats(20 + rank)) for rank in RANKS))
    assert (finding.first, finding.verdict, finding.well) == (None, None, False)
    assert {fate.open for fate in finding.fates.values()} == {True}


def test_whom_a_signal_ended_is_the_reason_where_the_others_lost_it() -> None:
    """Somebody ended one process; its peers' collectives raised before the launcher ended them."""
    one = history(1, *beats(20, 41), ended("signal:SIGTERM", 20.2))
    finding = found(one, *lost_it(beat=20, since=20.1, at=20.25, over=20.3))
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks, finding.first.at) == (Cause.SIGNAL, (1,), at(20.2))


@pytest.mark.parametrize(
    ("later", "named"),
    [
        pytest.param(20.35, (1,), id="the launcher ended the others once one was gone"),
        pytest.param(20.25, RANKS, id="all were told at once"),
    ],
)
def test_who_had_ended_before_the_others_were_told_to_is_the_reason(later: float, named: tuple[int, ...]) -> None:
    one = history(1, *beats(20, 41), ended("signal:SIGTERM", 20.2))
    finding = found(one, *(history(rank, *beats(20, 41), ended("signal:SIGTERM", later)) for rank in (0, 2, 3)))
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.SIGNAL, named)


def test_of_several_hosts_nobody_knows_who_was_told_first() -> None:
    one = history(1, *beats(20, 41), ended("signal:SIGTERM", 20.2), host="host-b")
    finding = found(one, *(history(rank, *beats(20, 41), ended("signal:SIGTERM", 20.6)) for rank in (0, 2, 3)))
    assert finding.first is not None
    assert finding.first.ranks == RANKS


def test_an_exception_of_its_own_comes_before_those_it_caused() -> None:
    own = "ValueError: no such file"
    one = history(1, *beats(20, 41), ended("exception", 20.4, ("ValueError", "no such file")))
    others = [
        history(
            rank,
            *beats(20, 42, since=18),
            raised(rank, 42, 20.3, CLOSED),  # a clock that is 0.1 s behind
            ended("exception", 20.4, ("RuntimeError", "Connection closed by peer")),
        )
        for rank in (0, 2, 3)
    ]
    finding = found(one, *others)
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.EXCEPTION, (1,))
    assert own in finding.first.what
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("gone", [1])
    assert own in finding.verdict["message"]


def test_an_exception_of_its_own_in_a_collective_is_told_with_its_error() -> None:
    own = "ValueError: tensors of two devices"
    one = history(1, *beats(20, 41), raised(1, 42, 20.2, own), ended("exception", 20.4, ("ValueError", "…")))
    others = [
        history(rank, *beats(21, 42, since=18), raised(rank, 42, 21.3, CLOSED), ended("exception", 21.4))
        for rank in (0, 2, 3)
    ]
    finding = found(one, *others)
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("gone", [1])
    assert own in finding.verdict["message"]
    assert finding.first is not None
    assert finding.first.ranks == (1,)


def ddp(skips: int, dies: int) -> list[History]:
    """A bucket, another one and the loss in each step, of which the wrappers see the last; rank `skips` leaves it out
    once, gloo aborts rank `dies`, and an agent ends the others."""
    sizes = (2048, 512, 4)
    made = [(key, sizes[key % 3]) for key in range(9, 41)]
    ring = [Call("all_reduce", key, size, (size // 4,), "float32", recorded=True) for key, size in made]
    loss = Call("all_reduce", 41, 4, (), "float32", since=at(19.5), seen=13)
    bucket = Call("all_reduce", 41, 2048, (512,), "float32", since=at(19.5), recorded=True)
    told = []
    for rank in RANKS:
        call = bucket if rank == skips else loss
        here = GroupState("0", "world", RANKS, "gloo", 41, 40, call, (*ring, call), unseen=28)
        lines = ("/job/train.py:70 main",) if rank == skips else ("/job/train.py:51 log_loss", "/job/train.py:80 main")
        said = RankState(rank, "host-a", as_of=at(20.5), step=13, frames=lines, groups={"0": here})
        if rank == dies:
            # Its last beat came before the call, and knows of fewer that nobody saw.
            before = replace(here, entered=38, completed=38, current=None, recent=(), unseen=26)
            before = replace(before, later=replace(loss, key=0))
            said = replace(said, as_of=at(19), groups={"0": before})
            told.append(history(rank, *beats(19, 38), stated(said, "killed"), ended("killed", 19)))
        elif rank == max(set(RANKS) - {skips, dies}):
            left = replace(here, entered=40, current=None, recent=tuple(ring))
            said = replace(said, groups={"0": left}, raised=Raised("0", loss, CLOSED, at(20.4)))
            told.append(history(rank, *beats(19, 38), stated(said, "raised"), ended("signal:SIGTERM", 20.6)))
        else:
            told.append(history(rank, *beats(19, 38), stated(said, "signal"), ended("signal:SIGTERM", 20.6)))
    return told


@pytest.mark.parametrize(("skips", "dies"), [(2, 1), (0, 3)])
def test_beside_calls_that_nobody_saw_who_left_one_out_is_the_reason_not_whom_gloo_ended(skips: int, dies: int) -> None:
    finding = found(*ddp(skips, dies))
    assert finding.verdict is not None
    (culprit,) = finding.verdict["culprits"]
    assert (finding.verdict["kind"], culprit["detail"], culprit["rank"]) == ("mismatch", "skipped", skips)
    assert finding.verdict["waiting"] == sorted({*RANKS} - {skips})
    assert (
        "#41 of shape [512] float32, the others in all_reduce #41 of shape [] float32; it is at train.py:70"
        in (finding.verdict["message"])
    )
    assert finding.first is not None
    assert (finding.first.ranks, finding.first.cause) == ((skips,), Cause.STALL)
    assert finding.broken == (dies,)


def test_who_said_so_before_all_had_spoken_does_not_have_the_last_word() -> None:
    logs = ddp(2, 1)
    error = Raised("0", Call("all_reduce", 41, 4, (), "float32", since=at(19.5)), CLOSED, at(20.4))
    heard = {rank: state_of(rank, 40, 20.4, raised=error) for rank in (0, 3)} | {2: RankState(2, life=Life.ENDED)}
    died = replace(state_of(1, 40, 19), life=Life.DEAD)
    said = judge({1: died, **heard}, RANKS, at(20.5))
    assert said is not None
    assert said.ranks == (1, 2)
    logs[0].add(telling.record(said))
    finding = found(*logs)
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"], finding.rebuilt) == ("mismatch", [2], True)


def stall_of(rank: int, over: float | None, **how: str) -> list[Record]:
    """All wait for rank 1 since 4 s; `over`: when that went on, or `how` else it ended."""
    tags = {"op": "all_reduce", "group": "world", "group_name": "0", "key": 42}
    began: list[Record] = [{"type": "event", "name": "stall", "ts": at(14), "tags": {**tags, "waited_s": 10.0}}]
    if rank == 0:
        roll = {one: state_of(one, 42, 14, since=4) for one in (0, 2, 3)}
        said = judge({1: state_of(1, 41, 14, doing="data", moves=False), **roll}, RANKS, at(14))
        assert said is not None
        began.append(telling.record(said))
    return began + ([{"type": "event", "name": "stall over", "ts": at(over), "tags": tags | how}] if over else [])


def test_a_stall_that_is_interrupted_is_the_reason_not_the_interruption() -> None:
    """A person ends all; rank 1 is the first to go, and so the others' call ends as well."""
    stop = ended("exception", 20.1, ("KeyboardInterrupt", ""))
    others = [
        history(
            rank,
            *beats(20, 42, since=4),
            *stall_of(rank, over=20.6),
            {"type": "beat", "ts": at(21), "groups": {"0": [42, 42, None, 0]}},
            ended("exception", 21.1, ("KeyboardInterrupt", "")),
        )
        for rank in (0, 2, 3)
    ]
    finding = found(history(1, *beats(20, 41), stop), *others)
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks, finding.first.at) == (Cause.STALL, (1,), at(4))
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("absent", [1])
    assert (finding.interrupted, finding.overcome, finding.well) == (at(20.1), (), False)


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize("beats_on", [0, 3])
def test_what_an_interruption_ended_did_not_go_on_though_the_rank_counts_it(error: str, beats_on: int) -> None:
    """As with Ctrl-C on gloo: the call ends as rank 1 goes, the interpreter raises what it had heard, and no
    collective."""
    after: list[Record] = [
        {"type": "beat", "ts": at(21 + more), "groups": {"0": [42, 42, None, 0]}} for more in range(beats_on)
    ]
    end = 20.4 + beats_on
    others = [
        history(
            rank,
            *beats(20, 42, since=4),
            *stall_of(rank, over=None),
            *after,
            stated(state_of(rank, 42, end), "exception"),
            ended("exception", end, (error, "")),
        )
        for rank in (0, 2, 3)
    ]
    finding = found(history(1, *beats(20, 41), ended("exception", 20.1, (error, ""))), *others)
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.STALL, (1,))
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("absent", [1])
    assert (finding.interrupted, finding.overcome) == (at(20.1), ())


PREEMPTED = ("__main__.Preempted", "told to end")


@pytest.mark.parametrize(
    "end",
    [ended("signal:SIGINT", 20.4), ended("exception", 20.4, PREEMPTED), ended("killed", 50), None],
    ids=["exits", "raises its own", "killed later", "log ends"],
)
def test_a_stall_is_the_reason_where_a_signal_ended_it_whatever_a_handler_made_of_it(end: Record | None) -> None:
    def story(rank: int, *first: Record) -> History:
        told = stated(state_of(rank, 42, 20.1, since=None if rank == 1 else 4), "signal")
        return history(rank, *first, told, *([end] if end else []))

    others = [story(rank, *beats(20, 42, since=4), *stall_of(rank, over=None)) for rank in (0, 2, 3)]
    # Its host has the last word, and rank 1's is lost.
    gone = history(1, *beats(20, 41), stated(state_of(1, 41, 20.1), "signal"), ended("exception", 60, PREEMPTED))
    finding = found(gone, *others)
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks, finding.interrupted) == (Cause.STALL, (1,), at(20.1))
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"], finding.overcome) == ("absent", [1], ())


@pytest.mark.parametrize(("steps", "outlived"), [(1, False), (2, True)])
def test_who_trains_on_after_a_signal_does_not_end_because_of_it(steps: int, outlived: bool) -> None:
    later: list[Record] = [
        {"type": "beat", "ts": at(21 + more), "steps": 7 + more, "calls": 50, "groups": {}} for more in range(steps + 1)
    ]
    end = ended("exception", 30, ("ValueError", "no such file"))
    finding = found(history(0, *beats(20, 42), stated(state_of(0, 42, 20.1), "signal"), *later, end, world=1))
    assert finding.first is not None
    assert (finding.first.cause is Cause.EXCEPTION, finding.first.at == at(30)) == (outlived, outlived)


@pytest.mark.parametrize(("how", "later"), [("unknown", False), ("unknown", True), ("raised", False)])
def test_a_call_that_nobody_saw_raise_went_on_only_where_its_rank_lived_on(how: str, later: bool) -> None:
    """As in DistributedDataParallel: rank 1 is killed, and the others end in the backward pass."""
    end = 30.2 if later else 20.8
    others = [
        history(
            rank,
            *beats(20, 42, since=4),
            {"type": "beat", "ts": at(20.5), "groups": {"0": [42, 42, None, 0]}},
            *stall_of(rank, over=20.6, how=how),
            *(beats(30, 50)[21:] if later else ()),
            ended("exception", end, BROKEN),
        )
        for rank in (0, 2, 3)
    ]
    finding = found(history(1, *beats(20, 41), ended("killed", end - 1)), *others)
    assert bool(finding.overcome) is later
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.KILLED if later else Cause.STALL, (1,))


def test_an_interruption_after_a_stall_that_went_on_is_told_without_it() -> None:
    stop = ended("exception", 30.5, ("KeyboardInterrupt", ""))
    others = [
        history(rank, *beats(20, 42, since=4), *stall_of(rank, over=None), *beats(30, 50)[21:], stop)
        for rank in (0, 2, 3)
    ]
    finding = found(history(1, *beats(30, 50), stop), *others)
    assert finding.first is not None
    assert (finding.first.cause, finding.verdict) == (Cause.SIGNAL, None)


def test_a_stall_that_went_on_is_told_of_a_job_that_ended_well() -> None:
    others = [
        history(rank, *beats(20, 42, since=4), *stall_of(rank, over=20.6), *beats(30, 50)[21:], ended("destroyed", 31))
        for rank in (0, 2, 3)
    ]
    finding = found(history(1, *beats(30, 50), ended("destroyed", 31)), *others)
    (stall,) = finding.overcome
    assert (stall.at, stall.ranks, round(stall.seconds, 3)) == (at(4), (1,), 16.6)
    assert "rank 1 (host-a) has not entered it" in stall.message
    assert (finding.well, finding.first, finding.verdict, finding.interrupted) == (True, None, None, None)


def test_a_mismatch_is_told_though_the_innocent_raised_too() -> None:
    odd = history(1, *beats(20, 41), raised(1, 42, 20.5, CLOSED, "broadcast"), ended("exception", 20.6))
    others = [
        history(rank, *beats(20, 41), raised(rank, 42, 20.5, CLOSED), ended("exception", 20.6)) for rank in (0, 2, 3)
    ]
    finding = found(odd, *others)
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("mismatch", [1])
    assert "broadcast" in finding.verdict["message"]


def test_who_died_after_a_long_wait_is_not_the_reason() -> None:
    # NCCL's watchdog aborts one rank after the other; rank 3 never came.
    waited = [history(rank, *beats(600 + 6 * rank, 42, since=3), ended("killed", 600 + 6 * rank)) for rank in (0, 1, 2)]
    finding = found(*waited, history(3, *beats(640, 41), ended("signal:SIGTERM", 640)))
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("absent", [3])


def test_a_hang_that_somebody_ended_began_with_the_wait() -> None:
    waiting = [history(rank, *beats(600, 42, since=20), ended("signal:SIGTERM", 600.1)) for rank in (0, 1, 2)]
    finding = found(*waiting, history(3, *beats(600, 41), ended("signal:SIGTERM", 600.1)))
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks, finding.first.at) == (Cause.STALL, (3,), at(20))
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("absent", [3])


def test_a_hang_that_goes_on_is_found_too() -> None:
    finding = found(*(history(rank, *beats(60, 42, since=20)) for rank in (0, 1, 2)), history(3, *beats(60, 41)))
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.STALL, (3,))


def test_who_was_told_to_end_while_it_waited_is_not_the_reason() -> None:
    told = "KeyboardInterrupt: "
    waiting = [
        history(
            rank,
            *beats(60, 42, since=20),
            raised(rank, 42, 60.1, told),
            ended("exception", 61, ("KeyboardInterrupt", "")),
        )
        for rank in (0, 1, 2)
    ]
    finding = found(*waiting, history(3, *beats(60, 41), ended("exception", 60.5, ("KeyboardInterrupt", ""))))
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("absent", [3])


def test_an_exception_that_was_dealt_with_long_ago_is_not_the_first_failure() -> None:
    old = stated(state_of(0, 5, 3, raised=Raised("gone", Call("all_reduce", 2), "ValueError: old", at(3))), "raised")
    finding = found(
        history(0, old, *beats(100, 41), ended("signal:SIGTERM", 100.5)),
        *(history(rank, *beats(100, 41), ended("signal:SIGTERM", 100.5)) for rank in (1, 2, 3)),
    )
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.SIGNAL, RANKS)


@pytest.mark.parametrize("caught", [True, None])
def test_an_exception_that_was_caught_is_not_the_first_failure(caught: bool | None) -> None:
    """All ranks are refused, and say so; later they are told to end."""
    refused = Raised("0", Call("broadcast", 42), "TypeError: no tensor", at(70))
    told = []
    for rank in RANKS:
        said = [state_of(rank, 41, second, raised=refused) for second in (70, 71)]
        said[1] = replace(said[1], raised=replace(refused, caught=caught))
        records = [stated(said[0], "raised"), stated(said[1], "caught"), *beats(100, 41)[72:]]
        told.append(history(rank, *records, ended("signal:SIGTERM", 100.5)))
    finding = found(*told)
    assert finding.first is not None
    assert finding.first.cause is (Cause.SIGNAL if caught else Cause.RAISED)


def live(kind_of: RankState, second: float = 15, **more: Any) -> Record:
    """The record that a rank wrote of a stall since 4 s, rank 3 being as it is said."""
    roll = {rank: state_of(rank, 42, second, since=4, doing="collective") for rank in (0, 1, 2)} | {3: kind_of}
    verdict = judge(roll, RANKS, at(second))
    assert verdict is not None
    return telling.record(verdict) | more


def test_what_was_said_while_it_happened_is_taken_first() -> None:
    frames = ("/job/train.py:88 load_batch",)
    record = live(state_of(3, 41, 15, frames=frames, moves=False))
    waiting = [history(rank, *beats(40, 42, since=4), ended("signal:SIGTERM", 40)) for rank in (0, 1, 2)]
    waiting[0].add(record)
    finding = found(*waiting, history(3, *beats(40, 41), ended("signal:SIGTERM", 40)))
    assert (finding.verdict, finding.rebuilt) == (record, False)
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks, finding.first.at) == (Cause.STALL, (3,), at(4))


def test_who_was_said_to_be_frozen_is_not_told_of_as_killed_first() -> None:
    """A launcher kills all in the end; the frozen one's last beat is the oldest."""
    record = live(state_of(3, 41, 4, life=Life.SILENT))
    waiting = [history(rank, *beats(40, 42, since=4), ended("killed", 40)) for rank in (0, 1, 2)]
    waiting[0].add(record)
    finding = found(*waiting, history(3, *beats(4, 41), ended("killed", 4)))
    assert finding.verdict == record
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks, finding.first.at) == (Cause.FROZEN, (3,), at(4))
    assert "killed later" in finding.first.what


def test_a_stall_that_was_over_is_not_the_reason() -> None:
    record = live(state_of(3, 41, 15, moves=False))
    over = {
        "type": "event", "ts": at(25), "name": "stall over",
        "tags": {"op": "all_reduce", "group": "world", "group_name": "0", "key": 42, "took_s": 21.0},
    }  # fmt: skip
    zero = history(0, *beats(300, 4000), record, over, ended("destroyed", 300))
    finding = found(zero, *(history(rank, *beats(300, 4000), ended("destroyed", 300)) for rank in (1, 2, 3)))
    assert (finding.first, finding.verdict, finding.well) == (None, None, True)


def test_an_event_of_the_users_own_is_no_stall() -> None:
    named = {"type": "event", "ts": at(25), "name": "stall", "seq": 1, "attributes": {"op": "all_reduce"}}
    one = history(0, *beats(300, 4000), named)
    assert not one.moments
    one.add({**named, "tags": {"op": "all_reduce"}})  # one of ours
    assert one.moments


def test_a_long_last_wait_that_came_to_its_end_is_no_reason() -> None:
    record = live(state_of(3, 41, 15, moves=False))
    ranks = [history(rank, *beats(20, 42, since=4), ended("destroyed", 20.5)) for rank in (0, 1, 2)]
    late = history(3, *beats(20, 41), ended("destroyed", 20.5))
    assert found(*ranks, late).well
    ranks[0].add(record)
    assert found(*ranks, late).well


def test_an_exception_after_a_long_wait_that_was_over_is_told_without_it() -> None:
    end = ended("exception", 20.6, ("ValueError", "no"))
    ranks = [history(rank, *beats(20, 42, since=4), end) for rank in (0, 1, 2)]
    finding = found(*ranks, history(3, *beats(20, 41), ended("destroyed", 20.5)))
    assert finding.verdict is None
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.EXCEPTION, (0, 1, 2))


def test_a_wait_in_a_call_of_torchs_own_that_raised_counts() -> None:
    # As in DistributedDataParallel: nobody of ours saw it raise.
    end = ended("exception", 22.6, BROKEN)
    known = stated(state_of(0, 42, 20, since=17), "exception")
    ranks = [history(rank, *beats(20, 42, since=17), *([] if rank else [known]), end) for rank in (0, 2, 3)]
    finding = found(history(1, *beats(20, 41), ended("killed", 20)), *ranks)
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"], finding.verdict["waiting"]) == ("gone", [1], [0, 2, 3])


def test_somebody_who_is_only_late_is_not_the_reason_that_all_were_told_to_end() -> None:
    record = live(state_of(3, 41, 15, moves=True))
    ranks = [history(rank, *beats(16, 42, since=4), ended("signal:SIGTERM", 16.2)) for rank in (0, 1, 2)]
    ranks[0].add(record)
    late = history(3, *beats(16, 41), stated(state_of(3, 41, 16, moves=True), "stall"), ended("signal:SIGTERM", 16.2))
    finding = found(*ranks, late)
    assert finding.verdict is None
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.SIGNAL, RANKS)


def test_all_that_are_ended_from_outside_are_told_so() -> None:
    finding = found(*(history(rank, *beats(20, 41), ended("signal:SIGTERM", 20.5)) for rank in RANKS))
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.SIGNAL, RANKS)
    assert finding.verdict is None


def test_who_left_early_is_the_reason_that_others_are_ended() -> None:
    finding = found(
        history(0, *beats(20), ended("exit", 20.1)),
        *(history(rank, *beats(20), ended("signal:SIGTERM", 20.4)) for rank in (1, 2, 3)),
    )
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.LEFT, (0,))


def test_one_that_ends_later_than_others_is_well() -> None:
    finding = found(*(history(rank, *beats(20 + 5 * rank), ended("destroyed", 20 + 5 * rank)) for rank in RANKS))
    assert finding.well
    assert finding.first is None


def test_a_rank_without_a_log_is_not_guilty_if_a_known_one_explains_all() -> None:
    waiting = [history(rank, *beats(40, 42, since=4), ended("signal:SIGTERM", 40)) for rank in (0, 1)]
    waiting[0].add(stated(state_of(0, 42, 15, since=4), "stall"))
    finding = found(*waiting, history(2, *beats(40, 41), ended("signal:SIGTERM", 40)))
    assert finding.missing == (3,)
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("absent", [2])


def test_a_rank_without_a_log_is_named_where_nothing_else_explains_it() -> None:
    waiting = [history(rank, *beats(40, 42, since=4), ended("signal:SIGTERM", 40)) for rank in (0, 1, 2)]
    waiting[0].add(stated(state_of(0, 42, 15, since=4), "stall"))
    finding = found(*waiting)
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("unreachable", [3])
    assert "no log" in finding.verdict["message"]


def test_a_rank_that_its_host_says_is_stopped_is_frozen() -> None:
    ranks = [history(rank, *beats(40, 42, since=20)) for rank in (0, 2, 3)]
    stopped = history(1, *beats(20, 41))
    stopped.look(state_of(1, 41, 20, frames=("/job/train.py:24 load",), life=Life.SILENT), None)
    finding = found(stopped, *ranks)
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("frozen", [1])


def test_a_killed_rank_that_nobody_recovered_is_told_from_what_it_left() -> None:
    ranks = [history(rank, *beats(22, 42, since=19), ended("signal:SIGTERM", 22.5)) for rank in (0, 2, 3)]
    dead = history(1, *beats(20, 41))
    dead.look(state_of(1, 41, 20, frames=("/job/train.py:24 load",), life=Life.DEAD), None)
    finding = found(dead, *ranks)
    assert finding.first is not None
    assert (finding.first.cause, finding.first.ranks) == (Cause.KILLED, (1,))
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("gone", [1])


def test_of_a_rank_that_never_stalled_the_beats_tell_where_it_was() -> None:
    one = history(1, *beats(20, 41))
    state = one.state({})
    assert state.groups == {}, "nobody has said who is in the group"
    known = GroupState("0", "world", RANKS, "gloo")
    here = one.state({"0": [known]}).groups["0"]
    assert (here.label, here.ranks, here.entered, here.completed, here.current) == ("world", RANKS, 41, 41, None)
    waits = history(0, *beats(20, 42, since=3)).state({"0": [known]}).groups["0"].current
    assert waits == Call("all_reduce", 42, since=at(3))


def test_a_state_keeps_what_the_later_beats_do_not_say() -> None:
    one = history(
        0, *beats(15, 42, since=4), stated(state_of(0, 42, 14, since=4), "stall"), *beats(20, 42, since=4)[16:]
    )
    current = one.state({}).groups["0"].current
    assert current is not None
    assert (current.shape, current.key) == ((4,), 42)
    assert one.state({}).as_of == at(20)


def test_records_of_other_makes_break_nothing() -> None:
    junk: list[Any] = [None, 7, "x", [], {}, [[]], ["x"], [1], [{}], [{"rank": []}], {"0": 3}, {"0": [1]}, BAD_STATE]
    junk += [{"0": [1, "x", 3, None]}, {"stall.moves": "false"}, {"pytorch.end_reason": "exception"}]
    kinds = ("beat", "state", "span", "verdict", "event", "identity")
    keys = ("groups", "state", "tags", "name", "ranks", "culprits", "waiting", "why", "world_size", "device")
    for kind, thing, key in product(kinds, junk, keys):
        one = History(0, {})
        one.add({"type": "beat", "ts": at(1), "groups": {"0": [1, 0, "all_reduce", at(0)]}})
        one.add({"type": kind, "ts": at(2), "name": "pytorch.rank", "ranks": [0], "why": "raised", key: thing})
        finding = inquire({0: one, 1: history(1, *beats(20, 41), ended("signal:SIGTERM", 20))})
        assert finding.fates.keys() == {0, 1}
        assert moments({0: one, 1: history(1, *beats(20))}, finding)


BAD_STATE = {
    "rank": "x",
    "as_of": at(1),
    "groups": {
        "0": {"name": "0", "label": "w", "ranks": [0], "backend": "g", "entered": "x", "recent": [{"operation": 3}]}
    },
}


def test_a_state_with_a_field_of_another_make_breaks_nothing() -> None:
    """Each field in turn, of the rank that all wait for and of one that waits."""
    junk: list[Any] = [None, True, -1, 1.5, 10**400, -(10**400), "x", "", [], [None], [[1]], [10**400], {}, {"": {}}]
    own = Call("send", 0, 16, (4,), "float32", 3, at(1))
    error = Raised("0", own, "ValueError: no", at(2))
    culprit = state_of(1, 41, 20, recent=[own], doing="user", frames=("/job/train.py:24 load",), step=7, raised=error)
    waits = state_of(0, 42, 20, since=4, recent=[own], gpu="GPU-0")
    judged = []
    for rank, state in ((0, waits), (1, culprit)):
        for path in paths_in(state.plain()):
            for thing in junk:
                said = state.plain()
                replaced(said, path, thing)
                logs = {one: history(one, *beats(40, 42, since=4)) for one in (0, 2, 3)}
                logs[1] = history(1, *beats(40, 41))
                logs[rank].add({"type": "state", "ts": at(41), "why": "stall", "state": said})
                finding = inquire(logs)
                assert moments(logs, finding)
                json.dumps(finding.verdict, allow_nan=False)
                judged.append(finding.verdict is not None and finding.verdict["ranks"])
    assert judged.count([1]) > len(judged) // 2


def paths_in(thing: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """To all that there is in `thing`."""
    inner = thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from paths_in(value, (*path, key))


def replaced(thing: Any, path: Sequence[Any], by: Any) -> None:
    for key in path[:-1]:
        thing = thing[key]
    thing[path[-1]] = by


def relabelled(thing: Any, to: Mapping[int, int]) -> Any:
    """`thing`, a record, with its ranks by other names."""
    if isinstance(thing, dict):
        named = {"ranks", "rank", "waiting"}
        return {
            key: (
                to[value] if key == "rank" else [to[one] for one in value]
            ) if key in named and value else relabelled(value, to)
            for key, value in thing.items()
        }  # fmt: skip
    return [relabelled(one, to) for one in thing] if isinstance(thing, list) else thing


def records_of(rank: int) -> dict[str, list[Record]]:
    """What a rank may have written, one way of ending for each word."""
    return {
        "waits": [*beats(40, 42, since=4), ended("signal:SIGTERM", 40)],
        "said": [
            *beats(40, 42, since=4), stated(state_of(rank, 42, 15, since=4), "stall"), ended("signal:SIGTERM", 40),
        ],
        "late": [*beats(40, 41), ended("signal:SIGTERM", 40)],
        "killed": [*beats(20, 41), ended("killed", 20)],
        "ends": [*beats(20, 41)],
        "raised": [
            *beats(20, 41), raised(rank, 42, 20.5, "ValueError: no"), ended("exception", 21, ("ValueError", "no")),
        ],
        "echo": [*beats(20, 41), raised(rank, 42, 20.6, CLOSED), ended("exception", 21, ("RuntimeError", CLOSED))],
        "well": [*beats(20, 41), ended("destroyed", 20.5)],
    }  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(sorted(records_of(0))), min_size=4, max_size=4),
    st.permutations(RANKS),
    st.randoms(use_true_random=False),
)
def test_the_names_and_the_order_of_ranks_change_nothing(
    ways: list[str], names: list[int], chance: random.Random
) -> None:
    to = dict(zip(RANKS, names, strict=True))
    logs = {rank: records_of(rank)[way] for rank, way in zip(RANKS, ways, strict=True)}
    before = inquire({rank: history(rank, *records) for rank, records in logs.items()})
    order = list(RANKS)
    chance.shuffle(order)
    after = inquire({to[rank]: history(to[rank], *relabelled(logs[rank], to)) for rank in order})

    def key(finding: Finding, to: Mapping[int, int]) -> Any:
        first, verdict = finding.first, finding.verdict
        return (
            first and (first.cause, first.at, sorted(to[rank] for rank in first.ranks)),
            verdict and (sorted(to[rank] for rank in verdict["ranks"]), sorted(to[r] for r in verdict["waiting"])),
            {to[rank]: fate.ended for rank, fate in finding.fates.items()},
            finding.well,
        )

    assert key(before, to) == key(after, {rank: rank for rank in RANKS})


@pytest.mark.parametrize("many", [1024])
def test_many_ranks(many: int) -> None:
    ranks = tuple(range(many))
    world = GroupState("0", "world", ranks, "nccl", 42, 41, Call("all_reduce", 42, since=at(4)))
    one = stated(RankState(0, as_of=at(15), groups={"0": world}), "stall")
    histories = {rank: history(rank, *beats(18, 42, since=4), world=many) for rank in ranks if rank != 77}
    histories[0].add(one)
    histories[77] = history(77, *beats(3, 41), world=many)
    finding = inquire(histories)
    assert finding.verdict is not None
    assert (finding.verdict["kind"], finding.verdict["ranks"]) == ("gone", [77])
