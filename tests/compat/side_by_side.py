"""Runs a script of `scenarios/` twice, without the plugin and with it, and compares what came of each scene."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.job import Jobs, Result, environment, torchrun
from harness.log import Record, of_type, rank_spans

SCENARIOS = Path(__file__).parent / "scenarios"


def scenes_of(script: str) -> list[str]:
    """The names of a script's scenes, in order."""
    return re.findall(r"^@scene\ndef (\w+)", (SCENARIOS / script).read_text(), re.MULTILINE)


@dataclass
class Side:
    """One of the two jobs: what each rank said of each scene, what it printed, and its run log."""

    ranks: list[dict[str, Any]]
    result: Result
    log: Path

    def lives(self, rank: int) -> list[Record]:
        """Its spans, one for each life of the process group."""
        return [span for span in rank_spans(self.log) if span["metrics"]["rank"] == rank]

    def summaries(self, rank: int = 0, **tags: str) -> list[Record]:
        """Totals of collectives in the run log, by the tags that are given without their ``collective.``."""
        return [
            record
            for record in of_type(self.log, "summary")
            if record["name"] == "pytorch.collectives"
            and re.search(rf"rank-0*{rank}\D", record["_file"])
            and all(record["tags"].get(f"collective.{name}") == value for name, value in tags.items())
        ]

    def total(self, metric: str, rank: int = 0, **tags: str) -> float:
        return sum(record["metrics"].get(f"collective.{metric}", 0) for record in self.summaries(rank, **tags))


@dataclass
class Sides:
    plain: Side
    ours: Side

    def compare(self, scene: str) -> None:
        """The scene went well, and the same way, in both jobs."""
        for rank, (plain, ours) in enumerate(zip(self.plain.ranks, self.ours.ranks, strict=True)):
            for which, said in (("plain", plain), ("ours", ours)):
                if scene not in said:
                    pytest.fail(f"{which}, rank {rank}: an earlier scene ended the script")
                if "raised" in said[scene]:
                    pytest.fail(f"{which}, rank {rank}: {said[scene]['raised']}")
            if "refused" in plain[scene]:
                assert ours[scene] == plain[scene]
                pytest.skip(plain[scene]["refused"])
            assert ours[scene] == plain[scene], f"rank {rank}: {_difference(ours[scene], plain[scene])}"


def _difference(ours: Any, plain: Any) -> Any:
    """What differs, alone; a whole scene is more than CI shows."""
    if isinstance(ours, dict) and isinstance(plain, dict):
        names = sorted(ours.keys() | plain.keys())
        pairs = {name: (ours.get(name), plain.get(name)) for name in names}
        return {name: _difference(*pair) for name, pair in pairs.items() if pair[0] != pair[1]}
    return f"{ours!r} with, {plain!r} without"


def side_by_side(jobs: Jobs, script: str, ranks: int = 2, **settings: str) -> Sides:
    """Both jobs, at the same time; `settings` are those of the one with the plugin."""
    started = []
    for patched in (False, True):
        directory = jobs.directory / ("ours" if patched else "plain")
        (directory / "said").mkdir(parents=True)
        env = environment(
            None,
            PATCHED=str(int(patched)),
            SAID=str(directory / "said"),
            WORK=str(directory),
            DD_PYTORCH_EXPORT="local",
            DD_PYTORCH_LOG_DIR=str(directory / "log"),
            TORCHINDUCTOR_CACHE_DIR=str(directory / "inductor"),
            TORCHINDUCTOR_COMPILE_THREADS="1",
            TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",  # the ranks share one: who finds what in it is a matter of luck
            TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0",
            **settings,
        )
        started.append((directory, jobs.start([*torchrun(ranks), str(SCENARIOS / script)], env)))
    return Sides(*(_side(directory, job.wait(200), ranks) for directory, job in started))


def _side(directory: Path, result: Result, ranks: int) -> Side:
    result.ok()
    said = [json.loads((directory / "said" / f"{rank}.json").read_text()) for rank in range(ranks)]
    return Side(said, result, directory / "log")
