"""`ddtrace-pytorch report` on run logs as the writer, and accidents, leave them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.cli.summary import compact
from ddtrace_pytorch.identity.device import Device
from ddtrace_pytorch.runlog.writer import RunLogFile, RunLogQueue, RunLogWriter, log_directory
from ddtrace_pytorch.visible import visible

ROOT = Path(__file__).parents[2]
SECOND = 1_000_000_000
T0 = 1_790_000_000 * SECOND


def gpu(uuid, name="H100"):
    """What a session puts into its identity record for one GPU."""
    return Device("cuda", 0, uuid=uuid, name=name).tags("host-a")


def write_rank(root, rank, *, job="4242", incarnation="aaa", start=T0, end="destroyed", error=None, pieces=1, **more):
    """One rank's log through the real writer: ten beats, and a rank span that `end` (None: none) closes."""
    facts = {
        "ts": start,
        "schema": 1,
        "rank": rank,
        "world_size": more.get("world_size", 2),
        "host": more.get("host", "host-a"),
        "node": "0",
        "pid": 1000 + rank,
        "source": more.get("made_for", "trainer"),
        "job": {
            "id": job,
            "source": more.get("source", "SLURM_JOB_ID"),
            "attempt": more.get("attempt"),
            "incarnation": incarnation,
            "launcher": "slurm",
            "ids": {},
        },
        "device": more.get("device"),
        "versions": {"torch": "2.13.0"},
    }
    if "log_ranks" in more:
        facts["log_ranks"] = more["log_ranks"]
    log = RunLogWriter(
        RunLogFile(log_directory(str(root), job, incarnation), rank, lambda: facts, 1024 * 1024),
        RunLogQueue(limit_records=100),
    )
    for seq in range(10):
        log.queue.put({"type": "beat", "ts": start + seq * SECOND, "seq": seq})
    for piece in range(pieces):
        tags = {}
        if end is not None and piece == pieces - 1:
            tags["pytorch.end_reason"] = end
            if error:
                tags |= {"error.type": error[0], "error.message": error[1]}
        span = {"type": "span", "ts": start + 10 * SECOND, "name": "pytorch.rank", "span_id": str(rank * 100 + piece)}
        if end is not None:
            log.queue.put({**span, "start": start, "error": int(error is not None), "tags": tags, "metrics": {}})
    for _ in range(more.get("flood", 0)):
        log.queue.put({"type": "event", "ts": start, "name": "flood"})
    log.close()


def run(*args):
    return CliRunner().invoke(
        cli, ["report", *map(str, args)], env={"COLUMNS": "80", "DD_PYTORCH_STATE_DIR": "/nonexistent"}
    )


def report(*args):
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_process_beside_the_training_is_no_attempt_of_it(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path, rank, incarnation="training")
    write_rank(tmp_path, 0, incarnation="beside", start=T0 + SECOND, end="exit", made_for="rollout")
    write_rank(tmp_path, 0, job="alone", incarnation="alone", start=T0 - SECOND, end="exit", made_for="reward")

    data = report(tmp_path)

    assert [one["incarnation"] for one in data["attempts"]] == ["training"]
    assert [(one["number"], one["source"]) for one in data["starts"]] == [(1, "trainer"), (2, "rollout")]
    assert (data["job"]["attempts"], data["jobs"][1]["attempts"]) == (1, 0)
    assert report(tmp_path, "--attempt", "2")["attempts"][0]["ranks_missing"] == ""
    assert [one["source"] for one in report(tmp_path, "--job", "alone")["attempts"]] == ["reward"]
    shown = run(tmp_path).stdout
    assert re.search(r"^ +2 .* 1 +rollout: 1 exit$", shown, re.MULTILINE)
    assert "Source       rollout" in run(tmp_path, "--attempt", "2").stdout


