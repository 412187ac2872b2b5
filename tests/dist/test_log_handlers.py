"""Users' handlers of the run log's records: what they get, and that a bad one harms nobody."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from harness.job import PYTHON, Jobs, alone
from harness.log import records

pytestmark = pytest.mark.dist

# In a module of the user's, beside the script.
MINE = """
    import json, os, sys, threading, time

    class Keeper:
        def __init__(self, identity):
            self.out = open(os.environ["KEPT"], "a")
            self.out.write(json.dumps({"made": identity["rank"], "with": identity["type"]}) + "\\n")

        def __call__(self, record):
            self.out.write(json.dumps(record | {"thread": threading.current_thread().name}) + "\\n")
            record.clear()  # it is the handler's own

        def close(self):
            self.out.write(json.dumps({"closed": True}) + "\\n")
            self.out.close()

    class Place:
        keeper = Keeper

    def failing(identity):
        def handle(record):
            raise ValueError("no")
        return handle

    def leaving(identity):
        return lambda record: sys.exit(3)

    def echoing(identity):
        from ddtrace_pytorch import event
        return lambda record: event("echo")

    def slow(identity):
        def handle(record):
            print(record["type"], flush=True)
            time.sleep(3600)
        return handle

    def nothing(identity):
        return None

    def broken(identity):
        raise OSError("no database")
"""

SCRIPT = """
    import torch, torch.distributed as dist
    import ddtrace_pytorch
    from ddtrace_pytorch import event, scalar, span
    ddtrace_pytorch.patch()
    dist.init_process_group("gloo")
    for number in range(20):
        event("mine", number=number)
    scalar({"loss": float("nan")})
    dist.destroy_process_group()
"""


def run(jobs: Jobs, log: Path, handlers: str, script: str = SCRIPT, **settings: str) -> tuple[list[Any], str, float]:
    """What the keeper has kept, what was said on stderr, and how many seconds it took."""
    jobs.script(MINE, "mine.py")
    kept = log.parent / "kept"
    env = alone(
        log, DD_PYTORCH_LOG_HANDLERS=handlers, PYTHONPATH=f"{jobs.directory}:{_path()}", KEPT=str(kept)
    )
    result = jobs.run([*PYTHON, jobs.script(textwrap.dedent(script))], env | settings).ok()
    lines = kept.read_text().splitlines() if kept.exists() else []
    return [json.loads(line) for line in lines], result.stderr, result.seconds


def _path() -> str:
    import os

    return os.environ.get("PYTHONPATH", "")


@pytest.mark.parametrize("path", ["mine:Keeper", "mine.Keeper", "mine:Place.keeper"])
def test_a_handler_gets_every_record_of_the_run_log(jobs: Jobs, tmp_path: Path, path: str) -> None:
    kept, _, _ = run(jobs, tmp_path / "log", path)
    written = [{name: value for name, value in one.items() if name != "_file"} for one in records(tmp_path / "log")]
    assert kept[0] == {"made": 0, "with": "identity"}
    assert kept[-1] == {"closed": True}
    handed = kept[1:-1]
    assert handed[0]["type"] == "identity"
    assert {one.get("thread") for one in handed} == {"ddtrace_pytorch.handlers"}
    for one in handed:
        one.pop("thread")
    for one in written:
        one.pop("thread", None)

    def told(some: list[Any]) -> list[str]:
        # But for the first, which each has as it is when it begins.
        return [json.dumps(one, sort_keys=True) for one in some if one["type"] != "identity"]

    # NaN is a number for a handler, and a word in JSON.
    assert [line.replace('": NaN', '": "NaN"') for line in told(handed)] == told(written)


@pytest.mark.parametrize("settings", [{"DD_PYTORCH_LOG_RANKS": "1"}, {"DD_PYTORCH_EXPORT": "agent"}])
def test_a_handler_gets_them_where_there_is_no_run_log(jobs: Jobs, tmp_path: Path, settings: dict[str, str]) -> None:
    kept, _, _ = run(jobs, tmp_path / "log", "mine:Keeper", **settings)
    assert records(tmp_path / "log") == []
    assert sum(one.get("name") == "mine" for one in kept) == 20


def test_one_that_fails_is_told_of_and_called_no_more_and_the_others_go_on(jobs: Jobs, tmp_path: Path) -> None:
    kept, said, _ = run(jobs, tmp_path / "log", "mine:failing,mine:leaving, mine:Keeper")
    assert sum(one.get("name") == "mine" for one in kept) == 20
    for name, why in {"failing": "ValueError: no", "leaving": "RuntimeError: it raised SystemExit: 3"}.items():
        assert said.count(f"could not hand a record to mine:{name}; training goes on without it ({why})") == 1
        assert said.count(f"the handler mine:{name} failed 10 times in a row and is called no more") == 1


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("mine:missing", "has no attribute 'missing'"),
        ("nowhere.at_all:factory", "No module named 'nowhere'"),
        ("mine:nothing", "it gave NoneType, which can't be called"),
        ("mine:broken", "OSError: no database"),
        ("justaword", "it has not the form package.module:factory"),
    ],
)
def test_one_that_is_not_to_be_had_costs_one_warning_with_its_path(
    jobs: Jobs, tmp_path: Path, path: str, why: str
) -> None:
    kept, said, _ = run(jobs, tmp_path / "log", f"{path},mine:Keeper")
    assert sum(one.get("name") == "mine" for one in kept) == 20
    (line,) = [line for line in said.splitlines() if "DD_PYTORCH_LOG_HANDLERS" in line]
    assert f"{path} is left out: " in line
    assert why in line


def test_what_a_handler_records_does_not_come_back_to_it(jobs: Jobs, tmp_path: Path) -> None:
    kept, _, _ = run(jobs, tmp_path / "log", "mine:echoing,mine:Keeper")
    assert sum(one.get("name") == "mine" for one in kept) == 20
    assert not [one for one in kept if one.get("name") == "echo"]


def test_one_that_hangs_holds_up_neither_the_run_log_nor_the_end(jobs: Jobs, tmp_path: Path) -> None:
    _, said, _ = run(jobs, tmp_path / "log", "mine:slow")
    assert sum(one.get("name") == "mine" for one in records(tmp_path / "log")) == 20
    # All but the identity record, in which it hangs.
    assert f"{len(records(tmp_path / 'log')) - 1} records came too late for the handlers" in said


def test_what_was_too_much_for_a_handler_is_counted(jobs: Jobs, tmp_path: Path) -> None:
    script = """
        import threading
        from ddtrace_pytorch import handlers
        from ddtrace_pytorch.runlog.writer import RunLogQueue
        handlers.RunLogQueue = lambda: RunLogQueue(limit_records=10)
    """
    kept, _, _ = run(jobs, tmp_path / "log", "mine:Keeper", textwrap.dedent(script) + textwrap.dedent(SCRIPT))
    handed = [one for one in kept if "type" in one and one["type"] not in ("identity", "drop")]
    dropped = sum(one["count"] for one in kept if one.get("type") == "drop")
    written = [one for one in records(tmp_path / "log") if one["type"] != "identity"]
    further = len([one for one in records(tmp_path / "log") if one["type"] == "identity"]) - 1
    assert dropped > 0
    assert {one["reason"] for one in kept if one.get("type") == "drop"} == {"handlers too slow"}
    assert len(written) <= len(handed) + dropped <= len(written) + further
