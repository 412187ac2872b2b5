"""When a collective raised: what is said is not said before those who know better could say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.waiting import until

from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.stalls import places, standstill, telling
from ddtrace_pytorch.stalls.last_words import Identity, LastWords
from ddtrace_pytorch.stalls.mates import Mates
from ddtrace_pytorch.stalls.mismatch import Detail
from ddtrace_pytorch.stalls.roll import Call, GroupState, Raised, RankState
from ddtrace_pytorch.stalls.standstill import Standstill
from ddtrace_pytorch.stalls.state_file import CAPACITY, StateFile
from ddtrace_pytorch.stalls.told import Told
from ddtrace_pytorch.stalls.verdict import Kind, Verdict, Where
from ddtrace_pytorch.stalls.watch import SECOND, Over, Pending, limit

JOB, RUN, HOST = "job-7", "20261129T080452Z-00de004b", "node-a"
SPAN = SpanRecord("pytorch.rank", "rank", "pytorch", 7, 5, None, 0, 9, {}, {})
CLOSED = "RuntimeError: [gloo] Connection closed by peer"
TP, DP = ((2, 3), (0, 1)), ((1, 3), (0, 2))


def group(name: str, ranks: tuple[int, ...], entered: int, current: Call | None = None) -> GroupState:
    done = entered if current is None else entered - 1
    return GroupState(f"{name} {ranks}", name, ranks, "gloo", entered, done, current, (current,) if current else ())


def rank_in(rank: int, *groups: GroupState, since: float = 0.0, raised: Raised | None = None) -> RankState:
    """As it was so many seconds ago."""
    known = {one.name: one for one in groups}
    return RankState(rank, HOST, pid=1, as_of=time.time_ns() - round(since * 1e9), groups=known, raised=raised)


class Job:
    """The state files of four ranks: 3 was ended in a call with 2, which nothing is known of yet; 1 raised."""

    def __init__(self, root: str) -> None:
        self._folder = places.folder(root, JOB, RUN)
        self._files: dict[int, StateFile] = {}
        now = time.time_ns()
        self.narrow = Call("all_reduce", 7, 8448, (2112,), "float32", since=now - 10**8)
        self.wide = Call("all_reduce", 7, 16896, (2112,), "float64", since=now - 10**8)
        closed = Raised(f"dp {DP[0]}", Call("all_reduce", 5, since=now - 10**8), CLOSED, now)
        self.said(rank_in(0, group("tp", TP[1], 7), group("dp", DP[1], 4)))
        self.said(rank_in(1, group("tp", TP[1], 7), group("dp", DP[0], 4), raised=closed))
        self.said(rank_in(2, group("tp", TP[0], 6), group("dp", DP[1], 4), since=0.9))
        self.said(rank_in(3, group("tp", TP[0], 7, self.narrow), group("dp", DP[0], 4)))
        self._files.pop(3).leave()

    def said(self, state: RankState) -> None:
        identity = Identity(JOB, RUN, 0, state.rank, 4, HOST, places.BOOT, "")
        if state.rank not in self._files:
            self._files[state.rank] = StateFile(self._folder, places.name(state.rank))
        self._files[state.rank].write(LastWords(identity, state, SPAN).encode(CAPACITY))

    def rank_2_raised(self) -> None:
        raised = Raised(f"tp {TP[0]}", self.wide, CLOSED, time.time_ns())
        self.said(rank_in(2, group("tp", TP[0], 6), group("dp", DP[1], 4), raised=raised))

    def rank_2_beats(self) -> None:
        self.said(rank_in(2, group("tp", TP[0], 6), group("dp", DP[1], 4)))

    def close(self) -> None:
        for file in self._files.values():
            file.remove()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(str(tmp_path))
    yield job
    job.close()


class Looked(Mates):
    """After the first look of the verdict something happens."""

    then: Callable[[], None] | None = None

    def states(self) -> dict[int, RankState]:
        found = super().states()
        if self.looks == 2:  # the first is for what others have told
            assert self.then is not None
            self.then()
        self.looks += 1
        return found

    looks = 1


class Outlet:
    def __init__(self) -> None:
        self.said: list[Verdict] = []
        self.gone_on: list[str] = []
        self.ends: list[Over] = []

    def stall(self, stalled: object) -> None: ...

    def over(self, over: Over) -> None:
        self.ends.append(over)

    def ended(self, over: Over, said: Where) -> None:
        self.gone_on.append(telling.ended(over.pending, said, "went on", over.took))

    def verdict(self, verdict: Verdict) -> None:
        self.said.append(verdict)

    def raised(self) -> None: ...

    def keep(self) -> None: ...


def verdict_of_rank_1(root: Path, then: Callable[[], None], leaves: bool) -> Verdict:
    outlet = Outlet()
    mates = Looked([str(root)], JOB, RUN, HOST)
    mates.then = then
    mine = Standstill(lambda now: [], lambda: None, outlet, time.time_ns, 10.0, 4)
    mine.begin(mates, f"{root}")
    mine.failed()
    if not leaves:
        until(lambda: outlet.said, 30, "a verdict")
    mine.leave(30)
    (said,) = outlet.said
    return said


@pytest.mark.parametrize("leaves", [True, False], ids=["about to end", "going on"])
def test_a_peer_of_a_dead_rank_is_heard_first(tmp_path: Path, job: Job, leaves: bool) -> None:
    """gloo ends who gets more than it has room for, and who sent it hears that when all others do."""
    said = verdict_of_rank_1(tmp_path, job.rank_2_raised, leaves)
    assert (said.kind, said.detail, said.ranks) == (Kind.MISMATCH, Detail.DTYPE, (2, 3))


def test_a_peer_that_has_nothing_to_say_of_it_is_not_the_reason(tmp_path: Path, job: Job) -> None:
    said = verdict_of_rank_1(tmp_path, job.rank_2_beats, leaves=True)
    assert (said.kind, said.ranks) == (Kind.GONE, (3,))


def test_a_group_whose_time_out_is_short_is_judged_before_that(tmp_path: Path, job: Job) -> None:
    """Half of it may be less than what a stall is elsewhere."""
    every = (0, 1, 2, 3)
    for rank in every:
        call = Call("barrier", 7, since=time.time_ns() - 5 * SECOND) if rank != 1 else None
        job.said(rank_in(rank, group("short", every, 7 if call else 6, call)))
    outlet = Outlet()
    pending = Pending(
        f"short {every}", "short", "barrier", 7, time.monotonic_ns() - 5 * SECOND, limit(10.0, 0, 8 * SECOND)
    )
    mine = Standstill(lambda now: [pending], lambda: None, outlet, time.time_ns, 10.0, 4)
    mine.begin(Mates([str(tmp_path)], JOB, RUN, HOST), f"{tmp_path}")
    mine.beat()
    until(lambda: outlet.said, 30, "a verdict")
    mine.leave(30)
    assert [(said.kind, said.ranks) for said in outlet.said] == [(Kind.ABSENT, (1,))]


def test_what_is_over_is_called_as_it_was_when_it_was_waited_for(tmp_path: Path, job: Job) -> None:
    """Rank 0 waits in dp for rank 2, which waits in tp for rank 3: of that tp it is said."""
    now = time.time_ns()
    in_dp = Call("all_reduce", 5, since=now - 20 * SECOND)
    in_tp = Call("all_reduce", 7, since=now - 20 * SECOND)
    job.said(rank_in(0, group("tp", TP[1], 7), group("dp", DP[1], 5, in_dp)))
    job.said(rank_in(1, group("tp", TP[1], 7), group("dp", DP[0], 5, in_dp)))
    job.said(rank_in(2, group("tp", TP[0], 7, in_tp), group("dp", DP[1], 4)))
    job.said(rank_in(3, group("tp", TP[0], 6), group("dp", DP[0], 4)))
    outlet = Outlet()
    own = [Pending(f"dp {DP[1]}", "dp", "all_reduce", 5, time.monotonic_ns() - 20 * SECOND, 10 * SECOND)]
    mine = Standstill(lambda now: own, lambda: None, outlet, time.time_ns, 10.0, 4)
    mine.begin(Mates([str(tmp_path)], JOB, RUN, HOST), f"{tmp_path}")
    mine.beat()
    until(lambda: outlet.said, 30, "a verdict")
    own.clear()
    mine.beat()
    until(lambda: outlet.gone_on, 30, "it is said that it went on")
    mine.leave(30)
    (verdict,) = outlet.said
    assert telling.message(verdict).startswith("all_reduce #7 of group `tp` has waited")
    (over,) = outlet.gone_on
    assert over.startswith("all_reduce #7 of group `tp` is no longer waited for: all_reduce #5 of group `dp` went on")


@pytest.mark.parametrize(("group", "words"), [("dp", "is no longer waited for after 8 s"), ("tp", "ended after 8 s")])
def test_what_is_over_nobody_knows_how_is_not_said_to_have_gone_on(group: str, words: str) -> None:
    own = Pending("dp", "dp", "all_reduce", 5, 0, SECOND)
    said = telling.ended(own, Where(group, group, "all_reduce", 7, (0, 1)), None, 8 * SECOND)
    assert said.endswith(f"all_reduce #5 of group `dp` {words}")


def test_what_goes_on_while_it_is_judged_is_said_to_have_gone_on(tmp_path: Path, job: Job) -> None:
    every, began = (0, 1, 2, 3), time.time_ns() - 20 * SECOND
    for rank in every:
        call = Call("barrier", 7, since=began) if rank != 1 else None
        job.said(rank_in(rank, group("world", every, 7 if call else 6, call)))
    outlet = Outlet()
    own = [Pending(f"world {every}", "world", "barrier", 7, time.monotonic_ns() - 20 * SECOND, 10 * SECOND)]
    mates = Looked([str(tmp_path)], JOB, RUN, HOST)
    mine = Standstill(lambda now: own, lambda: None, outlet, time.time_ns, 10.0, 4)

    def goes_on() -> None:
        own.clear()
        mine.beat()
        assert [over.pending.key for over in outlet.ends] == [7]
        assert outlet.gone_on == [], "nothing was said yet that this would be about"

    mates.then = goes_on
    mine.begin(mates, f"{tmp_path}")
    mine.beat()
    until(lambda: outlet.gone_on, 30, "it is said that it went on")
    mine.leave(30)
    assert [(said.kind, said.ranks) for said in outlet.said] == [(Kind.ABSENT, (1,))]
    assert outlet.gone_on == [
        telling.ended(outlet.ends[0].pending, outlet.said[0].where, "went on", outlet.ends[0].took)
    ]


def test_of_stalls_that_are_over_nothing_is_kept() -> None:
    first, second, third = (Pending("world", "world", "barrier", key, since=key, limit=1) for key in (1, 2, 3))
    ends = {one.key: Over(one, 9) for one in (first, second, third)}
    dp, tp = Where("g1", "dp", "all_reduce", 4, (0, 1)), Where("g2", "tp", "barrier", 5, (0, 2))
    told = Told()
    assert not told.judge([first]), "nobody noticed it"
    told.noticed([first, second, third])
    assert told.over(ends[1]) is None
    assert told.judge([first, second])
    assert told.judged(dp) == []
    assert told.over(ends[1]) is None
    told.noticed([second, third])
    assert told.judge([second, third])
    assert told.over(ends[2]) is None
    assert told.over(ends[3]) is None
    assert told.judged(None) == [(ends[2], dp)], "there was no verdict now, but one before"
    told.noticed([third])
    assert told.judge([third])
    assert told.judged(dp) == []
    assert told.judge([third])
    assert told.over(ends[3]) is None
    assert told.judged(tp) == [(ends[3], tp)]
    assert not told._of
    assert not told._judged


def test_what_was_not_heard_once_is_not_said_of_another_look(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks it becomes known how to ask all hosts; the store doesn't answer."""
    monkeypatch.setattr(standstill, "BETWEEN_TRIES_SECONDS", 0.01)
    asked: list[None] = []
    own = [Pending("world", "world", "barrier", 7, time.monotonic_ns() - 20 * SECOND, 10 * SECOND)]
    mates = Looked([str(tmp_path)], JOB, RUN, HOST)
    mine = Standstill(lambda now: own, lambda: None, Outlet(), time.time_ns, 10.0, 6)
    mates.then = lambda: mine.know(lambda: asked.append(None), {}, None)
    mine.begin(mates, f"{tmp_path}")
    mine.beat()
    until(lambda: len(asked) == 2, 30, "two looks without an answer, after one")
    own.append(own[0]._replace(since=1))
    until(lambda: mine.beat() or len(asked) > 2, 30, "it is looked again")
    mine.leave(30)
    assert "nothing is heard" not in caplog.text


def test_where_a_rank_is_not_traced_it_is_said_that_nothing_is_heard_of_it(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    call = Call("barrier", 7, since=time.time_ns() - 20 * SECOND)
    for rank in (0, 1, 2):
        job.said(rank_in(rank, group("world", (0, 1, 2, 3, 4, 5), 7, call)))
    outlet = Outlet()
    pending = Pending("world", "world", "barrier", 7, time.monotonic_ns() - 20 * SECOND, 10 * SECOND)
    mine = Standstill(lambda now: [pending], lambda: None, outlet, time.time_ns, 10.0, 6)
    mine.begin(Mates([str(tmp_path)], JOB, RUN, HOST), f"{tmp_path}")
    mine.beat()
    until(lambda: "nothing is heard of ranks 4-5" in caplog.text, 30, "a warning")
    mine.leave(30)
    assert outlet.said == []
