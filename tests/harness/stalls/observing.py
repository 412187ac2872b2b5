"""What a job with a fault does by itself, with nobody watching it: what torch and gloo make of each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from harness.stalls.launching import last_words, running, stderr_of
from harness.stalls.plan import Plan
from harness.stalls.table import Row
from harness.stalls.trial import LOOK_EVERY, strike


@dataclass(frozen=True)
class Ending:
    """How a rank (or all, under torchrun) ended by itself, if it did. `raised`, `ended`: seconds after the fault until
    an exception reached its training loop, and until its process was gone; `trains`: it went on to the end."""

    trains: bool
    status: int | None
    raised: float | None
    ended: float | None
    said: str

    def __str__(self) -> str:
        words = [] if self.raised is None else [f"raises after {self.raised:.1f} s"]
        if self.ended is not None:
            how = f"signal {-self.status}" if self.status and self.status < 0 else f"status {self.status}"
            words.append(f"{how} after {self.ended:.1f} s")
        if not words:
            return "goes on" if self.trains else "stands still"
        return ", ".join(words) + (f": {self.said}" if self.said else "")


def observe(row: Row, plan: Plan, directory: Path, seconds: float) -> list[Ending]:
    """How each rank (or all, under torchrun) has ended within `seconds` after the fault."""
    plan = plan.at(directory)
    ended: dict[int, float] = {}
    halfway: list[str] = []
    with running(row, plan, directory) as job:
        struck = strike(job, plan)
        # Of all ranks under one agent the culprit's exception is the one to know.
        ranks = range(len(job.jobs)) if len(job.jobs) > 1 else (plan.rank,)
        while time.monotonic() < struck + seconds and len(ended) < len(job.jobs):
            for number, over in enumerate(job.over()):
                if over:
                    ended.setdefault(number, time.monotonic() - struck)
            if not halfway and time.monotonic() > struck + seconds / 2:
                halfway = [plan.begun(rank) for rank in ranks]
            time.sleep(LOOK_EVERY)
        return [
            Ending(
                trains=bool(halfway) and plan.begun(rank) != halfway[number],
                status=one.process.poll(),
                raised=_since(struck, plan.raised_at(rank)),
                ended=ended.get(number),
                said=last_words(stderr_of(one)),
            )
            for number, (rank, one) in enumerate(zip(ranks, job.jobs, strict=True))
        ]


def _since(struck: float, at: float | None) -> float | None:
    return None if at is None else at - struck
