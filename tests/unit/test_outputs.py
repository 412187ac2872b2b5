"""What commands write, where it can't be written, where nobody reads it, and where the user has had enough."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness.disk import small_disk
from harness.training import Training
from harness.waiting import until

from ddtrace_pytorch.cli.main import cli

pytestmark = pytest.mark.once

PRINTING = ("report", "report --json", "timeline -o -", "diagnose")
MAIN = "from ddtrace_pytorch.cli.main import main; main()"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than a pipe holds, whichever command it is."""
    return Training(tmp_path_factory.mktemp("log"), 40, 40, ended=False).write()


def command(words: str, log: Path, code: str = MAIN) -> list[str]:
    name, *options = words.split()
    return [sys.executable, "-c", code, name, str(log), *options]


def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "DD_PYTORCH_STATE_DIR": str(place), "DD_PYTORCH_EXPORT": "local", "COLUMNS": "120"}


@pytest.mark.parametrize("words", [*PRINTING, "recover"])
def test_a_full_disk_is_said_in_a_line(log: Path, tmp_path: Path, words: str) -> None:
    env = environment(tmp_path)
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            command(words, log), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=env, check=False
        )
    *before, last = ended.stderr.splitlines()
    assert (ended.returncode, before) == (1, [])
    assert last == "Error: can't write to standard output: No space left on device; make room there"


@pytest.mark.parametrize("words", PRINTING)
def test_who_reads_a_few_lines_gets_no_message(log: Path, tmp_path: Path, words: str) -> None:
    reads, writes = os.pipe()
    process = subprocess.Popen(
        command(words, log), stdout=writes, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
    )
    os.close(writes)
    assert os.read(reads, 10)
    os.close(reads)
    _, said = process.communicate(timeout=60)
    assert said == ""
    # What was over before nobody read any more may have ended well, or as `diagnose` ends.
    assert process.returncode in (0, 1, 3)


def test_without_standard_output_and_error_a_file_is_written_all_the_same(log: Path, tmp_path: Path) -> None:
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command("timeline -o", log), str(tmp_path / "out.json")]
    assert subprocess.run(closed, timeout=60, env=environment(tmp_path), check=False).returncode == 0
    assert (tmp_path / "out.json").read_bytes().endswith(b"}\n")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "4k") as disk:
        (disk / "there").write_text("mine")
        yield disk


WRITING = ("timeline -o", "timeline --format pftrace -o", "report --html")


@pytest.mark.parametrize("words", WRITING)
def test_what_cannot_be_written_says_where_and_what_to_do(log: Path, full_disk: Path, words: str) -> None:
    place = full_disk.parent
    (place / "file").write_text("mine")
    before = {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}
    name, *options = words.split()
    for where, why in {
        "disk/there": "No space left on device; make room there, or name a file on another disk",
        "disk/new.gz": "No space left on device; make room there, or name a file on another disk",
        "disk": "Is a directory; name a file in it",
        "none/new": "No such file or directory; make the directory it is to be in, or name another",
        "file/new": "Not a directory; make the directory it is to be in, or name another",
        "a" * 300: "File name too long; name another file",
    }.items():
        path = place / where
        result = CliRunner().invoke(cli, [name, str(log), *options, str(path)])
        assert (result.exit_code, result.stdout) == (1, ""), where
        assert result.stderr == f"Error: can't write {path}: {why}\n"
    assert {path: path.is_file() and path.read_bytes() for path in place.rglob("*")} == before


# Says that it is in the midst of it, and stays there.
HELD = """
import os, signal, sys, time
from ddtrace_pytorch.cli import gathering
from ddtrace_pytorch.cli.main import main
from ddtrace_pytorch.timeline import crew, drawing

signal.signal(signal.SIGINT, signal.default_int_handler)
os.sched_getaffinity = lambda pid: {0, 1, 2}
crew.WORTH_IT = int(sys.argv.pop(1))

def held(real):
    def hold(one, *more, **options):
        if getattr(one, "rank", None) == 2 or getattr(one, "number", None) == 2:
            print("in the midst", file=sys.stderr, flush=True)
            time.sleep(600)
        return real(one, *more, **options)
    return hold

drawing._draw_rank = held(drawing._draw_rank)
gathering.read = held(gathering.read)
main()
"""


@pytest.mark.parametrize(
    ("words", "processes"),
    [("timeline -o", "one"), ("timeline -o", "several"), ("report --html", "several"), ("report", "one")],
)
def test_ctrl_c_leaves_nothing_behind(log: Path, tmp_path: Path, words: str, processes: str) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    name, *options = words.split()
    line = [sys.executable, "-c", HELD, str(10**9 if processes == "one" else 0), name, str(log), *options]
    env = {**environment(tmp_path / "state"), "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        [*line, str(out)] if options else line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "in the midst\n"
    # As a terminal does it: to all processes.
    os.killpg(process.pid, signal.SIGINT)
    said, complained = process.communicate(timeout=60)
    assert (process.returncode, said, complained) == (130, "", "Interrupted.\n")
    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["out", "scratch"]
    until(lambda: not _alive(process.pid), 20, "all of its processes are gone")


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
