"""`ddtrace-pytorch diagnose` on small run logs, one for each kind of fault, with and without torch's own dumps."""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from harness.dead import leave_last_words
from harness.log import records
from harness.stalls.verdicts import Given, afterwards
from harness.story import BROKEN, CLOSED, SECOND, Record, at, beats, ended, raised, state_of, stated

from ddtrace_pytorch.aftermath import Teller
from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.collectives.dump_files import is_dump, rank_of
from ddtrace_pytorch.collectives.flight_recorder import Entry, entry_of
from ddtrace_pytorch.runlog.schema import encode
from ddtrace_pytorch.runlog.writer import log_directory
from ddtrace_pytorch.settings import load
from ddtrace_pytorch.stalls import places, positions, telling
from ddtrace_pytorch.stalls.agreement import compare
from ddtrace_pytorch.stalls.recovery import Fate, recover
from ddtrace_pytorch.stalls.verdict import judge

INCARNATION = "20260921T141320Z-00000001"
KILLED = stated(state_of(1, 41, 20, frames=("/job/train.py:24 load",), step=7, doing="data"), "killed")


def write(root: Path, rank: int, story: Iterable[Record], **more: Any) -> Path:
    """One rank's log; `more`: ``job``, ``incarnation``, ``host``, ``world``, ``start`` (s after T0)."""
    job, incarnation = more.get("job", "4242"), more.get("incarnation", INCARNATION)
    identity = {
        "type": "identity", "ts": at(more.get("start", 0)), "schema": 1, "rank": rank,
        "world_size": more.get("world", 4), "host": more.get("host", "host-a"), "pid": 100 + rank, "log_ranks": "all",
        "source": more.get("source", "trainer"),
        "job": {"id": job, "incarnation": incarnation}, "device": {"device.kind": "cuda", "device.id": f"GPU-{rank}"},
    }  # fmt: skip
    folder = Path(log_directory(str(root), job, incarnation))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank:05d}.jsonl"
    path.write_bytes(b"".join(map(encode, [identity, *story])))
    return path


def run(*args: object) -> Result:
    nothing_left = {"COLUMNS": "80", "DD_PYTORCH_STATE_DIR": "/nonexistent"}
    return CliRunner().invoke(cli, ["diagnose", *map(str, args)], env=nothing_left)


def diagnosis(*args: object, code: int = 0) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def last(*args: object, code: int = 0) -> dict[str, Any]:
    (attempt,) = diagnosis(*args, code=code)["attempts"]
    assert isinstance(attempt, dict)
    return attempt


def waited(rank: int, port: int = 4711) -> list[Record]:
    """A rank that waits for rank 1 and hears that it is gone."""
    return [
        *beats(22, 42, since=19),
        raised(rank, 42, 22.5, CLOSED.replace("4711", str(port))),
        ended("exception", 23, BROKEN),
    ]


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    write(tmp_path, 1, [*beats(20, 41), KILLED, ended("killed", 20)], host="host-b")
    for rank in (0, 2, 3):
        write(tmp_path, rank, waited(rank, 4711 + rank))
    return tmp_path


def test_what_ran_beside_the_training_is_not_its_last_attempt(tmp_path: Path) -> None:
    write(tmp_path, 0, [], incarnation="training", world=1)
    write(tmp_path, 0, [], incarnation="beside", world=1, start=5, source="rollout")
    (attempt,) = diagnosis(tmp_path, code=3)["attempts"]
    assert (attempt["number"], attempt["incarnation"]) == (1, "training")
    assert diagnosis(tmp_path, "--attempt", "2", code=3)["attempts"][0]["incarnation"] == "beside"


