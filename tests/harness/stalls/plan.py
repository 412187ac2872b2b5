"""What goes wrong in a job, where and when. Pure; a rank reads it from its environment."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

VARIABLE = "STALL_PLAN"

WORLD = 4
Groups = dict[str, tuple[tuple[int, ...], ...]]
# By the number of ranks: as `init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))` lays out four. Two, where
# there are no more GPUs, have one group.
GROUPS: dict[int, Groups] = {
    WORLD: {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3)), "world": ((0, 1, 2, 3),)},
    2: {"world": ((0, 1),)},
}

# What every rank does on every group in every step, in this order. Neighbours differ, also the last and the next
# step's first, so that whoever leaves one out or makes one more is soon in another operation than its peers.
ALL_REDUCES = ("large", "small")
CALLS = (*ALL_REDUCES, "all_gather", "broadcast")


@dataclass(frozen=True)
class Plan:
    """One fault. `call`: which of `CALLS`; `delay`: seconds from the start of the step, for what hits a rank wherever
    it just is; `lasting`: seconds that something takes too long for; `seconds`: how long a job trains that nothing
    stops; `patched`: whether ddtrace-pytorch is switched on; `directory`: where a rank says that it has happened;
    `ranks`: how many there are; `backend`: `gloo` on the processor, `nccl` with a GPU for each."""

    fault: str = "none"
    rank: int = 0
    group: str = "world"
    step: int = 20
    call: int = 0
    delay: float = 0.0
    lasting: float = 30.0
    seconds: float = 600.0
    patched: bool = True
    directory: str = "."
    ranks: int = WORLD
    backend: str = "gloo"

    def members(self, group: str) -> tuple[int, ...]:
        """The ranks that are in the culprit's group of that name."""
        return next(ranks for ranks in GROUPS[self.ranks][group] if self.rank in ranks)

    def strikes(self, rank: int, step: int) -> bool:
        return rank == self.rank and step == self.step

    def as_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    def at(self, directory: Path) -> Plan:
        return replace(self, directory=str(directory))

    def struck(self) -> None:
        """Leave word that it happens now; only the first time counts."""
        self._note("struck")

    def struck_at(self) -> float | None:
        """When it happened, on the monotonic clock, which all processes of a machine share."""
        return self._noted("struck")

    def raised(self, rank: int) -> None:
        """Leave word that an exception has reached the training loop of `rank`."""
        self._note(f"raised-{rank}")

    def raised_at(self, rank: int) -> float | None:
        return self._noted(f"raised-{rank}")

    def begins(self, rank: int, step: int) -> None:
        """Leave word that `rank` has come as far as `step`."""
        Path(self.directory, f"step-{rank}").write_text(str(step))

    def begun(self, rank: int) -> str:
        path = Path(self.directory, f"step-{rank}")
        return path.read_text() if path.exists() else ""

    def _note(self, name: str) -> None:
        path = Path(self.directory, name)
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(str(time.monotonic()))
            with contextlib.suppress(FileExistsError):  # several ranks may come to it at once
                path.hardlink_to(part)

    def _noted(self, name: str) -> float | None:
        path = Path(self.directory, name)
        return float(path.read_text()) if path.exists() else None


def from_environment() -> Plan:
    return Plan(**json.loads(os.environ[VARIABLE]))


def altered(calls: Sequence[str], plan: Plan) -> list[str]:
    """`calls` as the culprit makes them."""
    before, this, after = list(calls[: plan.call]), calls[plan.call], list(calls[plan.call + 1 :])
    if plan.fault == "skip":
        return [*before, *after]
    if plan.fault == "extra":
        return [*before, this, this, *after]
    if plan.fault == "order":
        return [*before, *after[:1], this, *after[1:]]
    if plan.fault in ("shape", "dtype"):
        return [*before, f"{this} of another {plan.fault}", *after]
    return list(calls)
