"""Which ranks `ddtrace-pytorch recover` takes up, and where it adds what it tells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from harness.dead import leave_last_words, live
from harness.disk import fill, small_disk
from harness.story import at, beats

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.runlog.schema import encode

pytestmark = pytest.mark.once


class Here:
    """A host of jobs, each of which is two ranks; rank 1 was killed."""

    def __init__(self, root: Path) -> None:
        self.root, self.state = root, root / "state"

    def job_dies(self, job: str, logs: Path | None, log_root: Path | None = None) -> None:
        """Of `job`, whose run logs are in `logs` now (None: nowhere any more) and were in `log_root`."""
        leave_last_words(self.state, 1, log_root or logs or self.root / "gone", pid=101, job=job)
        if logs is not None:
            self.log(job, 1, logs)

    def log(self, job: str, rank: int, logs: Path) -> None:
        folder = logs / job / "aaa"
        folder.mkdir(parents=True, exist_ok=True)
        identity = {
            "type": "identity", "ts": at(0), "schema": 1, "rank": rank, "world_size": 2, "host": os.uname().nodename,
            "pid": 100 + rank, "job": {"id": job, "incarnation": "aaa", "source": "SLURM_JOB_ID"},
        }  # fmt: skip
        (folder / f"rank-{rank:05d}.jsonl").write_bytes(b"".join(map(encode, (identity, *beats(20, 41)))))

    def recover(self, *arguments: str | Path) -> Result:
        env = {
            "COLUMNS": "300", "DD_PYTORCH_STATE_DIR": str(self.state), "DD_PYTORCH_EXPORT": "local",
            "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
        }  # fmt: skip
        return CliRunner().invoke(cli, ["recover", *map(str, arguments)], env=env)

    def left(self) -> set[str]:
        return {path.parent.parent.name for path in self.state.rglob("*.state")}

    def added(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("rank-*.seg-00001.jsonl")}


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def test_where_the_directory_has_no_log_of_a_rank_it_is_added_to_where_that_had_it(here: Here, tmp_path: Path) -> None:
    here.job_dies("night", tmp_path / "own")
    here.log("night", 0, tmp_path / "copied")
    result = here.recover(tmp_path / "copied")
    assert (result.exit_code, here.left()) == (0, set()), result.output
    assert here.added() == {"own/night/aaa/rank-00001.seg-00001.jsonl"}


def test_a_directory_means_the_jobs_whose_logs_are_in_it(here: Here, tmp_path: Path) -> None:
    here.job_dies("night", tmp_path / "moved", log_root=tmp_path / "before")
    here.job_dies("old", None)
    here.job_dies("other", tmp_path / "others")

    result = here.recover(tmp_path / "moved")
    assert (result.exit_code, here.left()) == (0, {"old", "other"}), result.output
    assert "Job night" in result.output
    assert "Job o" not in result.output
    assert "2 ranks of other jobs" in result.output
    again = here.recover(tmp_path / "moved")
    assert again.exit_code == 0
    assert f"No rank of a job in {tmp_path / 'moved'} has left anything behind here" in again.output

    everything = here.recover("--all")
    assert (everything.exit_code, here.left()) == (1, {"old"}), everything.output
    assert "1 not told" in everything.output
    assert "--forget" in everything.output
    assert here.added() == {
        f"{logs}/{job}/aaa/rank-00001.seg-00001.jsonl" for logs, job in (("moved", "night"), ("others", "other"))
    }


def test_of_several_jobs_none_is_taken_until_one_is_named(here: Here, tmp_path: Path) -> None:
    here.job_dies("night", tmp_path / "logs")
    here.job_dies("day", None)
    alive = live(here.state, 0, tmp_path / "logs", job="night")
    other = live(here.state, 0, tmp_path / "logs", job="evening")
    try:
        for option in ((), ("--forget",)):
            result = here.recover(*option)
            assert (result.exit_code, here.left()) == (2, {"night", "day", "evening"}), result.output
            assert here.added() == set()
            rows = {row[0]: row[1:] for line in result.stdout.splitlines() if (row := line.split())}
            assert rows["night"] == ["aaa", "1", "1", *rows["night"][3:5], str(tmp_path / "logs" / "night")]
            assert rows["day"] == ["aaa", "1", "0", *rows["day"][3:5], "none", "found"]
            assert "evening" not in rows, "there is nothing to tell of it"
            assert "2 jobs" in result.stderr
            assert "--job ID" in result.stderr
            assert "--all" in result.stderr
        assert here.recover("--job", "day", "--forget").exit_code == 0
        one = here.recover()
        assert (one.exit_code, here.left()) == (0, {"night", "evening"}), "only one is left to be told of"
        assert here.added() == {"logs/night/aaa/rank-00001.seg-00001.jsonl"}
        assert "A rank of another job has a state here, too" in one.output
        nothing = here.recover()
        assert (nothing.exit_code, nothing.output.count("lives"), here.left()) == (0, 2, {"night", "evening"})
    finally:
        alive.remove()
        other.remove()


def test_all_attempts_of_the_one_job_are_taken(here: Here, tmp_path: Path) -> None:
    here.job_dies("night", tmp_path / "logs")
    leave_last_words(here.state, 2, tmp_path / "logs", pid=102, job="night", incarnation="bbb")
    result = here.recover("--forget")
    assert (result.exit_code, here.left()) == (0, set()), result.output


@pytest.mark.parametrize("named", [("--job", "night"), (".",)])
def test_all_and_one_of_them_is_a_contradiction(here: Here, tmp_path: Path, named: tuple[str, ...]) -> None:
    here.job_dies("night", tmp_path / "logs")
    result = here.recover("--all", *named)
    assert (result.exit_code, here.left()) == (2, {"night"})
    assert "--all" in result.stderr


def test_a_job_is_meant_by_the_beginning_of_its_id(here: Here, tmp_path: Path) -> None:
    for job in ("night-1", "night-2", "day"):
        here.job_dies(job, tmp_path / "logs")
    both = here.recover("--job", "night")
    assert (both.exit_code, len(here.left())) == (2, 3)
    assert "2 jobs" in both.output
    assert here.recover("--job", "night-1").exit_code == 0
    assert here.recover("--job", "d", tmp_path / "logs").exit_code == 0
    assert here.left() == {"night-2"}
    none = here.recover("--job", "evening")
    assert (none.exit_code, here.left()) == (0, {"night-2"})
    assert "No rank of job evening has left anything behind here" in none.output


def test_what_nobody_takes_is_forgotten_where_that_is_asked_for(here: Here, tmp_path: Path) -> None:
    here.job_dies("old", None)
    here.job_dies("older", None)
    here.job_dies("night", tmp_path / "logs")
    forgotten = here.recover("--forget", "--job", "old")
    assert (forgotten.exit_code, here.left()) == (0, {"older", "night"}), forgotten.output
    assert "forgotten" in forgotten.output
    everything = here.recover("--forget", "--all")
    assert (everything.exit_code, here.left()) == (0, set())
    assert len(here.added()) == 1, "what somebody takes is told all the same"
    assert "No rank has left anything behind here" in here.recover().output


def test_where_the_log_has_no_room_nothing_is_added_and_the_rank_is_kept(here: Here, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        here.job_dies("night", disk)
        filler = fill(disk)
        result = here.recover(disk)
        assert result.exit_code == 1
        assert "no run log of it that could be added to" in result.stderr
        assert (here.left(), here.added()) == ({"night"}, set())
        filler.unlink()
        assert here.recover(disk).exit_code == 0
        assert (here.left(), here.added()) == (set(), {"disk/night/aaa/rank-00001.seg-00001.jsonl"})