def test_a_killed_rank_in_words(killed: Path) -> None:
    result = run(killed)
    assert result.exit_code == 0, result.output
    shown = result.stdout
    first, verdict = shown.split("The first failure", 1)[1].split(". ", 1)
    assert "rank 1 on host-b (GPU-1): killed" in first
    assert "all_reduce #42 of group `world`" in verdict
    assert "rank 1 (host-b, GPU-1) has died (killed)" in verdict
    assert "train.py:24 load" in verdict
    assert "ranks 0, 2-3 wait" in verdict
    assert "The others: ranks 0, 2-3 raised RuntimeError: Connection closed by peer …" in verdict
    rows = [re.split(r"\s{2,}|(?<=\d) (?=host)", line.strip()) for line in shown.splitlines()]
    assert rows[next(i for i, row in enumerate(rows) if row[0] == "Ranks" or row[0].startswith("Ranks ")) + 2][0] == "1"
    assert len([line for line in shown.splitlines() if "last beat" in line and line[:1].isdigit()]) == 2
    assert re.search(r"^\d\d:\d\d:\d\d\.\d{3} +ranks 0, 2-3 +.*raised", shown, re.MULTILINE)


ATTEMPT_KEYS = """number incarnation last_seen ended world_size ranks_found ranks_missing ended_well status_unknown
                  reason_found what_happened first_failure verdict flight_recorder ranks timeline stalls"""
RANK_KEYS = "rank host gpu ended ended_badly named last_beat was_in step where where_step where_at"


def test_the_keys_of_the_json_are_the_documented_ones(killed: Path) -> None:
    data = diagnosis(killed)
    assert list(data) == ["directory", "job", "last_seen", "ended", "suspected", "attempts", "notes"]
    (attempt,) = data["attempts"]
    assert list(attempt) == ATTEMPT_KEYS.split()
    assert list(attempt["first_failure"]) == ["at", "ranks", "cause", "what", "where", "frames"]
    assert list(attempt["verdict"]) == ["found", "at", "kind", "ranks", "waiting", "message", "culprits"]
    assert list(attempt["ranks"][0]) == RANK_KEYS.split()
    assert list(attempt["timeline"][0]) == ["at", "ranks", "what"]
    assert (attempt["verdict"]["found"], attempt["verdict"]["ranks"]) == ("afterwards", [1])
    judged = afterwards(attempt)
    assert judged is not None
    assert (judged.kind, judged.ranks, judged.group, judged.error) == ("gone", (1,), "world", True)
    assert (attempt["ranks"][0]["rank"], attempt["ranks"][0]["where"], attempt["ranks"][0]["step"]) == (
        1, "train.py:24 load", 7,
    )  # fmt: skip


def seen(attempt: dict[str, Any], which: int) -> tuple[Any, ...]:
    one = next(rank for rank in attempt["ranks"] if rank["rank"] == which)
    when = one["where_at"]
    return one["step"], one["where"], one["where_step"], when and datetime.fromisoformat(when).timestamp() - at(0) / 1e9


def test_a_rank_that_went_on_after_its_last_beat_is_not_said_to_be_where_it_was_then(tmp_path: Path) -> None:
    """The part in C writes the step and the call; frames are seen once a second."""
    beat = state_of(1, 41, 20, frames=("/job/train.py:24 load",), step=7)
    memory = bytearray(positions.SIZE)
    positions._NUMBER.pack_into(memory, positions.STEP, 9 + 1)
    left = positions.overlay(beat, bytes(memory), positions.NO_LEGEND)
    write(tmp_path, 1, [*beats(20, 41), stated(left, "killed"), ended("killed", 20)])
    for rank in (0, 2, 3):
        write(tmp_path, rank, waited(rank))
    assert seen(last(tmp_path), 1) == (9, "train.py:24 load", 7, 20)
    clock = datetime.fromtimestamp(at(20) / 1e9).strftime("%H:%M:%S")
    assert f"train.py:24 load (step 7, {clock})" in " ".join(run_wide(tmp_path).split())


def test_what_is_older_than_the_last_beat_is_told_with_its_age(tmp_path: Path) -> None:
    stall = stated(state_of(1, 40, 11, frames=("/job/train.py:24 load",), step=5), "stall")
    write(tmp_path, 1, [*beats(11, 40), stall, *beats(20, 41)[12:], ended("killed", 20)])
    for rank in (0, 2, 3):
        write(tmp_path, rank, waited(rank))
    assert seen(last(tmp_path), 1) == (None, "train.py:24 load", 5, 11)


