"""What makes large logs quick to read changes nothing of what is read."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from harness.log import records

ROOT = Path(__file__).parents[2]

SEVERAL_PROCESSES = """
import os
from ddtrace_pytorch.timeline import crew
os.sched_getaffinity = lambda pid: {0, 1, 2}
crew.WORTH_IT = 0
from ddtrace_pytorch.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a job that never ran: 12 ranks on two hosts, 40 steps."""
    place = tmp_path_factory.mktemp("big")
    command = [sys.executable, str(ROOT / "benchmarks" / "big_log.py"), str(place), "--ranks", "12", "--steps", "40"]
    subprocess.run(command, check=True, timeout=60)
    return place


def run(*args: str, code: str = "from ddtrace_pytorch.cli.main import main; main()") -> str:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_several_processes_report_the_same_as_one(log: Path) -> None:
    damaged = next(log.rglob("rank-00003.jsonl"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole + b"{nonsense}\n")
    alone = run("report", str(log), "--json")
    assert run("report", str(log), "--json", code=SEVERAL_PROCESSES) == alone
    page = run("report", str(log), "--html", "-")
    assert run("report", str(log), "--html", "-", code=SEVERAL_PROCESSES) == page
    damaged.write_bytes(whole)
    report = json.loads(alone)
    (attempt,) = report["attempts"]
    assert attempt["ranks_found"] == "0-11"
    assert attempt["steps"]["slow"][0]["rank"] == 6
    waiting = attempt["stragglers"][0]
    assert waiting["late_rank"] == 6
    assert (waiting["calls"], waiting["first_step_calls"], waiting["unmatched"]) == (195, 5, 0)
    assert len(report["notes"]) == 1
    assert "skipped 1 damaged line" in report["notes"][0]


def test_what_is_counted_without_parsing_it_counts_as_if_it_were(log: Path, tmp_path: Path) -> None:
    for one in records(log):
        path = tmp_path / Path(one.pop("_file")).relative_to(log)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line that doesn't begin with its type is parsed, whatever it is.
        line = json.dumps({"ts": one.pop("ts"), **one}).encode() + b"\n"
        with path.open("ab") as file:
            file.write(line)
    expected, parsed = (json.loads(run("report", str(place), "--json")) for place in (log, tmp_path))
    assert parsed["attempts"] == expected["attempts"]


@pytest.mark.parametrize("command", ["report", "timeline"])
def test_a_terminal_is_shown_how_far_it_is(log: Path, tmp_path: Path, command: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ddtrace_pytorch.cli.main", command, str(log)],
        stdout=subprocess.PIPE, stderr=theirs, cwd=tmp_path, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 4096):
            said += chunk
    except OSError:
        pass  # nobody has the other end any more
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"looking" in said
    assert b"/12" in said
    assert b"looking" not in out
