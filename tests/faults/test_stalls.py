"""A job stands still: is the right rank named, for the right reason?

A few rows of the table that `benchmarks/faults.py` goes through, at a lower threshold. How long a verdict takes is
measured there, not here.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from harness.job import Jobs, environment, torchrun
from harness.log import of_type
from harness.stalls.plan import Plan
from harness.stalls.table import BY_NAME
from harness.stalls.trial import attempt
from harness.waiting import until

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


REFUSED = """
    import os, sys, time
    from pathlib import Path
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch
    import torch.distributed as dist

    def wait_for(gate):
        while not (Path(os.environ["GATES"]) / gate).exists():
            time.sleep(0.02)

    def refused():
        dist.all_reduce("no tensor")

    def elsewhere():
        wait_for("elsewhere")

    def all_refused():
        try:
            dist.broadcast("no tensor", src=0)
        except Exception:
            pass

    def one_refused():
        if rank == 1:
            all_refused()

    def one_refused_in_another_group():
        if rank == 1:
            try:
                dist.send("no tensor", 0, group=other)
            except Exception:
                pass

    def all_refused_twice():
        all_refused()
        all_refused()

    def one_cleans_up():
        if rank == 1:
            try:
                refused()
            finally:
                elsewhere()

    def one_handles_it():
        if rank == 1:
            try:
                refused()
            except Exception:
                try:
                    raise KeyError
                except KeyError:
                    elsewhere()

    def one_reports_it():
        if rank == 1:
            sys.excepthook = lambda *error: elsewhere()
            refused()

    dist.init_process_group("gloo")
    rank, other = dist.get_rank(), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1))
    {scene}()
    if rank == 1:
        elsewhere()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
"""
ABSENT = r"has not entered it; it is at train\.py:\d+ wait_for, "
LEFT = "has left it by TypeError: "


@pytest.mark.parametrize(
    ("scene", "kind", "words"),
    [
        ("all_refused", "absent", ABSENT),
        *(
            pytest.param(scene, "absent", ABSENT, marks=pytest.mark.once)
            for scene in ("one_refused", "one_refused_in_another_group", "all_refused_twice")
        ),
        ("one_cleans_up", "gone", LEFT),
        *(pytest.param(scene, "gone", LEFT, marks=pytest.mark.once) for scene in ("one_handles_it", "one_reports_it")),
    ],
)
def test_what_a_rank_was_refused_counts_until_it_is_caught(
    jobs: Jobs, tmp_path: Path, scene: str, kind: str, words: str
) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    env = environment(
        None,
        GATES=str(gates),
        DD_PYTORCH_STALL_SECONDS="1",
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(tmp_path / "log"),
    )
    job = jobs.start([*torchrun(2), jobs.script(REFUSED.replace("{scene}", scene))], env)
    stderr = job.directory / "stderr"
    said = until(lambda: re.search(r"has waited .*", stderr.read_text()), 40, "a verdict")[0]
    assert re.search(rf": rank 1 \(\S+\) {words}", said), said
    (gates / "elsewhere").touch()
    job.wait()
    first, *_ = sorted(of_type(tmp_path / "log", "verdict"), key=lambda one: one["ts"])
    assert (first["kind"], first["ranks"]) == (kind, [1])
