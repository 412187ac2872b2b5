"""Who hears of steps: Datadog's native tracer wherever it is loaded, or a library that is given; shared objects in
their place, in processes of their own."""

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
import ctypes, os
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
    [("", True, "bebebe"), ("", False, ""), ("ours", True, "BEBEBE"), ("ours", False, "BEBEBE")],
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


@pytest.mark.parametrize(("arguments", "expected"), [("", "bebe"), ("ours", "BEBEBEBE")])
def test_one_that_comes_late_is_told_from_the_next_look_on(tmp_path: Path, arguments: str, expected: str) -> None:
    assert heard(tmp_path, f"signals = StepSignals({arguments})" + textwrap.dedent(LATE)) == expected