def test_where_a_rank_was_that_a_verdict_named_is_the_newest_that_is_known(tmp_path: Path) -> None:
    then = state_of(1, 41, 14, frames=("/job/train.py:24 load",), step=7, moves=False)
    roll = {1: then, **{one: state_of(one, 42, 14, since=2) for one in (0, 2, 3)}}
    said = judge(roll, (0, 1, 2, 3), at(14))
    assert said is not None
    later = stated(state_of(1, 41, 20, frames=("/job/train.py:30 step",), step=9), "killed")
    for own, expected in (([], (None, "train.py:24 load", 7, 14)), ([later], (9, "train.py:30 step", None, None))):
        write(tmp_path, 1, [*beats(20, 41), *own, ended("killed", 20)])
        for rank in (0, 2, 3):
            write(tmp_path, rank, [*beats(20, 42, since=2), *([telling.record(said)] if rank == 0 else [])])
        assert seen(last(tmp_path), 1) == expected


def run_wide(*args: object) -> str:
    env = {"COLUMNS": "240", "DD_PYTORCH_STATE_DIR": "/nonexistent"}
    return CliRunner().invoke(cli, ["diagnose", *map(str, args)], env=env).stdout


def test_who_was_killed_before_anybody_waited_is_the_first_failure(tmp_path: Path) -> None:
    """A launcher ends the others at once."""
    write(tmp_path, 1, [*beats(20), ended("killed", 20)])
    for rank in (0, 2, 3):
        write(tmp_path, rank, [*beats(20), ended("signal:SIGTERM", 20.5)])
    judged = afterwards(last(tmp_path))
    assert judged == Given("gone", (1,), error=True, message="killed (SIGKILL, out of memory, abort() or os._exit())")


def test_where_an_exception_was_raised_is_told(tmp_path: Path) -> None:
    frames = ("/lib/python3.11/json/decoder.py:3 decode", "/job/train.py:88 load_batch", "/job/train.py:9 main")
    own = stated(state_of(1, 41, 20, frames=frames), "exception")
    write(tmp_path, 1, [*beats(20, 41), own, ended("exception", 20.4, ("train.OutOfData", "epoch 3 is empty\nreally"))])
    for rank in (0, 2, 3):
        write(tmp_path, rank, waited(rank))
    first = last(tmp_path)["first_failure"]
    assert (first["where"], first["frames"]) == ("train.py:88 load_batch", list(frames))
    shown = run(tmp_path).stdout
    assert "raised OutOfData: epoch 3 is empty, at train.py:88 load_batch." in shown.replace("\n", " ")
    assert "Where rank 1 raised, innermost first\n  /lib/python3.11/json/decoder.py:3 decode\n" in shown


def test_a_job_that_ended_well(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, [*beats(20, 41), ended("destroyed", 20.5)])
    attempt = last(tmp_path)
    assert (attempt["ended_well"], attempt["first_failure"], attempt["verdict"]) == (True, None, None)
    assert "All ranks ended well (ranks 0-3 destroyed)." in run(tmp_path).stdout


def test_of_an_exit_nobody_knows_whether_it_was_a_good_end(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [*beats(20, 41), ended("exit" if rank else "destroyed", 20.5)])
    attempt = last(tmp_path)
    assert (attempt["ended_well"], attempt["status_unknown"], attempt["first_failure"]) == (True, True, None)
    shown = run(tmp_path).stdout.replace("\n", " ")
    assert "ended well" not in shown
    assert "No failure was recorded (rank 0 destroyed; rank 1 exit). With which status an exit was" in shown


def test_a_job_that_still_runs_or_was_killed_as_a_whole_has_a_status_of_its_own(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, beats(20 + rank % 2, 41))
    attempt = last(tmp_path, code=3)
    assert "Nothing that failed was found" in attempt["what_happened"]
    assert {rank["ended"] for rank in attempt["ranks"]} == {"no end recorded"}


