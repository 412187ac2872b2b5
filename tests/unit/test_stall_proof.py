"""The proof of the stalls proves something: it takes a right verdict for right, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.stalls.plan import CALLS, Plan, altered
from harness.stalls.table import BY_NAME
from harness.stalls.verdicts import Given, given, wrongs

ASLEEP = given({"type": "verdict", "kind": "absent", "ranks": [2], "doing": "data", "moves": False, "group": "dp"})
SKIPPED = Given("mismatch", (1,), error=True, group="world", detail="skipped")

CASES = {
    "right": ("loader", Plan("loader", rank=2), ASLEEP, []),
    "another rank": ("loader", Plan("loader", rank=1), ASLEEP, ["ranks [2]"]),
    "one rank too many": ("loader", Plan("loader", rank=2), replace(ASLEEP, ranks=(2, 3)), ["ranks [2, 3]"]),
    "another kind": ("sigstop", Plan("stop", rank=2), ASLEEP, ["kind absent"]),
    "doing something else": ("loader", Plan("loader", rank=2), replace(ASLEEP, doing="user"), ["doing user"]),
    "late only": ("loader", Plan("loader", rank=2), replace(ASLEEP, error=False), ["no error"]),
    "of four, the odd one": ("skip", Plan("skip", rank=1, group="world"), SKIPPED, []),
    "of four, two": ("skip", Plan("skip", rank=1), replace(SKIPPED, ranks=(0, 1)), ["ranks [0, 1]"]),
    "of two, both": ("skip", Plan("skip", rank=1, group="tp"), replace(SKIPPED, ranks=(0, 1), group="tp"), []),
    "another group": ("skip", Plan("skip", rank=1, group="dp"), SKIPPED, ["group world"]),
    "another detail": ("shape", Plan("shape", rank=1), SKIPPED, ["detail skipped"]),
    "anybody": ("data-cut", Plan("outside"), Given("stuck", (0, 2), error=True), []),
}


@pytest.mark.parametrize("case", CASES)
def test_a_verdict_is_judged(case: str) -> None:
    name, plan, verdict, wrong = CASES[case]
    expected = BY_NAME[name].expected
    assert expected is not None
    assert wrongs(expected, plan, verdict) == wrong


@pytest.mark.parametrize(
    ("fault", "call", "made"),
    [
        ("skip", 1, ["large", "all_gather", "broadcast"]),
        ("extra", 3, [*CALLS, "broadcast"]),
        ("order", 0, ["small", "large", "all_gather", "broadcast"]),
        ("shape", 0, ["large of another shape", *CALLS[1:]]),
        ("loader", 0, list(CALLS)),
    ],
)
def test_the_culprit_calls_otherwise(fault: str, call: int, made: list[str]) -> None:
    assert altered(CALLS, Plan(fault, call=call)) == made