def test_a_job_that_ended_well(tmp_path):
    write_rank(tmp_path, 0, pieces=3)
    write_rank(tmp_path, 1)

    data = report(tmp_path)

    assert data["job"] == {
        "id": "4242",
        "source": "SLURM_JOB_ID",
        "launcher": "slurm",
        "started": datetime.fromtimestamp(T0 / SECOND).astimezone().isoformat(timespec="seconds"),
        "attempts": 1,
    }
    (attempt,) = data["attempts"]
    assert attempt["ranks_found"] == "0-1"
    assert attempt["ranks_missing"] == ""
    assert attempt["world_size"] == 2
    assert attempt["hosts"] == ["host-a"]
    assert attempt["duration_s"] == 10.0
    assert attempt["ends"] == {"destroyed": 2}
    assert [rank["pieces"] for rank in attempt["ranks"]] == [3, 1]
    assert not any(rank["ended_badly"] for rank in attempt["ranks"])
    assert data["notes"] == []

    shown = run(tmp_path).stdout
    assert "Job 4242 (from SLURM_JOB_ID, launched by slurm)" in shown
    assert re.search(r"^ +0 +host-a +10\.0s +3 +destroyed *$", shown, re.MULTILINE)


START_KEYS = """number attempt incarnation started last_seen duration_s world_size ranks_seen ends source"""
ATTEMPT_KEYS = (
    START_KEYS
    + """ ranks_found ranks_missing ranks_not_logged hosts gpus dropped versions
                               collectives_setting collectives single_calls slowest_calls stragglers slow_groups
                               steps recorded stalls stalls_uncounted windows kernels ranks"""
)
RANK_KEYS = """rank host node pid device started last_seen last_beat duration_s end_reason ended_badly error_type
               error_message pieces dropped"""


def test_the_keys_of_the_json_are_the_documented_ones(tmp_path):
    write_rank(tmp_path, 0, device=gpu("GPU-1"))
    data = report(tmp_path)
    (attempt,) = data["attempts"]
    assert list(data) == ["directory", "jobs", "job", "suspected", "starts", "attempts", "notes"]
    assert list(data["starts"][0]) == START_KEYS.split()
    assert list(attempt) == ATTEMPT_KEYS.split()
    assert list(attempt["gpus"][0]) == ["host", "uuid", "name", "ranks"]
    assert list(attempt["ranks"][0]) == RANK_KEYS.split()


def test_an_id_that_no_launcher_gave_is_said_to_be_made_up(tmp_path):
    write_rank(tmp_path, 0, source="generated")
    assert "Job 4242 (an id made up by its ranks, launched by slurm)" in run(tmp_path).stdout
    assert report(tmp_path)["job"]["source"] == "generated"


def test_missing_ranks_are_named(tmp_path):
    for rank in (0, 1, 2, 4, 5, 6, 10):
        write_rank(tmp_path, rank, world_size=11)
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["ranks_missing"] == "3, 7-9"
    assert "Ranks        0-2, 4-6, 10 of 11; missing: 3, 7-9" in run(tmp_path).stdout


def test_ranks_that_were_not_to_write_a_log_are_told_from_missing_ones(tmp_path):
    for rank in (0, 8):
        write_rank(tmp_path, rank, world_size=32, log_ranks="%8")
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["ranks_not_logged"] == "1-7, 9-15, 17-23, 25-31"
    assert attempt["ranks_missing"] == "16, 24"
    says = "Ranks        0, 8 of 32; not chosen to write a log: 1-7, 9-15, 17-23, 25-31; missing: 16, 24"
    assert says in run(tmp_path).stdout.splitlines()


@pytest.mark.parametrize(
    ("choices", "not_logged", "missing"),
    [
        ((None, None), "", "2-3"),  # written by a version that didn't say
        (("all", "all"), "", "2-3"),
        (("0-1", "0-1"), "2-3", ""),
        (("0-1", "0-2"), "3", "2"),  # two hosts that don't agree: whatever one of them wants may be missing
        (("0-1", None), "", "2-3"),
        (("nonsense", 7), "", "2-3"),
    ],
)
def test_what_nobody_said_it_would_not_write_is_missing(tmp_path, choices, not_logged, missing):
    for rank, choice in enumerate(choices):
        write_rank(tmp_path, rank, world_size=4, **({} if choice is None else {"log_ranks": choice}))
    (attempt,) = report(tmp_path)["attempts"]
    assert (attempt["ranks_not_logged"], attempt["ranks_missing"]) == (not_logged, missing)


