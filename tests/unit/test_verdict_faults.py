"""The verdict over the faults of `benchmarks/faults.py` on paper: every rank, group and call that one can be at.

What really is seen of such a job, and in what time, is shown there; here, that what is said is right wherever it stops.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.schedule import SECOND, Group, Instruction, Program, Run
from harness.stalls.plan import CALLS, GROUPS, WORLD, Plan, altered
from harness.stalls.table import BY_NAME
from harness.stalls.verdicts import given, wrongs

from ddtrace_pytorch.stalls.roll import Call
from ddtrace_pytorch.stalls.telling import record
from ddtrace_pytorch.stalls.verdict import judge

GROUP_OF = {
    (name, rank): Group(f"{name}{number}", name, ranks)
    for name, several in GROUPS[WORLD].items()
    for number, ranks in enumerate(several)
    for rank in ranks
}
# As many as a ring has room for, of the group with the fewest calls in a step, and some.
STEPS_BEFORE, STEPS_AFTER = 8, 2
HELD = 12.0
# One with a barrier at its end, and one without.
STEPS = (20, 21)


def made(name: str, group: Group) -> Call:
    operation, _, odd = name.partition(" of another ")
    if operation == "barrier":
        return Call("barrier")
    if operation == "broadcast":
        return Call("broadcast", bytes=4, shape=(1,), dtype="float32", peer=group.ranks[0])
    if operation == "all_gather":
        return Call("all_gather", bytes=64, shape=(16,), dtype="float32")
    elements = {"large": 2112, "small": 520}[operation] // (2 if odd == "shape" else 1)
    wide = odd == "dtype"
    return Call("all_reduce", 0, elements * (8 if wide else 4), (elements,), "float64" if wide else "float32")


def program(plan: Plan, rank: int) -> Program:
    """What `harness.stalls.train` has the rank do, from some steps before the fault to some after it."""
    calls: list[tuple[str, str, int]] = [("world", "barrier", 0)]
    for step in range(plan.step - STEPS_BEFORE, plan.step + STEPS_AFTER):
        strikes = plan.strikes(rank, step)
        for name in ("dp", "world", "tp") if strikes and plan.fault == "circle" else ("tp", "dp", "world"):
            here = altered(CALLS, plan) if strikes and name == plan.group else CALLS
            calls += [(name, one, step) for one in here]
        if step % 4 == 0:
            calls.append(("world", "barrier", step + 1))  # after the optimizer
    after = 0.01 + rank / 1000
    return [
        Instruction(group, made(one, group), after, step)
        for name, one, step in calls
        for group in [GROUP_OF[name, rank]]
    ]


def plans(fault: str) -> Iterator[Plan]:
    for rank in range(WORLD):
        for step in STEPS:
            if fault == "circle":
                yield Plan(fault, rank, step=step)
                continue
            for group in GROUPS[WORLD]:
                for call in BY_NAME[fault].calls:
                    yield Plan(fault, rank, group, step, CALLS.index(call))


@pytest.mark.parametrize("fault", ["skip", "extra", "order", "shape", "dtype", "circle"])
def test_every_fault_is_told(fault: str) -> None:
    check(fault, root_waits=True)


@pytest.mark.parametrize("fault", ["skip", "extra"])
def test_every_fault_is_told_where_roots_go_on(fault: str) -> None:
    check(fault, root_waits=False)


def check(fault: str, root_waits: bool) -> None:
    failed = []
    for plan in plans(fault):
        run = Run({rank: program(plan, rank) for rank in range(WORLD)}, root_waits=root_waits)
        now = run.last + HELD
        verdict = judge(run.roll(now), range(WORLD), int(now * SECOND))
        said = given(record(verdict)) if verdict is not None else None
        wrong = ["no verdict"] if said is None else wrongs(BY_NAME[fault].expected, plan, said)
        # Here all has been seen that ever will be: the ranks of the other groups tell who of two is wrong.
        if said is not None and said.ranks != (plan.rank,):
            wrong.append(f"ranks {said.ranks}")
        if wrong:
            failed.append(f"rank {plan.rank}, {plan.group}, {CALLS[plan.call]}, step {plan.step}: {said} {wrong}")
    assert not failed, "\n".join(failed)
