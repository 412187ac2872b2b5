"""What the product said of a job, and whether it is right. The only place that knows how it is spelled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.job import environment
from harness.stalls.plan import Plan
from harness.stalls.table import Expected


@dataclass(frozen=True)
class Given:
    """One verdict, whoever gave it. `by`: the rank in whose log it is, None: `diagnose`; `message`: for a person."""

    kind: str
    ranks: tuple[int, ...]
    error: bool
    group: str | None = None
    doing: str | None = None
    detail: str | None = None
    message: str = ""
    by: int | None = None

    def __str__(self) -> str:
        words = [self.kind, self.detail, ",".join(map(str, self.ranks)), self.doing, "error" if self.error else "late"]
        return " · ".join(word for word in words if word)


def given(record: dict[str, Any], by: int | None = None) -> Given:
    """A ``verdict`` record."""
    return Given(
        kind=record["kind"],
        ranks=tuple(record["ranks"]),
        error=not record.get("moves"),
        group=record.get("group"),
        doing=record.get("doing"),
        detail=record.get("detail"),
        message=record.get("message", ""),
        by=by,
    )


def live(log: Path) -> list[Given]:
    """What the ranks wrote while the job ran, in order."""
    found = [(record["ts"], given(record, _rank(path))) for path in _files(log) for record in _verdicts(path)]
    return [verdict for _, verdict in sorted(found, key=lambda one: one[0])]


def offline(log: Path) -> Given | None:
    """What ``diagnose`` says on the job's host when all is over: who was the reason, or else who failed first."""
    command = [sys.executable, "-m", "ddtrace_pytorch.cli.main", "diagnose", str(log), "--json"]
    # Beside the logs, as for any job that is started there.
    env = environment(None, DD_PYTORCH_STATE_DIR=str(log.parent / "state"))
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode:
        return None
    return afterwards(json.loads(result.stdout)["attempts"][-1])


def afterwards(attempt: dict[str, Any]) -> Given | None:
    """What `attempt` of ``diagnose --json`` comes to."""
    verdict, first = attempt["verdict"], attempt["first_failure"]
    if verdict is None:
        return Given("gone", tuple(first["ranks"]), error=True, message=first["what"]) if first is not None else None
    one = verdict["culprits"][0]
    named = re.search("group `([^`]+)`", verdict["message"])
    return Given(
        kind=verdict["kind"],
        ranks=tuple(verdict["ranks"]),
        error=not all(culprit["moves"] for culprit in verdict["culprits"]),
        group=named[1] if named else None,
        doing=one.get("doing"),
        detail=one.get("detail"),
        message=verdict["message"],
    )


def wrongs(expected: Expected, plan: Plan, verdict: Given) -> list[str]:
    """What is not as expected, in words; empty if all is right."""
    wrong = []
    if verdict.kind not in expected.kinds:
        wrong.append(f"kind {verdict.kind}")
    culprits = expected.culprits(plan)
    if culprits and frozenset(verdict.ranks) not in culprits:
        wrong.append(f"ranks {list(verdict.ranks)}")
    if expected.doing and verdict.doing not in expected.doing:
        wrong.append(f"doing {verdict.doing}")
    if expected.details and verdict.kind == "mismatch" and verdict.detail not in expected.details:
        wrong.append(f"detail {verdict.detail}")
    if expected.kinds == ("mismatch",) and verdict.group != plan.group:
        wrong.append(f"group {verdict.group}")
    if expected.error is not None and verdict.error != expected.error:
        wrong.append("an error" if verdict.error else "no error")
    return wrong


def warned(verdict: Given, stderr: str) -> int:
    """On how many lines of stderr a person reads it."""
    return sum(1 for line in stderr.splitlines() if verdict.message and verdict.message in line)


def _files(log: Path) -> list[Path]:
    return sorted(log.rglob("rank-*.jsonl"))


def _rank(path: Path) -> int:
    return int(path.name.removeprefix("rank-").split(".")[0])


def _verdicts(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n")[:-1]:
        if line.startswith(b'{"type":"verdict"'):
            yield json.loads(line)
