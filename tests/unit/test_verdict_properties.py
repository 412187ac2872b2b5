"""The verdict over generated schedules: one fault in, exactly that rank and kind out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from harness.schedule import SECOND, Instruction, Program, Run, Template, groups_of, programs, relabelled
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from ddtrace_pytorch.stalls.mismatch import Detail
from ddtrace_pytorch.stalls.roll import Call, Life, Raised, RankState
from ddtrace_pytorch.stalls.verdict import Kind, Verdict, judge

FOR_ALL = "all_reduce all_gather_into_tensor barrier".split()
OPERATIONS = [*FOR_ALL, "broadcast", "scatter", "reduce", "gather"]
HELD = 12.0

# Machines are slow at times.
patient = settings(max_examples=60)


def told(call: Call) -> str:
    return f"{call.operation}({call.peer},{call.shape and call.shape[0]},{call.dtype})"


@dataclass(frozen=True, repr=False)
class Case:
    """A healthy job, and one rank and one of its calls for a fault to be at."""

    programs: dict[int, Program]
    rank: int
    at: int

    @property
    def program(self) -> Program:
        return self.programs[self.rank]

    @property
    def instruction(self) -> Instruction:
        return self.program[self.at]

    def __repr__(self) -> str:
        lines = [f"rank {self.rank} at {self.at}"]
        for rank, program in self.programs.items():
            lines.append(f"{rank}: " + " ".join(f"{one.group.name}.{told(one.call)}" for one in program))
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def with_program(self, changed: Program) -> dict[int, Program]:
        return {**self.programs, self.rank: changed}


@st.composite
def cases(draw: st.DrawFn, numbered: bool = False, majorities: bool = False, uneven: bool = False) -> Case:
    """`numbered`: the fault is at a collective; `majorities`: all groups have one, and everybody waits for everybody:
    there are no roots and no transfers; `uneven`: the stages of a pipeline, if there are several, make calls of their
    own."""
    sizes = [1, 3, 4] if majorities else [1, 2, 3, 4]
    one = st.sampled_from(sizes)
    tp, dp, pp = draw(st.tuples(one, one, st.sampled_from(sizes[:3])).filter(lambda three: 1 < prod(three) <= 24))
    groups = groups_of(tp, dp, pp)
    labels = sorted({group.label for group in groups})
    collective = st.builds(
        Template,
        groups=st.sampled_from(labels),
        operation=st.sampled_from(FOR_ALL if majorities else OPERATIONS),
        root=st.integers(0, 3),
        size=st.sampled_from([4, 8, 16]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        stage=st.sampled_from([None, *range(pp)]) if uneven else st.none(),
    )
    passes = [st.just(Template("pp", "pass"))] if pp > 1 and not majorities else []
    templates = draw(st.lists(st.one_of(collective, *passes), min_size=1, max_size=6))
    if uneven and pp > 1:
        templates.append(Template("pp", "pass"))
    made = programs(groups, templates, draw(st.integers(1, 4)), draw(st.integers(0, 1000)))
    places = [
        (rank, at)
        for rank, program in made.items()
        for at, one in enumerate(program)
        if one.call.operation not in ("send", "recv") or not numbered
    ]
    assume(places)
    rank, at = draw(st.sampled_from(places))
    return Case(made, rank, at)


def lags(seed: int) -> Callable[[int], float]:
    """How old the state of each rank is, in seconds."""
    return lambda rank: random.Random(f"{seed} {rank}").random()


def verdict_of(run: Run, changes: dict[int, RankState] | None = None, seed: int = 0) -> Verdict | None:
    """What is said when all that can still happen has happened, and 12 s have passed."""
    now = run.last + HELD
    roll = {**run.roll(now, lags(seed)), **(changes or {})}
    return judge(roll, run.programs, int(now * SECOND))


def named(verdict: Verdict | None) -> tuple[Kind, tuple[int, ...]] | None:
    return (verdict.kind, verdict.ranks) if verdict is not None else None


@patient
@given(cases(), st.booleans(), st.integers(0, 1000))
def test_a_rank_that_is_late(case: Case, moves: bool, seed: int) -> None:
    run = Run(case.with_program(case.program[: case.at]))
    late = run.state(case.rank, run.last + HELD)
    verdict = verdict_of(run, {case.rank: replace(late, doing="data", moves=moves)}, seed)
    waiting = run.waiting()
    event(f"{min(len(waiting), 3)} wait")
    if not waiting:
        assert verdict is None
        return
    assert named(verdict) == (Kind.ABSENT, (case.rank,))
    assert verdict is not None
    assert verdict.waiting == tuple(sorted(waiting))
    assert verdict.culprits[0].doing == "data"
    assert verdict.is_error is not moves


LIVES = {Life.SILENT: Kind.FROZEN, Life.DEAD: Kind.GONE, Life.ENDED: Kind.GONE}


@patient
@given(cases(), st.sampled_from(list(LIVES)), st.floats(0, 0.1), st.integers(0, 1000))
def test_a_rank_that_is_halted(case: Case, life: Life, after: float, seed: int) -> None:
    healthy = Run(case.programs)
    run = Run(case.programs, stops={case.rank: healthy.made[case.rank][case.at].entered + after})
    now = run.last + HELD
    # Who says goodbye writes once more where it is.
    old = lags(seed) if life is not Life.ENDED else lambda rank: 0.0
    halted = replace(run.roll(now, old)[case.rank], life=life)
    verdict = verdict_of(run, {case.rank: halted}, seed)
    others = run.waiting() - {case.rank}
    if life is Life.ENDED and verdict is not None:
        # It may have come out of its last call, as who only sends does: that its part was lost on the way is more than
        # anybody knows, and who waits there is stuck.
        stuck = {culprit.rank for culprit in verdict.culprits if culprit.kind is Kind.STUCK}
        assert stuck <= others
        assert set(verdict.ranks) - stuck <= {case.rank}
        return
    assert named(verdict) == ((LIVES[life], (case.rank,)) if others else None)


@patient
@given(cases(), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_a_host_that_does_not_answer(case: Case, per_host: int, told: bool, seed: int) -> None:
    host = {rank for rank in case.programs if rank // per_host == case.rank // per_host}
    stop = Run(case.programs).made[case.rank][case.at].entered
    run = Run(case.programs, stops=dict.fromkeys(host, stop))
    now = run.last + HELD
    roll = {rank: state for rank, state in run.roll(now, lags(seed)).items() if rank not in host}
    if told:
        roll |= {rank: RankState(rank, host="b", life=Life.UNREACHABLE) for rank in host}
    verdict = judge(roll, run.programs, int(now * SECOND), hosts=dict.fromkeys(host, "b"))
    if not run.waiting() - host:
        assert verdict is None
        return
    assert verdict is not None
    assert verdict.kind is Kind.UNREACHABLE
    assert set(verdict.ranks) <= host
    assert {culprit.host for culprit in verdict.culprits} == {"b"}


def changed(call: Call, how: Detail, to: str) -> Call:
    if how is Detail.SHAPE:
        return replace(call, shape=(5,))
    if how is Detail.DTYPE:
        return replace(call, dtype="float64")
    return replace(call, operation=to, peer=None, shape=(4,), dtype="float32")


@patient
@given(
    cases(numbered=True),
    st.sampled_from([Detail.SHAPE, Detail.DTYPE, Detail.OPERATION]),
    st.sampled_from(["all_reduce", "all_gather_into_tensor", "all_to_all_single"]),
    st.integers(0, 1000),
)
def test_a_rank_in_another_call(case: Case, how: Detail, to: str, seed: int) -> None:
    call = case.instruction.call
    assume(call.operation != "barrier" if how is not Detail.OPERATION else call.operation != to)
    wrong = replace(case.instruction, call=changed(call, how, to))
    run = Run(case.with_program([*case.program[: case.at], wrong, *case.program[case.at + 1 :]]))
    verdict = verdict_of(run, seed=seed)
    if not run.waiting():
        assert verdict is None
        return
    members = case.instruction.group.ranks
    assert verdict is not None
    # Of two neither is in the majority, but by what other groups do.
    pairs = [tuple(sorted(members))] if len(members) == 2 else []
    assert named(verdict) in [(Kind.MISMATCH, ranks) for ranks in [(case.rank,), *pairs]]
    event(f"{how.value} told as {verdict.detail.value if verdict.detail else None}")
    assert verdict.detail in (how, Detail.SKIPPED, Detail.EXTRA)


@patient
@given(cases(numbered=True, majorities=True), st.integers(0, 1000))
def test_a_rank_that_skips_one(case: Case, seed: int) -> None:
    run = Run(case.with_program(case.program[: case.at] + case.program[case.at + 1 :]))
    verdict = verdict_of(run, seed=seed)
    event(f"skipped told as {verdict and (verdict.kind.value, verdict.detail and verdict.detail.value)}")
    if not run.waiting():
        assert verdict is None
        return
    assert verdict is not None
    assert verdict.ranks == (case.rank,)


@patient
@given(cases(numbered=True, majorities=True), st.integers(0, 1000))
def test_a_rank_that_makes_one_more(case: Case, seed: int) -> None:
    more = replace(case.instruction, call=Call("all_reduce", shape=(7,), dtype="float32"))
    run = Run(case.with_program([*case.program[: case.at], more, *case.program[case.at :]]))
    verdict = verdict_of(run, seed=seed)
    event(f"extra told as {verdict and (verdict.kind.value, verdict.detail and verdict.detail.value)}")
    assert named(verdict) == (Kind.MISMATCH, (case.rank,))


@patient
@given(cases(numbered=True, majorities=True), st.integers(0, 1000))
def test_a_rank_in_another_order(case: Case, seed: int) -> None:
    assume(case.at + 1 < len(case.program))
    run = Run(case.with_program(swapped(case)))
    verdict = verdict_of(run, seed=seed)
    event(f"order told as {verdict and (verdict.kind.value, verdict.detail and verdict.detail.value)}")
    if not run.waiting():
        assert verdict is None
        return
    assert named(verdict) == (Kind.MISMATCH, (case.rank,))


def without(case: Case) -> Program:
    return case.program[: case.at] + case.program[case.at + 1 :]


def with_one_more(case: Case) -> Program:
    return case.program[: case.at + 1] + case.program[case.at :]


def swapped(case: Case) -> Program:
    """The steps begin where they did."""
    both = case.program[case.at : case.at + 2]
    other = [replace(one, step=here.step) for one, here in zip(reversed(both), both, strict=True)]
    return [*case.program[: case.at], *other, *case.program[case.at + 2 :]]


@patient
@given(cases(numbered=True), st.sampled_from([without, with_one_more, swapped]), st.integers(0, 1000))
def test_without_majorities_nobody_innocent_is_named_alone(
    case: Case, fault: Callable[[Case], Program], seed: int
) -> None:
    """Two ranks that each miss the other may both be the one that is wrong. One that said goodbye is what the other
    waits for, whoever counted wrong."""
    run = Run(case.with_program(fault(case)))
    verdict = verdict_of(run, seed=seed)
    if verdict is None:
        assert not run.waiting()
        return
    event(f"{fault.__name__} told as {verdict.kind.value}, {len(verdict.ranks)} named")
    if verdict.kind is not Kind.GONE:
        assert case.rank in verdict.ranks


@patient
@given(cases(numbered=True, uneven=True), st.sampled_from([without, with_one_more, swapped]), st.integers(0, 1000))
def test_where_stages_differ_nobody_innocent_is_named_alone(
    case: Case, fault: Callable[[Case], Program], seed: int
) -> None:
    run = Run(case.with_program(fault(case)))
    verdict = verdict_of(run, seed=seed)
    if verdict is not None and verdict.kind is not Kind.GONE:
        event(f"{fault.__name__} told as {verdict.kind.value}, {len(verdict.ranks)} named")
        assert case.rank in verdict.ranks


@patient
@given(cases(), st.floats(0, 1), st.integers(0, 1000))
def test_healthy_ranks_are_never_an_error(case: Case, moment: float, seed: int) -> None:
    """At any moment, of any lag, however long ranks compute: one that is waited for is late, moves, and waits not."""
    slow = {
        rank: [
            replace(one, after=one.after * random.Random(f"{seed} {rank} {at}").choice([1, 1, 1, 200]))
            for at, one in enumerate(program)
        ]
        for rank, program in case.programs.items()
    }
    run = Run(slow, latency=0.5)
    now = run.last * moment
    verdict = judge(run.roll(now, lags(seed)), run.programs, int(now * SECOND))
    event("waiting" if verdict else "quiet")
    if verdict is not None:
        assert (verdict.kind, verdict.is_error) == (Kind.ABSENT, False)
        assert not {culprit.rank for culprit in verdict.culprits if culprit.doing == "collective"} & set(
            verdict.waiting
        )


@patient
@given(cases())
def test_a_finished_job_is_quiet(case: Case) -> None:
    run = Run(case.programs)
    assert all(run.finished(rank) for rank in run.programs)
    assert verdict_of(run) is None


@patient
@given(cases(numbered=True), st.sampled_from([without, with_one_more, swapped]), st.randoms(use_true_random=False))
def test_other_numbers_for_the_ranks_give_the_same_verdict(
    case: Case, fault: Callable[[Case], Program], chance: random.Random
) -> None:
    run = Run(case.with_program(fault(case)))
    now = int((run.last + HELD) * SECOND)
    roll = run.roll(run.last + HELD)
    numbers = list(run.programs)
    chance.shuffle(numbers)
    new = dict(enumerate(numbers))
    one, other = judge(roll, roll, now), judge(relabelled(roll, new), roll, now)
    if one is None or other is None:
        assert one is other
        return
    assert other.ranks == tuple(sorted(new[rank] for rank in one.ranks))
    assert other.waiting == tuple(sorted(new[rank] for rank in one.waiting))
    assert {(new[one.rank], one.kind, one.detail, one.where.group, one.where.key) for one in one.culprits} == {
        (one.rank, one.kind, one.detail, one.where.group, one.where.key) for one in other.culprits
    }


ECHO = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"


def broken(state: RankState, life: Life) -> RankState:
    """The same rank, after its collective raised."""
    group = next(group for group in state.groups.values() if group.current is not None)
    assert group.current is not None
    return replace(
        state,
        life=life,
        groups={**state.groups, group.name: replace(group, current=None)},
        raised=Raised(group.name, group.current, ECHO, state.as_of),
    )


@patient
@given(cases(), st.sampled_from([Life.ALIVE, Life.DEAD, Life.ENDED]), st.randoms(use_true_random=False))
def test_whom_a_dead_rank_takes_along_is_innocent(case: Case, life: Life, chance: random.Random) -> None:
    stop = Run(case.programs).made[case.rank][case.at].entered
    run = Run(case.programs, stops={case.rank: stop})
    others = sorted(run.waiting() - {case.rank})
    assume(others)
    roll = run.roll(run.last + HELD)
    hurt = chance.sample(others, chance.randint(1, len(others)))
    roll |= {rank: broken(roll[rank], life) for rank in hurt}
    roll[case.rank] = replace(roll[case.rank], life=Life.DEAD)
    verdict = judge(roll, roll, int((run.last + HELD) * SECOND))
    assert named(verdict) == (Kind.GONE, (case.rank,))


@patient
@given(cases(numbered=True), st.sampled_from([Life.ALIVE, Life.DEAD]), st.randoms(use_true_random=False))
def test_a_wrong_type_is_found_after_everybody_raised(case: Case, life: Life, chance: random.Random) -> None:
    assume(case.instruction.call.operation != "barrier" and len(case.instruction.group.ranks) > 2)
    wrong = replace(case.instruction, call=replace(case.instruction.call, dtype="float64"))
    run = Run(case.with_program([*case.program[: case.at], wrong, *case.program[case.at + 1 :]]))
    waiting = sorted(run.waiting())
    assume(waiting)
    roll = run.roll(run.last + HELD)
    roll |= {rank: broken(roll[rank], life) for rank in chance.sample(waiting, chance.randint(1, len(waiting)))}
    verdict = judge(roll, roll, int((run.last + HELD) * SECOND))
    assert named(verdict) == (Kind.MISMATCH, (case.rank,))


@settings(patient, max_examples=30, suppress_health_check=[HealthCheck.filter_too_much])
@given(cases(numbered=True), st.randoms(use_true_random=False))
def test_whom_a_wrong_type_ends_is_innocent(case: Case, chance: random.Random) -> None:
    """The rank that gets more than it has room for is dead at once, and those who wait for it elsewhere hear of that
    before the one that sent it does."""
    assume(case.instruction.call.operation != "barrier")
    wrong = replace(case.instruction, call=replace(case.instruction.call, dtype="float64"))
    run = Run(case.with_program([*case.program[: case.at], wrong, *case.program[case.at + 1 :]]))
    waiting = {rank: run.made[rank][-1] for rank in sorted(run.waiting())}
    assume(case.rank in waiting and waiting[case.rank].call.dtype == "float64")
    mine = waiting[case.rank]
    there = [rank for rank, one in waiting.items() if (one.group, one.call.key) == (mine.group, mine.call.key)]
    victims = [rank for rank in there if rank != case.rank]
    assume(victims)
    victim = chance.choice(victims)
    others = [rank for rank, one in waiting.items() if one.group != mine.group and victim in one.group.ranks]
    elsewhere = [rank for rank in others if waiting[rank].call.key or waiting[rank].call.peer == victim]
    event("elsewhere" if elsewhere else "there")
    hear = chance.sample(elsewhere, chance.randint(1, len(elsewhere))) if elsewhere else [case.rank]
    roll = run.roll(run.last + 0.3)
    roll |= {rank: broken(roll[rank], Life.ALIVE) for rank in hear}
    roll[victim] = replace(roll[victim], life=Life.DEAD)
    verdict = judge(roll, roll, int((run.last + 0.3) * SECOND))
    assert verdict is not None
    assert verdict.kind is Kind.MISMATCH
    assert case.rank in verdict.ranks
