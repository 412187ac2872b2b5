"""A training that does everything and begins anew now and then: half an hour of it as kept, and half a minute here."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.job import PYTHON, Jobs, environment

pytestmark = [pytest.mark.dist, pytest.mark.once]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def soak() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("soak")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / "results" / "soak.json").read_text(encoding="utf-8"))
    return found


def test_half_an_hour_left_nothing_behind(soak: Any, kept: dict[str, Any]) -> None:
    asked = kept["asked"]
    assert asked["minutes"] >= 30
    assert asked["reinit"] <= 120
    assert asked["rotation"] <= 10
    assert soak.complaints(kept) == []


def test_what_grows_or_is_missing_is_complained_of(soak: Any, kept: dict[str, Any]) -> None:
    def complaints(change: Any) -> list[str]:
        found = copy.deepcopy(kept)
        change(found)
        return soak.complaints(found)

    def grow(what: str, by: float) -> Any:
        def change(found: dict[str, Any]) -> None:
            series = found["ranks"][0]
            series[what] = [value + by * at for value, at in zip(series[what], series["t"], strict=True)]

        return change

    assert "grew by" in "".join(complaints(grow("resident_kib", 30 * 1024 / 3600)))
    assert "threads" in "".join(complaints(grow("threads", 1 / 300)))
    assert "descriptors" in "".join(complaints(grow("descriptors", 1 / 300)))
    assert "the log grew" in "".join(complaints(lambda found: found["log"]["kib"].append(10**7)))
    assert "pieces" in "".join(complaints(lambda found: found["pieces"].pop(5)))
    assert "lives" in "".join(complaints(lambda found: found.update(lives=found["lives"] + 1)))


def test_half_a_minute_of_it_has_all_pieces(jobs: Jobs, tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [*PYTHON, str(BENCHMARKS / "soak.py"), "--minutes", "0.4", "--reinit", "6", "--rotation", "1"]
    jobs.run([*command, "--every", "0.5", "--out", str(out)], environment(None)).ok()
    assert json.loads(out.read_text(encoding="utf-8"))["lives"] >= 3
