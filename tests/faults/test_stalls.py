"""A job stands still: is the right rank named, for the right reason?

A few rows of the table that `benchmarks/faults.py` goes through, at a lower threshold. How long a verdict takes is
measured there, not here.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from harness.job import Job, Jobs, environment, torchrun
from harness.log import Record, of_type
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


RAISES = """
    import os, sys, time
    from datetime import timedelta
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

    def one_falls_back():
        try:
            dist.broadcast("no tensor", src=0)
        except Exception:
            if rank == 0:
                dist.all_reduce(torch.ones(1))
        if rank == 1:
            elsewhere()
            dist.all_reduce(torch.ones(1))

    def one_gives_up_waiting():
        if rank == 1:
            elsewhere()
            dist.all_reduce(torch.ones(1))
            return
        work = dist.all_reduce(torch.ones(1), async_op=True)
        try:
            work.wait(timedelta(seconds=5))
        except RuntimeError:
            pass
        work.wait()

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


def start(jobs: Jobs, scene: str) -> Job:
    env = environment(
        None,
        GATES=str(jobs.directory),
        DD_PYTORCH_STALL_SECONDS="1",
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(jobs.directory / "log"),
    )
    return jobs.start([*torchrun(2), jobs.script(RAISES.replace("{scene}", scene))], env)


def saying(job: Job, words: str) -> str:
    """What `job` says on stderr that fits `words`."""
    stderr = job.directory / "stderr"
    return until(lambda: re.search(words, stderr.read_text()), 40, words)[0]


@pytest.mark.parametrize(
    ("scene", "kind", "words"),
    [
        ("all_refused", "absent", ABSENT),
        *(
            pytest.param(scene, "absent", ABSENT, marks=pytest.mark.once)
            for scene in ("one_refused", "one_refused_in_another_group", "all_refused_twice", "one_falls_back")
        ),
        ("one_cleans_up", "gone", LEFT),
        *(pytest.param(scene, "gone", LEFT, marks=pytest.mark.once) for scene in ("one_handles_it", "one_reports_it")),
    ],
)
def test_what_a_rank_was_refused_counts_until_it_is_caught(jobs: Jobs, scene: str, kind: str, words: str) -> None:
    job = start(jobs, scene)
    said = saying(job, r"has waited .*")
    assert re.search(rf": rank 1 \(\S+\) {words}", said), said
    (jobs.directory / "elsewhere").touch()
    job.wait()
    first, *_ = sorted(of_type(jobs.directory / "log", "verdict"), key=lambda one: one["ts"])
    assert (first["kind"], first["ranks"]) == (kind, [1])


def test_a_wait_that_raises_is_told_of_as_one_in_the_call_that_was_waited_for(jobs: Jobs) -> None:
    job = start(jobs, "one_gives_up_waiting")
    saying(job, r"all_reduce #2 of group `world` has waited .*: rank 1 \(\S+\) has not entered it; ")
    saying(job, "all_reduce #2 of group `world` raised RuntimeError: ")

    def raised(why: str) -> list[Record]:
        states = [one["state"] for one in of_type(jobs.directory / "log", "state") if one["why"] == why]
        return [one["raised"] for one in states]

    (caught,) = until(lambda: raised("caught"), 40, "it is known to be caught")
    (thrown,) = raised("raised")
    assert {**thrown, "caught": True} == caught
    assert (caught["group"], caught["call"]["key"], caught["call"]["bytes"]) == ("0", 2, 4)
    (jobs.directory / "elsewhere").touch()
    job.wait().ok()
