"""Print measured numbers beside their budgets and keep them in ``benchmarks/results``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Measured:
    """One number: `value` and `budget` in `unit`; without a budget it is there to compare with."""

    what: str
    value: float
    unit: str
    budget: float | None
    runs: int

    @property
    def kept(self) -> str:
        if self.budget is None:
            return ""
        return "yes" if self.value <= self.budget else "NO"

    def cells(self) -> tuple[str, ...]:
        budget = "" if self.budget is None else f"≤ {self.budget:g} {self.unit}"
        return self.what, f"{self.value:.2f} {self.unit}", budget, self.kept, str(self.runs)


def say(rows: list[Measured], *found: Measured) -> None:
    """Add what was `found` to the rows of a table, and print it at once: the rest may take long."""
    rows.extend(found)
    for one in found:
        print(" | ".join(one.cells()), flush=True)


def publish(name: str, machine: dict[str, str], rows: list[Measured]) -> NoReturn:
    """Print the table, write it as `name`.json and `name`.md, and exit with 1 if a budget is broken."""
    table = [("what", "median", "budget", "kept", "runs"), ("---",) * 5, *(row.cells() for row in rows)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    print("\n" + text)
    RESULTS.mkdir(exist_ok=True)
    described = "\n".join(f"- {key}: {value}" for key, value in machine.items())
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{text}\n\n{described}\n", encoding="utf-8")
    kept = {"machine": machine, "rows": [asdict(row) for row in rows]}
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(any(row.kept == "NO" for row in rows))