def test_hosts_whose_logs_are_missing_are_said(tmp_path: Path) -> None:
    write(
        tmp_path,
        0,
        [*beats(40, 42, since=4), stated(state_of(0, 42, 15, since=4), "stall"), ended("signal:SIGTERM", 40)],
    )
    write(tmp_path, 1, [*beats(40, 42, since=4), ended("signal:SIGTERM", 40)])
    attempt = last(tmp_path)
    assert (attempt["ranks_found"], attempt["ranks_missing"]) == ("0-1", "2-3")
    assert "There are no logs of ranks 2-3." in attempt["what_happened"]
    assert "of ranks 2-3 there is no log" in attempt["verdict"]["message"]


def test_of_two_attempts_the_last_is_told_unless_another_is_asked_for(killed: Path) -> None:
    for rank in range(4):
        shifted = [{**one, "ts": one["ts"] + 60 * SECOND} for one in [*beats(5, 3), ended("destroyed", 5)]]
        write(killed, rank, shifted, incarnation="20260921T141420Z-00000002", start=60)
    assert last(killed)["ended_well"]
    assert last(killed, "--attempt", 1)["verdict"]["ranks"] == [1]
    both = diagnosis(killed, "--attempt", "all")["attempts"]
    assert [(one["number"], one["ended_well"]) for one in both] == [(1, False), (2, True)]
    assert run(killed, "--attempt", 3).exit_code == 2
    assert run(killed, "--job", 77).exit_code == 2


def test_a_log_that_is_cut_short_is_read_as_far_as_it_goes(killed: Path) -> None:
    path = next(killed.rglob("rank-00003.jsonl"))
    path.write_bytes(path.read_bytes()[:-20])
    data = diagnosis(killed)
    assert data["attempts"][0]["verdict"]["ranks"] == [1]
    assert any("cut short" in note for note in data["notes"])


def test_of_two_hosts_with_the_same_rank_the_longer_log_is_used(killed: Path) -> None:
    write(killed / "copy of host c", 0, beats(3), host="host-c")
    data = diagnosis(killed)
    assert data["attempts"][0]["verdict"]["ranks"] == [1]
    assert any("of the logs of rank 0" in note and "host-a" in note for note in data["notes"])


