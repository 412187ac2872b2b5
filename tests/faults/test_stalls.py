"""A job stands still: is the right rank named, for the right reason?

A few rows of the table that `benchmarks/faults.py` goes through, at a lower threshold. How long a verdict takes is
measured there, not here.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from harness.stalls.plan import Plan
from harness.stalls.table import BY_NAME
from harness.stalls.trial import attempt

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

# More than a rank may go without a beat before it counts as frozen.
THRESHOLD = 5.0
PATIENT = 30.0


ONCE = ("order", "loader", "sigkill", "checkpoint", "sigstop", "host-cut")


@pytest.mark.parametrize(
    "name",
    ["shape-torchrun", "ddp-skip-torchrun", *(pytest.param(name, marks=pytest.mark.once) for name in ONCE)],
)
def test_the_culprit_is_named(tmp_path: Path, name: str) -> None:
    row = BY_NAME[name]
    plan = row.plan(Plan(), Random(name), THRESHOLD, healthy_seconds=0)
    outcome = attempt(row, plan, tmp_path, THRESHOLD, PATIENT)
    assert outcome.right, f"{plan}: {outcome.verdict} ({', '.join(outcome.wrong)})"


@pytest.mark.once
def test_nobody_is_named_while_all_ranks_pause(tmp_path: Path) -> None:
    row = BY_NAME["pause"]
    outcome = attempt(row, row.plan(Plan(), Random(7), THRESHOLD, healthy_seconds=15), tmp_path, THRESHOLD)
    assert outcome.right, ", ".join(outcome.wrong)