def test_ranks_that_make_a_long_list_are_cut_in_a_terminal_only(tmp_path):
    write_rank(tmp_path, 0, world_size=1024, log_ranks="%8")
    (line,) = [line for line in run(tmp_path).stdout.splitlines() if line.startswith("Ranks")]
    assert "missing: 8, 16, 24, 32, 40, 48, 56, 64, … (--json lists all)" in line
    assert len(line) < 240
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["ranks_missing"].split(", ") == [str(rank) for rank in range(8, 1024, 8)]
    assert attempt["ranks_not_logged"].endswith("1017-1023")


def test_a_rank_without_an_end_says_when_it_was_last_alive(tmp_path):
    write_rank(tmp_path, 0, end=None)
    write_rank(tmp_path, 1)
    clock = datetime.fromtimestamp(T0 / SECOND + 9).strftime("%H:%M:%S")
    first, second = report(tmp_path)["attempts"][0]["ranks"]
    assert first["end_reason"] is None
    assert first["duration_s"] == 9.0
    assert datetime.fromisoformat(first["last_beat"]).timestamp() == T0 / SECOND + 9
    assert first["ended_badly"]
    assert not second["ended_badly"]
    assert f"no end recorded (last beat {clock})" in run(tmp_path).stdout


def test_an_error_is_shown_with_the_ranks_that_had_it(tmp_path):
    write_rank(tmp_path, 0, end="exception", error=("builtins.ValueError", "no such\nshard"))
    write_rank(tmp_path, 1, end="exception", error=("builtins.ValueError", "no such\nshard"))
    assert report(tmp_path)["attempts"][0]["ranks"][0]["error_message"] == "no such\nshard"
    assert "rank 0-1: builtins.ValueError: no such\\nshard" in run(tmp_path).stdout


def test_there_is_one_device_record_per_host_and_uuid(tmp_path):
    for rank, (host, uuid) in enumerate([("a", "GPU-1"), ("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")]):
        write_rank(tmp_path, rank, host=host, device=gpu(uuid), world_size=4)
    write_rank(tmp_path, 0, host="a", device=gpu("GPU-1"), world_size=4)  # a second process
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["gpus"] == [
        {"host": "a", "uuid": "GPU-1", "name": "H100", "ranks": [0, 1]},
        {"host": "a", "uuid": "GPU-2", "name": "H100", "ranks": [2]},
        {"host": "b", "uuid": "GPU-1", "name": "H100", "ranks": [3]},
    ]


def test_a_cpu_is_no_gpu(tmp_path):
    write_rank(tmp_path, 0, device=Device("cpu").tags("host-a"))
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["gpus"] == []
    assert attempt["ranks"][0]["device"] is None


def test_what_was_dropped_is_counted_by_reason(tmp_path):
    write_rank(tmp_path, 0, flood=500)
    write_rank(tmp_path, 1)
    (attempt,) = report(tmp_path)["attempts"]
    assert attempt["dropped"] == {"queue full": 411}
    assert [rank["dropped"] for rank in attempt["ranks"]] == [{"queue full": 411}, {}]
    assert "Dropped      411 (queue full)" in run(tmp_path).stdout


@pytest.fixture
def restarted(tmp_path):
    """A job killed and run again in the same folder; names that don't sort in the order of time."""
    for rank in (0, 1):
        write_rank(tmp_path, rank, incarnation="zzz", end=None, attempt=0)
        write_rank(tmp_path, rank, incarnation="bbb", start=T0 + 100 * SECOND, attempt=0)
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "incarnations"),
    [((), ["bbb"]), (("last",), ["bbb"]), (("1",), ["zzz"]), (("2",), ["bbb"]), (("all",), ["zzz", "bbb"])],
)
def test_attempts_are_in_order_of_time_and_never_mixed(restarted, asked, incarnations):
    data = report(restarted, *(f"--attempt={one}" for one in asked))
    assert [attempt["incarnation"] for attempt in data["attempts"]] == incarnations
    assert [start["ends"] for start in data["starts"]] == [{"no end recorded": 2}, {"destroyed": 2}]