@pytest.mark.parametrize(("name", "code"), [("nothing there", 2), ("empty", 1), ("file", 2)])
def test_a_directory_without_run_logs_is_said(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    result = run(tmp_path / name)
    assert (result.exit_code, name in result.output) == (code, True)
    assert "Traceback" not in result.output


def issued(number: int, name: str = "all_reduce", retired: bool = True, shape: tuple[int, ...] = (4,)) -> Record:
    return {
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{name}", "time_created_ns": at(1 + number / 10),
        "input_sizes": [list(shape)], "input_dtypes": ["Float"], "state": "completed" if retired else "scheduled",
        "time_discovered_completed_ns": at(2) if retired else 0, "retired": retired, "is_p2p": False,
    }  # fmt: skip


def dump(root: Path, rank: int, *entries: Record, name: str = "nccl_trace_rank_{}", pickled: bool = False) -> Path:
    said = {"version": "2.10", "pg_status": {}, "entries": list(entries)}
    path = root / name.format(rank)
    path.write_bytes(pickle.dumps(said, protocol=2) if pickled else json.dumps(said, indent=1).encode())
    return path


@pytest.mark.parametrize("pickled", [False, True])
def test_dumps_of_torchs_flight_recorder_that_agree(killed: Path, pickled: bool) -> None:
    for rank in (0, 2, 3):
        dump(killed, rank, issued(41), issued(42, retired=False), pickled=pickled)
    dump(killed, 1, issued(41), name="fr_trace_{}.json")
    data = diagnosis(killed)
    said = data["attempts"][0]["flight_recorder"]
    assert (said["agrees"], said["ranks"]) == (True, [0, 1, 2, 3])
    assert said["message"] == (
        "torch's flight recorder of ranks 0-3 agrees: all_reduce 42 of group 0 never completed on ranks 0, 2-3; "
        "rank 1 never issued it"
    )
    assert data["notes"] == []
    assert said["message"] in " ".join(run(killed).stdout.split())


def test_dumps_that_do_not_agree(killed: Path) -> None:
    for rank in (0, 1, 2):
        dump(killed, rank, issued(41), issued(42, retired=False))
    dump(killed, 3, issued(41))
    said = last(killed)["flight_recorder"]
    assert said["agrees"] is False
    assert (
        "does not agree: all_reduce 42 of group 0 never completed on ranks 0-2; rank 3 never issued it"
        in said["message"]
    )


def test_dumps_of_other_operations_are_told(killed: Path) -> None:
    for rank in (0, 2, 3):
        dump(killed, rank, issued(41), issued(42, retired=False))
    dump(killed, 1, issued(41), issued(42, "broadcast", retired=False))
    said = last(killed)["flight_recorder"]
    assert said["agrees"] is False, "a killed rank is another thing than one that makes another call"
    assert "rank 1 issued broadcast of shape [4] instead" in said["message"]


def test_a_dump_with_an_absurd_number_takes_no_longer(killed: Path) -> None:
    for rank in (0, 2, 3):
        dump(killed, rank, issued(41), issued(42, retired=False) | {"collective_seq_id": 10**30})
    dump(killed, 1, issued(41))
    said = last(killed)["flight_recorder"]
    assert (said["agrees"], f"all_reduce {10**30} of group 0 never completed" in said["message"]) == (True, True)


def test_dumps_in_which_all_is_over_do_not_agree(killed: Path) -> None:
    dump(killed, 0, issued(41), issued(42))
    said = last(killed)["flight_recorder"]
    assert (said["agrees"], "knows of no collective" in said["message"]) == (False, True)


def test_dumps_without_a_verdict_are_told_as_they_are(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, beats(20))
        dump(tmp_path, rank, issued(41), *([issued(42, retired=False)] if rank else []))
    said = last(tmp_path, code=3)["flight_recorder"]
    assert (said["agrees"], said["message"]) == (
        None,
        "torch's flight recorder of ranks 0-3: all_reduce 42 of group 0 never completed on ranks 1-3; "
        "rank 0 never issued it",
    )


def told(kind: str, ranks: list[int]) -> Record:
    return {"kind": kind, "ranks": ranks, "tags": {"stall.group_name": "0", "stall.op": "all_reduce", "stall.key": 42}}


WAITS = [entry_of(issued(41)), entry_of(issued(42, retired=False))]
NOT_COME = WAITS[:1]
ODD = [*NOT_COME, entry_of(issued(42, retired=False, shape=(5,)))]


@pytest.mark.parametrize(
    ("kind", "ranks", "last_rank", "agrees"),
    [
        ("stuck", [0, 1, 2], WAITS, True),
        ("stuck", [0, 1, 2], NOT_COME, False),
        ("mismatch", [2], ODD, True),
        ("mismatch", [2], WAITS, False),
        ("mismatch", [1], ODD, False),
        ("absent", [2], NOT_COME, True),
        ("absent", [2], ODD, False),
        ("gone", [3], WAITS, True),
    ],
)
def test_what_agrees_with_which_kind(kind: str, ranks: list[int], last_rank: list[Entry], agrees: bool) -> None:
    found = compare({0: WAITS, 1: WAITS, 2: last_rank}, told(kind, ranks))
    assert found is not None
    assert found.agrees is agrees, found.message


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3), ("comm_lib_trace_rank_12", 12), ("fr_trace_0.json", 0), ("nccl3", 3),
        ("job_nccl_trace_7.pickle", 7), ("rank-0.pt.trace.json", None), ("trace_0.json", None), ("rank_3", None),
        ("nccl_trace_rank_", None),
    ],
)  # fmt: skip
def test_names_of_dumps(name: str, rank: int | None) -> None:
    assert is_dump(name) is (rank is not None)
    if rank is not None:
        assert rank_of(f"/logs/{name}") == rank


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made by a pickle",)


