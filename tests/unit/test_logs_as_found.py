"""Each command on a directory as accidents leave it: what is there is read, and what was skipped is said."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from harness.dead import leave_last_words
from harness.story import BROKEN, Record, at, beats, ended
from harness.trace_events import checked

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.cli.output import in_json
from ddtrace_pytorch.runlog.schema import SegmentName, encode
from ddtrace_pytorch.stalls.roll import Call, GroupState, Raised, RankState

COMMANDS = ("report", "timeline", "diagnose", "recover")
HERE = os.uname().nodename


def lines(rank: int, told: Iterable[Record], **who: object) -> bytes:
    job = {"id": who.pop("job", "4242"), "incarnation": who.pop("incarnation", "aaa"), "source": "SLURM_JOB_ID"}
    identity = {
        "type": "identity", "ts": at(0), "schema": 1, "rank": rank, "world_size": 9, "host": HERE, "pid": 100 + rank,
        "job": job, **who,
    }  # fmt: skip
    return b"".join(map(encode, (identity, *told)))


def run(command: str, logs: Path, state: Path, cwd: Path) -> Result:
    output = ("-o", str(cwd / "out.json")) if command == "timeline" else ()
    env = {
        "COLUMNS": "300", "DD_PYTORCH_STATE_DIR": str(state), "DD_PYTORCH_EXPORT": "local",
        "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
    }  # fmt: skip
    return CliRunner().invoke(cli, [command, str(logs), *output], env=env)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


WELL = [*beats(20, 41), ended("destroyed", 20.3)]


def as_found(logs: Path) -> None:
    """Rank 7 is missing, rank 1 was killed, and rank 8 looks as if."""
    run_folder = logs / "4242" / "aaa"
    elsewhere = logs / "copied from b" / "4242" / "aaa"
    run_folder.mkdir(parents=True)
    elsewhere.mkdir(parents=True)

    def put(name: SegmentName, data: bytes, folder: Path = run_folder) -> None:
        (folder / str(name)).write_bytes(gzip.compress(data) if name.compressed else data)

    put(SegmentName(0, 0, 0), lines(0, WELL) + b'{"type":"beat","ts":17')
    put(SegmentName(1, 0, 0), lines(1, beats(20, 41, since=20)))
    put(SegmentName(2, 0, 0), b"")
    put(SegmentName(3, 0, 0, compressed=True), lines(3, beats(10, 20), segment=0))
    put(SegmentName(3, 0, 1), lines(3, WELL[11:], segment=1))
    put(SegmentName(4, 0, 0), lines(4, WELL, schema=9) + b'{"type":"hologram","ts":1,"x":[1]}\n')
    put(SegmentName(5, 0, 0), lines(5, beats(3, 1), job="of another job", incarnation="zzz", ts=at(-1000)))
    for folder, host in ((run_folder, HERE), (elsewhere, "b")):
        put(SegmentName(6, 0, 0), lines(6, WELL, host=host), folder)
    put(SegmentName(8, 0, 0, compressed=True), lines(8, WELL))
    cut = run_folder / str(SegmentName(8, 0, 0, compressed=True))
    cut.write_bytes(cut.read_bytes()[:-40])
    (run_folder / "core.4711").write_bytes(b"\x7fELF")
    (run_folder / "link").symlink_to("/etc")


SKIPPED = (
    "rank-00002.jsonl is empty",
    "rank 6 of 4242 (aaa) was written by 2 processes",
    "wrote schema 9, newer than the 1 known here",
    "skipped 1 file that is no run log (core.4711)",
    "skipped 1 symbolic link (link)",
)
# What is found only by reading a log to its end.
AT_THE_END = ("skipped the last line of aaa/rank-00000.jsonl, which is cut short", "rank-00008.jsonl.gz is cut short")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_there_is_read_and_what_was_skipped_is_said(tmp_path: Path, command: str) -> None:
    logs, state, cwd = tmp_path / "logs", tmp_path / "state", tmp_path / "cwd"
    cwd.mkdir()
    as_found(logs)
    leave_last_words(state, 1, logs, pid=101)
    before = files(tmp_path)

    result = run(command, logs, state, cwd)

    assert result.exit_code == 0, result.output + repr(result.exception)
    said = result.stdout
    for note in (*SKIPPED, *(AT_THE_END if command != "recover" else ())):
        assert note in said, said
    if command == "report":
        assert "Ranks        0-1, 3-4, 6, 8 of 9; missing: 2, 5, 7" in said
    elif command == "timeline":
        assert "7 processes, " in said
    elif command == "diagnose":
        assert "There are no logs of ranks 2, 5, 7." in said
        assert f"ranks 1, 8 on {HERE}: killed" in said
    else:
        assert said.count("told") == 1

    after = files(tmp_path)
    assert {name: after.get(name) for name in before if name.startswith("logs")} == {
        name: data for name, data in before.items() if name.startswith("logs")
    }
    made = {"timeline": {"cwd/out.json"}, "recover": {"logs/4242/aaa/rank-00001.seg-00001.jsonl"}}.get(command, set())
    assert after.keys() - before.keys() == made


@pytest.mark.parametrize("command", ["report", "timeline", "diagnose"])
@pytest.mark.parametrize("data", [b"", b"\x1f\x8b\x08", b"\x00" * 1000, b"[1, 2]\n" * 10])
def test_only_where_nothing_can_be_read_it_fails(tmp_path: Path, command: str, data: bytes) -> None:
    (tmp_path / "rank-00000.jsonl").write_bytes(data)
    (tmp_path / "rank-00001.jsonl.gz").write_bytes(data)
    result = run(command, tmp_path, tmp_path / "state", tmp_path)
    assert result.exit_code == 1
    assert "none of the 2 run log(s)" in result.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("command", ["report", "timeline", "diagnose"])
def test_of_rank_0_alone_that_much_is_told(tmp_path: Path, command: str) -> None:
    (tmp_path / "rank-00000.jsonl").write_bytes(lines(0, [*WELL, call(1, 5.0), call(2, 6.0)]))
    result = run(command, tmp_path, tmp_path / "state", tmp_path)
    assert result.exit_code == 0, result.output + repr(result.exception)
    told = {
        "report": "Ranks        0 of 9; missing: 1-8",
        "timeline": "1 process, 25 records drawn of 25, 0 collectives joined",
        "diagnose": "All ranks ended well",
    }
    assert told[command] in result.stdout


def call(key: int, start: float) -> Record:
    return {
        "type": "call", "ts": at(start + 0.5), "op": "all_reduce", "group": "0", "key": key, "start": at(start),
        "duration": at(start + 0.5) - at(start), "bytes": 16, "source": "completion",
    }  # fmt: skip


def test_attempts_in_one_folder_are_told_apart_and_left_as_they_are(tmp_path: Path) -> None:
    """Both have the same groups and numbers; of the first, rank 1 was killed before its second call."""
    logs, state, cwd = tmp_path / "logs", tmp_path / "state", tmp_path / "cwd"
    cwd.mkdir()
    for incarnation, began in (("aaa", 0.0), ("bbb", 100.0)):
        for rank in (0, 1):
            dead = incarnation == "aaa" and rank == 1
            calls = [call(key, began + 5 * key) for key in ((1,) if dead else (1, 2))]
            end = [] if dead else [ended("destroyed" if began else "signal:SIGTERM", began + 20)]
            folder = logs / "4242" / incarnation
            folder.mkdir(parents=True, exist_ok=True)
            data = lines(rank, [*calls, *end], incarnation=incarnation, world_size=2, ts=at(began))
            (folder / f"rank-{rank:05}.jsonl").write_bytes(data)
    before = files(logs)

    said = {command: run(command, logs, state, cwd).stdout for command in ("report", "timeline", "diagnose")}
    assert "Incarnation  bbb" in said["report"]
    assert "Attempt 1\n" not in said["report"]
    assert "2 processes, 8 records drawn of 8, 2 collectives joined" in said["timeline"]
    assert "Attempt 2, incarnation bbb\nAll ranks ended well" in said["diagnose"]
    all_of_it = CliRunner().invoke(cli, ["timeline", str(logs), "-o", str(cwd / "out.json"), "--attempt", "all"]).stdout
    assert "4 processes, 14 records drawn of 14, 3 collectives joined" in all_of_it.replace("\n", " ")
    flows: dict[int, set[int]] = {}
    for event in json.loads((cwd / "out.json").read_bytes())["traceEvents"]:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], set()).add(event["pid"])
    assert sorted(map(sorted, flows.values())) == [[1, 2], [3, 4], [3, 4]]
    assert files(logs) == before


HOSTILE = "../../../escaped/\x1b[31m<script>alert(1)</script>\n\x00"


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_in_a_log_writes_outside_of_the_output(tmp_path: Path, command: str) -> None:
    logs, state, cwd = tmp_path / "deep" / "in" / "logs", tmp_path / "state", tmp_path / "deep" / "cwd"
    logs.mkdir(parents=True)
    cwd.mkdir()
    names = [{**one, "name": HOSTILE, "resource": HOSTILE, "tags": {HOSTILE: HOSTILE}} for one in WELL]
    for rank in (0, 1):
        data = lines(rank, [*names, *WELL], job=HOSTILE, incarnation=HOSTILE, source=HOSTILE, node=HOSTILE)
        (logs / f"rank-{rank:05}.jsonl").write_bytes(data)
    leave_last_words(state, 1, logs, pid=101, job=HOSTILE, incarnation=HOSTILE)
    before = files(tmp_path)

    result = run(command, logs, state, cwd)

    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "\x1b" not in result.output
    assert "\x00" not in result.output
    made = {"timeline": {"deep/cwd/out.json"}, "recover": {"deep/in/logs/rank-00001.seg-00001.jsonl"}}
    after = files(tmp_path)
    assert after.keys() - before.keys() == made.get(command, set())
    assert all(after[name] == data for name, data in before.items() if name in after)


STATE = RankState(
    rank=1, host=HERE, frames=("train.py:8 step",), as_of=at(15), step=3,
    groups={"0": GroupState("0", "world", (0, 1), "gloo", entered=42, completed=41, current=Call("all_reduce", 42))},
    raised=Raised("0", Call("all_reduce", 42, shape=(2,)), "RuntimeError: no", at(15)),
)  # fmt: skip
ODD: tuple[object, ...] = (None, 1 << 70, 10**400, math.inf, "odd", [None], {"0": None})


def replaced(told: Any, by: object) -> Iterator[Any]:
    """`told` with one part after the other, at any depth, `by` something else."""
    yield by
    parts = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    for name, part in parts:
        for other in replaced(part, by):
            yield {**told, name: other} if isinstance(told, dict) else [*told[:name], other, *told[name + 1 :]]


@pytest.mark.parametrize(
    "command", ["report", "report --json", "report --html -", "timeline -o -", "diagnose", "diagnose --json"]
)
def test_whatever_type_and_size_the_parts_of_records_are_of_the_rest_is_told(tmp_path: Path, command: str) -> None:
    state = {"type": "state", "ts": at(15), "why": "raised", "state": STATE.plain()}
    verdict = {
        "type": "verdict", "ts": at(15), "kind": "absent", "ranks": [1], "group": "world", "op": "all_reduce",
        "key": 42, "waiting": [0], "message": "rank 1",
        "culprits": [{"rank": 1, "kind": "absent", "frames": ["train.py:8 step"]}],
    }  # fmt: skip
    step = {"type": "step", "ts": at(15), "step": 3, "start": at(14), "duration": 10**9, "metrics": {"data_ns": 5}}
    span = {"type": "user_span", "ts": at(15), "name": "mine", "start": at(14), "duration": 10**9, "step": 3, "seq": 1}
    told = [state, verdict, step, span, call(42, 14), beats(16, 42, 15)[-1], ended("exception", 20.3, BROKEN)]
    for number, odd in enumerate(ODD):
        logs = tmp_path / str(number)
        logs.mkdir()
        (logs / "rank-00000.jsonl").write_bytes(lines(0, WELL))
        # As another writer than ours might have it, who knows numbers that JSON has not.
        others = (json.dumps(one).encode() for record in told for one in replaced(record, odd))
        for rank, line in enumerate(others, 1):
            (logs / f"rank-{rank:05}.jsonl").write_bytes(lines(rank, beats(12)) + line + b"\n")
        name, *options = command.split()
        result = CliRunner().invoke(cli, [name, str(logs), *options], env={"COLUMNS": "300"})
        assert result.exit_code == 0, (odd, result.output[-500:], result.exception)
        if command.endswith("--json"):
            json.loads(result.stdout, parse_constant=pytest.fail)


def test_json_for_programs_has_no_number_that_is_not_finite() -> None:
    found = json.loads(in_json({"odd": [math.inf, -math.inf, math.nan, 1.5]}), parse_constant=pytest.fail)
    assert found == {"odd": ["Infinity", "-Infinity", "NaN", 1.5]}


@pytest.mark.parametrize("command", ["report", "report --html -", "timeline -o - --every 1"])
def test_a_log_may_grow_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Each time a log has been gone through, all of them have more in them, at last half a record."""
    folder = tmp_path / "4242" / "aaa"
    folder.mkdir(parents=True)
    for rank in range(3):
        (folder / f"rank-{rank:05}.jsonl").write_bytes(lines(rank, [*beats(20, 41), call(1, 5.0)], host=f"host{rank}"))
    times = 0

    def grow(what: str, done: int, of: int) -> None:
        nonlocal times
        times += 1
        for rank in range(3):
            more = [call(times + 1, 6.0 + times), *beats(20 + times, 41, since=20)]
            span = {"type": "user_span", "ts": at(30 - times), "name": "late", "start": at(9), "duration": 10**9}
            step = {"type": "step", "ts": at(30), "step": times, "start": at(9), "duration": 10**9, "metrics": {}}
            data = b"".join(map(encode, [*more, span, step, call(times + 1, 60.0)]))
            with (folder / f"rank-{rank:05}.jsonl").open("ab") as file:
                file.write(b'":1}\n' * (times > 1) + data + b'{"type":"event","ts":17,"name":"x","y')
        (folder / f"rank-{2 + times:05}.jsonl").write_bytes(lines(2 + times, WELL))

    @contextmanager
    def bar() -> Iterator[Callable[[str, int, int], None]]:
        yield grow

    for module in ("report", "timeline"):
        monkeypatch.setattr(f"ddtrace_pytorch.cli.{module}.progress_bar", bar)
    name, *options = command.split()
    result = CliRunner().invoke(cli, [name, str(tmp_path), *options], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output[-500:] + repr(result.exception)
    assert times >= 3
    if name == "timeline":
        events = checked(result.stdout_bytes)
        assert len([one for one in events if one["name"] == "process_name"]) == 3
        assert re.search(r"3 processes, (\d+) records drawn of \1,", result.stderr)
        assert "skipped the last line" in result.stderr
