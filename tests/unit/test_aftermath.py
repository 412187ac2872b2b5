"""What a session tells of those before it, and how a dead rank's run log gets its end."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

from ddtrace_pytorch.aftermath import FORGOTTEN_NS, Successor, Teller
from ddtrace_pytorch.runlog.reader import read, scan
from ddtrace_pytorch.runlog.writer import RunLogFile
from ddtrace_pytorch.settings import load
from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.keeper import Keeper
from ddtrace_pytorch.stalls.last_words import Identity, LastWords
from ddtrace_pytorch.stalls.positions import NO_LEGEND
from ddtrace_pytorch.stalls.roll import RankState

LOCAL = load({"DD_PYTORCH_EXPORT": "local"})
SPAN = SpanRecord("pytorch.rank", "rank 0", "pytorch", 2**127, 5, None, 10**18, 9, {}, {"rank": 0})


def whose(log: Path, job: str = "job", incarnation: str = "first") -> Identity:
    return Identity(job, incarnation, 0, 0, 1, "node-a", places.BOOT, str(log))


def dies(root: Path, identity: Identity, as_of: int) -> None:
    """A rank of that identity, with pid 77, that was last seen then."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            state = RankState(0, "node-a", pid=77, as_of=as_of)
            Keeper([str(root)], lambda: state, lambda: SPAN, lambda: NO_LEGEND, lambda memory: None).begin(identity)
        os._exit(0)
    os.waitpid(child, 0)


def write_log(root: Path, job: str, incarnation: str, pid: int) -> Path:
    said = {"ts": 1, "rank": 0, "host": "node-a", "pid": pid, "job": {"id": job, "incarnation": incarnation}}
    file = RunLogFile(str(root / job / incarnation), 0, lambda: said, max_bytes=10**6)
    file.open()
    file.write([{"type": "beat", "ts": 2, "seq": 1}])
    assert file.path is not None
    file.close()
    return Path(file.path)


def kept(root: Path) -> set[str]:
    return {f"{path.parent.parent.name}/{path.parent.name}" for path in root.rglob("*.state")}


def test_a_session_tells_of_its_jobs_earlier_attempts_and_of_nothing_else(tmp_path: Path) -> None:
    root, log = tmp_path / "state", tmp_path / "log"
    now = time.time_ns()
    dies(root, whose(log), now)
    dies(root, whose(log, incarnation="without a log"), now)
    dies(root, whose(log, incarnation="second"), now)
    dies(root, whose(log, job="another"), now)
    dies(root, whose(log, job="another of long ago"), now - 2 * FORGOTTEN_NS)
    written = {one: write_log(log, *one, pid=77) for one in (("job", "first"), ("job", "second"), ("another", "first"))}
    before = {one: path.read_bytes() for one, path in written.items()}

    successor = Successor(LOCAL, [str(root)])
    successor.begin("job", "second")
    successor._thread.join(30)

    assert {name.partition("/")[0] for name in kept(root)} == {"job", "another"}
    assert len(kept(root)) == 3, "what nobody took, what is of this very attempt, and what is another job's"
    logs = {(one.job, one.incarnation): one for one in scan(str(log)).logs}
    ends = {one: [record for record in read(found) if record["type"] == "span"] for one, found in logs.items()}
    assert {one: len(spans) for one, spans in ends.items()} == {
        ("job", "first"): 1, ("job", "second"): 0, ("another", "first"): 0,
    }  # fmt: skip
    (end,) = ends["job", "first"]
    assert (end["span_id"], end["tags"]["pytorch.end_reason"]) == ("5", "killed")
    assert {one: path.read_bytes() for one, path in written.items()} == before


def test_an_end_is_added_only_to_the_log_that_this_very_process_wrote(tmp_path: Path) -> None:
    theirs = write_log(tmp_path, "job", "first", pid=78)
    mine = write_log(tmp_path, "job", "first", pid=77)
    assert (theirs.name, mine.name) == ("rank-00000.jsonl", "rank-00000.1.jsonl")
    words = LastWords(whose(tmp_path / "as it was called there"), RankState(0, "node-a", pid=77, as_of=9), SPAN)
    assert not Teller(LOCAL)(words), "it isn't where it was"
    assert Teller(LOCAL, str(tmp_path))(words)
    assert (tmp_path / "job" / "first" / "rank-00000.1.seg-00001.jsonl").exists()
    assert not Teller(LOCAL, str(tmp_path))(replace(words, state=replace(words.state, pid=79)))
    assert len(list(tmp_path.rglob("*.jsonl"))) == 3