ODD_SHAPE = json.dumps({"entries": [{**issued(42, retired=False), "input_sizes": [[[4]]], "input_dtypes": ["?"]}]})


@pytest.mark.parametrize(
    "junk",
    [pickle.dumps({"entries": Evil()}), ODD_SHAPE.encode(), b"\x80\x02}", b"{}", b"[1]", b"\xff", b""],
)
def test_what_is_no_dump_is_noted_and_no_pickle_runs_anything(
    killed: Path, monkeypatch: pytest.MonkeyPatch, junk: bytes
) -> None:
    monkeypatch.chdir(killed)
    (killed / "nccl_trace_rank_0").write_bytes(junk)
    data = diagnosis(killed)
    assert data["attempts"][0]["flight_recorder"] is None
    assert any("nccl_trace_rank_0 could not be read" in note for note in data["notes"])
    assert not (killed / "made by a pickle").exists()


def test_dumps_of_another_attempt_are_left_alone(killed: Path) -> None:
    dump(killed, 0, {**issued(42, retired=False), "time_created_ns": at(-3600)})
    assert last(killed)["flight_recorder"] is None


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A state directory with the last words of rank 1, which is dead."""
    leave_last_words(tmp_path / "state", 1, tmp_path, pid=101, incarnation=INCARNATION)
    return tmp_path / "state"


def test_what_a_dead_rank_left_on_this_host_is_read_before_anybody_recovers_it(tmp_path: Path, left: Path) -> None:
    logs = tmp_path / "logs"
    for rank in (0, 2, 3):
        write(logs, rank, [*beats(20, 42, since=18), ended("signal:SIGTERM", 20.3)])
    write(logs, 1, beats(20, 41), host=os.uname().nodename)
    result = CliRunner().invoke(cli, ["diagnose", str(logs)], env={"DD_PYTORCH_STATE_DIR": str(left), "COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "rank 1 on" in result.stdout
    assert "killed (SIGKILL" in " ".join(result.stdout.split())
    assert "train.py:24 load" in result.stdout
    assert list(left.rglob("*.state")), "it stays for those who tell it"


def test_who_tells_of_a_dead_rank_adds_its_last_state_to_the_log(tmp_path: Path, left: Path) -> None:
    logs = tmp_path / "logs"
    write(logs, 1, beats(20, 41), host=os.uname().nodename)
    teller = Teller(replace(load({}), export="local"), str(logs))
    assert [one.fate for one in recover(places.roots(str(left)), teller)] == [Fate.TOLD]
    added = [one for one in records(logs) if "seg-00001" in one["_file"]]
    assert [one["type"] for one in added] == ["identity", "state", "span"]
    assert (added[1]["why"], added[1]["state"]["frames"]) == ("killed", ["/job/train.py:24 load"])
    assert added[1]["ts"] == at(20)


def test_a_thousand_ranks_take_seconds_and_few_lines(tmp_path: Path) -> None:
    folder = Path(log_directory(str(tmp_path), "4242", INCARNATION))
    many = b"".join(map(encode, beats(600, 42, since=580)))
    fewer = b"".join(map(encode, beats(590, 41)))
    for rank in range(1024):
        path = write(folder.parent.parent, rank, (), world=1024, host=f"host-{rank // 8}")
        with open(path, "ab") as file:
            file.write(fewer if rank == 77 else many)
    began = time.process_time()
    result = run(tmp_path)
    assert time.process_time() - began < 20
    assert result.exit_code == 0, result.output
    assert "rank 77 on host-9 (GPU-77)" in result.stdout
    assert "ranks 0-76, 78-1023 wait" in result.stdout
    assert len(result.stdout.splitlines()) < 40