def test_several_jobs_are_listed_and_the_newest_reported(tmp_path):
    write_rank(tmp_path, 0, job="old", start=T0)
    write_rank(tmp_path, 0, job="new", start=T0 + 100 * SECOND)
    data = report(tmp_path)
    assert [job["id"] for job in data["jobs"]] == ["new", "old"]
    assert data["job"]["id"] == "new"
    assert report(tmp_path, "--job", "old")["job"]["id"] == "old"
    assert "Jobs here, newest first" in run(tmp_path).stdout


@pytest.fixture
def similar(tmp_path):
    for number, job in enumerate(("run", "run-7a", "run-7b", "test-1")):
        write_rank(tmp_path, 0, job=job, start=T0 + number * SECOND)
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "job"), [("t", "test-1"), ("run-7a", "run-7a"), ("run", "run"), ("run-7b", "run-7b")]
)
def test_a_job_goes_by_its_id_or_by_a_beginning_that_no_other_has(similar, asked, job):
    assert report(similar, "--job", asked)["job"]["id"] == job


def test_a_beginning_that_several_jobs_have_names_them(similar):
    result = run(similar, "--job", "run-")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "2 jobs in" in result.stderr
    assert "begin with run-: run-7b, run-7a" in result.stderr


@pytest.mark.parametrize(
    ("asked", "number"),
    [("20261128T1112", 1), ("20261128T12", 2), ("20261128T120000Z-00000002", 2), ("2", 2), ("night", 3)],
)
def test_an_attempt_goes_by_the_beginning_of_its_incarnation_too(tmp_path, asked, number):
    incarnations = ("20261128T111200Z-00000001", "20261128T120000Z-00000002", "night")
    for hour, incarnation in enumerate(incarnations):
        write_rank(tmp_path, 0, incarnation=incarnation, start=T0 + hour * 3600 * SECOND)
    (attempt,) = report(tmp_path, "--attempt", asked)["attempts"]
    assert attempt["number"] == number
    several = run(tmp_path, "--attempt", "20261128T1")
    assert several.exit_code == 2
    assert "2 attempts of job 4242 begin with 20261128T1: 20261128T111200Z-00000001, 2026" in several.stderr


def test_a_plain_number_is_never_taken_for_the_beginning_of_an_incarnation(tmp_path):
    write_rank(tmp_path, 0, incarnation="20261128T111200Z-00000001")
    assert run(tmp_path, "--attempt", "2").exit_code == 2


@pytest.mark.parametrize(("many", "says"), [(10, None), (11, "… 1 more (--json lists all)"), (13, "… 3 more")])
def test_only_the_newest_jobs_are_listed_in_a_terminal(tmp_path, many, says):
    for number in range(many):
        write_rank(tmp_path, 0, job=f"job-{number:02}", start=T0 + number * SECOND)
    shown = run(tmp_path, "--job", "job-00").stdout
    listed = re.findall(r"^(job-\d\d) ", shown, re.MULTILINE)
    assert listed == [f"job-{number:02}" for number in reversed(range(many - 10, many))]
    assert says in shown if says else "more" not in shown
    assert "Job job-00 (" in shown
    assert len(report(tmp_path)["jobs"]) == many


def test_many_ranks_collapse_to_those_that_ended_badly(tmp_path):
    for rank in range(40):
        write_rank(tmp_path, rank, world_size=40, end="signal:SIGTERM" if rank == 17 else "destroyed")
    shown = run(tmp_path).stdout
    assert re.search(r"^ +17 +host-a .*signal:SIGTERM", shown, re.MULTILINE)
    assert "… 39 more ranks ended destroyed" in shown
    assert len(shown.splitlines()) < 25
    assert len(report(tmp_path)["attempts"][0]["ranks"]) == 40


