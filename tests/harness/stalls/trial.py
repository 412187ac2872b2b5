"""One job with one fault: run it until somebody says what is wrong, and see whether that is right."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from harness.stalls import verdicts
from harness.stalls.launching import Running, last_words, running, stderr_of
from harness.stalls.plan import Plan
from harness.stalls.table import Row
from harness.stalls.verdicts import Given
from harness.waiting import until

# Four ranks import torch at once, on a machine that others use too.
STARTING = 180.0
# How much longer than the threshold a verdict may take, and how much longer it is waited for.
WITHIN = 5.0
PATIENCE = 10.0
LOOK_EVERY = 0.1


@dataclass(frozen=True)
class Outcome:
    """`seconds`: from the fault to the verdict; `wrong`: what is not as it should be, in words."""

    row: Row
    plan: Plan
    verdict: Given | None
    seconds: float | None
    wrong: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.wrong

    @property
    def where(self) -> str:
        return "" if self.verdict is None else "offline" if self.verdict.by is None else "live"


def attempt(row: Row, plan: Plan, directory: Path, threshold: float, within: float = WITHIN) -> Outcome:
    """Run `row` once, with its files in `directory`; a verdict is late after `threshold` and `within` seconds."""
    plan = plan.at(directory)
    with running(row, plan, directory, DD_PYTORCH_STALL_SECONDS=f"{threshold:g}") as job:
        struck = strike(job, plan)
        if row.expected is None:
            return _healthy(row, plan, job, directory / "log")
        verdict = _wait_for_verdict(row, job, struck + threshold + within + PATIENCE, directory / "log")
        seconds = time.monotonic() - struck
        stderr = "\n".join(stderr_of(one) for one in job.jobs)
    if verdict is None:
        return Outcome(row, plan, None, None, ["no verdict"])
    wrong = verdicts.wrongs(row.expected, plan, verdict)
    if seconds > threshold + within:
        wrong.append("late")
    if verdict.by is not None and (lines := verdicts.warned(verdict, stderr)) != 1:
        wrong.append(f"{lines} warnings")
    return Outcome(row, plan, verdict, seconds, wrong)


def strike(job: Running, plan: Plan) -> float:
    """When the fault came, which is now if it is done from outside."""

    def struck() -> float | None:
        at = plan.struck_at()
        assert at or not all(job.over()), "the job ended before its fault came:\n" + stderr_of(job.jobs[0])[-4000:]
        return at

    at = until(struck, STARTING, f"{plan.fault} at rank {plan.rank}, step {plan.step}") or 0.0
    if plan.fault == "outside":
        job.strike()
        at = time.monotonic()
    return at


def _wait_for_verdict(row: Row, job: Running, deadline: float, log: Path) -> Given | None:
    """The first verdict given while the job runs; if it dies without, what is said afterwards."""
    while time.monotonic() < deadline:
        over = job.over()  # before the look: what a rank wrote as it ended counts as live
        for verdict in verdicts.live(log):
            if not row.judged_by or verdict.by in row.judged_by:
                return verdict
        if all(over):
            return verdicts.offline(log)
        time.sleep(LOOK_EVERY)
    return None


def _healthy(row: Row, plan: Plan, job: Running, log: Path) -> Outcome:
    """Of a job in which nothing goes wrong nothing may be said that is an error."""
    results = [one.wait(plan.seconds + STARTING) for one in job.jobs]
    failed = [result for result in results if result.returncode]
    wrong = [f"exit status {result.returncode}: {last_words(result.stderr)}" for result in failed]
    errors = [verdict for verdict in verdicts.live(log) if verdict.error]
    wrong += [f"said: {verdict}" for verdict in errors]
    return Outcome(row, plan, errors[0] if errors else None, None, wrong)
