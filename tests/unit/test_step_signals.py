"""Who hears of steps: Datadog's native tracer wherever it is loaded, or else ours; shared objects in their place, in
processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness.native import built

pytestmark = pytest.mark.once

HEAD = """
import ctypes, os, sys, threading
from ddtrace_pytorch.kernels.step_signals import StepSignals

ours = ctypes.PyDLL(os.environ["OURS"])

def load():
    ctypes.CDLL(os.environ["THEIRS"], mode=ctypes.RTLD_GLOBAL)
"""


def heard(tmp_path: Path, script: str, preload: bool = False) -> str:
    """A letter for each call: capitals are ours."""
    (tmp_path / "ours").mkdir()
    theirs, ours = built("step_signals", tmp_path), built("step_signals", tmp_path / "ours", "-DUPPER")
    calls = tmp_path / "calls"
    place = {"STEP_SIGNALS": str(calls), "OURS": str(ours), "THEIRS": str(theirs)}
    place |= {"LD_PRELOAD": str(theirs)} if preload else {}
    command = [sys.executable, "-c", HEAD + textwrap.dedent(script)]
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return "".join(path.read_text() for path in tmp_path.glob("calls.*"))


STEPS = """
    signals.look()
    for step in range(2):
        signals.turn()
    signals.look()
    signals.close()
    signals.close()
    signals.turn()
"""


@pytest.mark.parametrize(
    ("arguments", "preload", "expected"),
    [
        ("", True, "bebebe"),
        ("ours", True, "bebebe"),
        ("ours", False, "BEBEBE"),
        ("", False, ""),
        ("ours, theirs=False", True, "BEBEBE"),
        ("theirs=False", True, ""),
    ],
)
def test_one_of_them_hears_of_every_step(tmp_path: Path, arguments: str, preload: bool, expected: str) -> None:
    assert heard(tmp_path, f"signals = StepSignals({arguments})" + textwrap.dedent(STEPS), preload) == expected


LATE = """
    signals.look()
    signals.turn()
    load()
    signals.turn()
    signals.look()
    signals.look()
    signals.turn()
    signals.close()
    signals.look()
    signals.turn()
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # Until the look that finds theirs, ours; one step is told to both, a part each.
        ("ours", "BEBEBbEebe"),
        ("", "bebe"),
        ("ours, theirs=False", "BEBEBEBE"),
    ],
)
def test_one_that_comes_late_takes_over_at_the_next_look(tmp_path: Path, arguments: str, expected: str) -> None:
    assert heard(tmp_path, f"signals = StepSignals({arguments})" + textwrap.dedent(LATE)) == expected


def test_one_that_comes_after_the_end_hears_nothing(tmp_path: Path) -> None:
    script = """
        signals = StepSignals(ours)
        signals.look()
        signals.close()
        load()
        signals.look()
        signals.turn()
        signals.close()
        """
    assert heard(tmp_path, script) == "BE"


def test_no_step_stays_open_where_another_thread_looks_at_any_moment(tmp_path: Path) -> None:
    script = """
        sys.setswitchinterval(1e-6)
        for _ in range(300):
            signals = StepSignals(ours, theirs=False)
            signals.look()
            begun = threading.Event()
            over = threading.Event()

            def train():
                while not over.is_set():
                    signals.turn()
                    begun.set()

            thread = threading.Thread(target=train)
            thread.start()
            begun.wait()
            signals._looking = True  # as if theirs had come just now
            signals.look()
            over.set()
            thread.join()
            signals.close()
            with open(f"{os.environ['STEP_SIGNALS']}.{os.getpid()}", "a") as calls:
                calls.write("|")
        """
    rounds = heard(tmp_path, script, preload=True).split("|")[:-1]
    assert len(rounds) == 300
    for calls in rounds:
        ours, theirs = ("".join(call for call in calls if call in letters) for letters in ("BE", "be"))
        assert ours.endswith("E"), calls
        assert theirs == "be" * (len(theirs) // 2) != "", calls