def test_more_bad_ends_than_rows_are_counted(tmp_path):
    for rank in range(40):
        write_rank(tmp_path, rank, world_size=40, end=None if rank < 35 else "destroyed")
    shown = run(tmp_path).stdout
    assert "… 5 more ranks ended destroyed" in shown
    assert "… 3 more ranks ended without a recorded end" in shown


def test_no_line_of_a_table_is_wider_than_80_columns(tmp_path):
    for rank in range(3):
        device = gpu(f"GPU-01234567-89ab-cdef-0123-45678901234{rank}", "NVIDIA H100 80GB HBM3")
        write_rank(tmp_path, rank, host="trainer-job-worker-0-abcdef", device=device, end=None, flood=500, pieces=3)
    shown = run(tmp_path).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("no end recorded (last beat ") == 3
    assert all(f"GPU-01234567-89ab-cdef-0123-45678901234{rank}" in shown for rank in range(3))


@pytest.mark.parametrize(
    ("world_size", "ends", "ended"),
    [
        (2, [None, "signal:SIGTERM"], "1 no end recorded, 1 signal:SIGTERM"),
        (64, ["exception"] + ["signal:SIGTERM"] * 63, "63 signal:SIGTERM, 1 exception"),
        (1024, ["exception"] + ["signal:SIGTERM"] * 39, "39 signal:SIGTERM, 1 exception"),
    ],
)
def test_attempts_are_a_line_each(tmp_path, world_size, ends, ended):
    for rank, end in enumerate(ends):
        write_rank(tmp_path, rank, world_size=world_size, end=end)
    write_rank(tmp_path, 0, incarnation="bbb", start=T0 + 3600 * SECOND)
    shown = run(tmp_path).stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("  1  ")]
    started = datetime.fromtimestamp(T0 / SECOND).strftime("%Y-%m-%d %H:%M:%S")
    ranks = f"{len(ends)}" if len(ends) == world_size else f"{len(ends)}/{world_size:,}"
    assert line.split(maxsplit=5) == ["1", *started.split(), line.split()[3], ranks, ended]
    assert max(map(len, shown.splitlines())) <= 80


def test_escapes_and_markup_are_shown_as_text(tmp_path):
    job = "[red]x[/red]\x1b]0;title\x07\u202e"
    write_rank(tmp_path, 0, job=job, host="\x1b[2J", end="[bold]\x9b31m", error=("E\r", "[link=x]\x1b[1m"))
    write_rank(tmp_path, 0, job="other")
    result = run(tmp_path, "--job", job)
    assert result.exit_code == 0
    assert not [char for char in result.output if not (char.isprintable() or char == "\n")]
    for literal in ("[red]x[/red]\\x1b]0;title\\x07\\u202e", "\\x1b[2J", "[bold]\\x9b31m", "E\\r: [link=x]\\x1b[1m"):
        assert literal in result.output
    wrong = run(tmp_path, "--job", "\x1b[1m")
    assert "\x1b" not in wrong.output
    assert wrong.exit_code == 2


def test_hostile_records_cost_their_value_not_the_report(tmp_path):
    write_rank(tmp_path, 0)
    (path,) = tmp_path.rglob("*.jsonl")
    with path.open("ab") as file:
        for line in (
            {"type": "identity", "ts": 2**80, "rank": "x", "job": 5, "device": [], "world_size": -4, "versions": "v"},
            {"type": "span", "ts": -(2**80), "name": "pytorch.rank", "tags": 7, "span_id": [], "start": "x"},
            {"type": "drop", "ts": 1, "reason": 5, "count": "many"},
        ):
            file.write(json.dumps(line).encode() + b"\n")
    assert report(tmp_path)["attempts"][0]["ranks"][0]["rank"] == 0
    assert run(tmp_path).exit_code == 0


def test_a_damaged_rank_beside_good_ones_is_a_note_and_a_missing_rank(tmp_path):
    write_rank(tmp_path, 0)
    (tmp_path / "4242" / "aaa" / "rank-00001.jsonl").write_bytes(b"\x00" * 100)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "missing: 1" in result.stdout
    assert "note: skipped the last line of aaa/rank-00001.jsonl, which is cut short" in result.stdout


def damaged(place):
    place.mkdir()
    (place / "rank-00000.jsonl").write_bytes(b"garbage\n" * 10)


def foreign(place):
    place.mkdir()
    (place / "train.py").write_text("pass")


@pytest.mark.parametrize(
    ("make", "code", "says"),
    [
        (lambda place: None, 2, "no directory"),
        (lambda place: place.write_text(""), 2, "is a file; give the directory it is in"),
        (Path.mkdir, 1, "no run log in"),
        (foreign, 1, "no run log in"),
        (damaged, 1, "none of the 1 run log(s)"),
    ],
    ids=["missing", "file", "empty", "nothing of ours", "all damaged"],
)
def test_nothing_to_report_is_one_clear_line_on_stderr(tmp_path, make, code, says):
    place = tmp_path / "place"
    make(place)
    for extra in ((), ("--json",)):
        result = run(place, *extra)
        assert result.exit_code == code
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert says in result.stderr
        assert str(place) in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--job", "nope"), "no job nope in"),
        (("--attempt", "7"), "no attempt 7 of job 4242; choose last, all, or from 1 to 1"),
        (("--attempt", "first"), "no attempt first of job 4242"),
    ],
)
def test_an_unknown_job_or_attempt_says_what_there_is(tmp_path, args, says):
    write_rank(tmp_path, 0)
    result = run(tmp_path, *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr


def command(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "ddtrace_pytorch.cli.main", *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_a_missing_usual_place_is_told_from_one_that_was_named(tmp_path):
    missing = str(tmp_path / "missing")
    named = command("report", DD_PYTORCH_LOG_DIR=missing)
    usual = command("report", DD_PYTORCH_LOG_DIR="", TMPDIR=str(tmp_path))
    assert (named.returncode, usual.returncode) == (2, 2)
    assert f"no directory {missing}, which DD_PYTORCH_LOG_DIR names" in named.stderr.decode()
    assert "where run logs go when DD_PYTORCH_LOG_DIR is not set" in usual.stderr.decode()


def test_the_command_reads_the_log_directory_of_the_environment(tmp_path):
    write_rank(tmp_path, 0)
    result = command("report", DD_PYTORCH_LOG_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert b"Job 4242" in result.stdout
    assert b"\x1b" not in result.stdout  # piped: no colours


def test_the_command_without_a_log_says_where_it_looked(tmp_path):
    result = command("report", TMPDIR=str(tmp_path), DD_PYTORCH_LOG_DIR="")
    assert result.returncode == 2
    assert f"no directory {tmp_path}/ddtrace-pytorch-{os.getuid()}".encode() in result.stderr


def test_an_ascii_terminal_gets_escapes_not_an_error(tmp_path):
    for rank in range(40):
        write_rank(tmp_path, rank, job="jöb", world_size=40)
    result = command("report", tmp_path, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert rb"Job j\xf6b" in result.stdout


def test_the_command_tells_its_version():
    from ddtrace_pytorch import __version__

    assert command("--version").stdout.decode().split() == ["ddtrace-pytorch,", "version", __version__]


def test_an_unknown_command_is_a_usage_error():
    result = command("nonsense")
    assert result.returncode == 2
    assert b"No such command" in result.stderr


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([9, 8, 7, 3], "3, 7-9"), (range(1000), "0-999"), ([0, 2], "0, 2")]
)
def test_numbers_are_written_as_people_do(numbers, text):
    assert compact(numbers) == text


def test_visible_leaves_readable_text_alone():
    assert visible("Zürich [ok] 100 %") == "Zürich [ok] 100 %"
    assert visible("a\x1b\u2028\ud800") == "a\\x1b\\u2028\\ud800"
