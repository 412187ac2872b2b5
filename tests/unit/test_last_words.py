"""What a rank keeps of itself: it comes back as it was, fits where it must, and makes a finished span."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.spans import SpanLink, SpanRecord
from ddtrace_pytorch.stalls import last_words, places, state_file
from ddtrace_pytorch.stalls.keeper import Keeper
from ddtrace_pytorch.stalls.last_words import Identity, LastWords, decode
from ddtrace_pytorch.stalls.mates import Mates, as_found
from ddtrace_pytorch.stalls.positions import NO_LEGEND, Legend
from ddtrace_pytorch.stalls.recovery import Fate, Found, recover
from ddtrace_pytorch.stalls.roll import Call, GroupState, Life, RankState
from ddtrace_pytorch.stalls.state_file import CAPACITY
from ddtrace_pytorch.training.progress import Progress
from ddtrace_pytorch.whereabouts import Whereabouts

IDENTITY = Identity("job-7", "20261128T080452Z-00de004b", 0, 3, 8, "node-a", places.BOOT, "/data/logs")
CALLS = tuple(Call("all_reduce", key, 1 << 20, (1024, 256), "torch.float32", since=10**18 + key) for key in range(32))
WORLD = GroupState("0", "world", tuple(range(8)), "nccl", 32, 31, CALLS[-1], CALLS)
STATE = RankState(3, "node-a", gpu="GPU-1", pid=77, as_of=10**18, frames=("train.py:7 step",), groups={"0": WORLD})

any_text = st.text(max_size=20)
ids = st.integers(1, 2**64 - 1)
spans = st.builds(
    SpanRecord,
    name=any_text,
    resource=any_text,
    service=any_text,
    trace_id=st.integers(1, 2**128 - 1),
    span_id=ids,
    parent_id=st.none() | ids,
    start=st.integers(0, 2**63),
    duration=st.integers(0, 2**63),
    tags=st.dictionaries(any_text, any_text, max_size=3),
    metrics=st.dictionaries(any_text, st.integers(-(2**53), 2**53) | st.floats(allow_nan=False), max_size=3),
    links=st.lists(st.builds(SpanLink, st.integers(1, 2**128 - 1), ids, any_text), max_size=2).map(tuple),
    error=st.booleans(),
)
SPAN = SpanRecord(
    "pytorch.rank", "rank 3", "pytorch", 2**127, 5, None, 10**18 - 9, 9, {"env": "prod"}, {"_dd.partial_version": 1.0}
)
WORDS = LastWords(IDENTITY, STATE, SPAN)


@given(spans)
def test_words_come_back_as_they_were(span: SpanRecord) -> None:
    words = replace(WORDS, span=span)
    assert decode(words.encode(10**6)) == words


def test_the_file_holds_what_the_roll_call_reads() -> None:
    said = json.loads(WORDS.encode(CAPACITY))
    assert {name: said[name] for name in STATE.plain()} == STATE.plain()


def test_a_step_that_is_no_number_of_any_size_is_left_out() -> None:
    progress = Progress()
    said = {}
    for number in (-1, 2**62, 2**63, 10**5000):
        progress.step.number = number
        state = Whereabouts(3, "node-a", Clock(), None, 10.0, progress).state(None, 7)
        said[number] = decode(replace(WORDS, state=state).encode(CAPACITY)).state.step
    assert list(said.values()) == [-1, 2**62, None, None]


@given(
    st.recursive(st.none() | st.integers() | any_text, lambda inner: st.lists(inner) | st.dictionaries(any_text, inner))
)
def test_what_are_no_last_words_is_refused(junk: object) -> None:
    for said in (junk, {"identity": junk}, {**json.loads(WORDS.encode(CAPACITY)), "identity": junk}):
        with pytest.raises(ValueError, match="no last words"):
            decode(json.dumps(said).encode())
    with pytest.raises(ValueError, match="no last words"):
        decode(repr(junk).encode() + b"{")


def test_what_there_is_no_room_for_goes_in_order_and_is_said() -> None:
    stack = replace(SPAN, tags={"error.stack": "x" * 9_000})
    groups = {"0": WORLD, "1": replace(WORLD, name="1", current=None)}
    legend = Legend({"0": ("0", "all_reduce")}, ("float32",), 7)
    words = replace(WORDS, state=replace(STATE, groups=groups), span=stack, legend=legend)
    left_out = []
    for capacity in range(len(words.encode(CAPACITY)), 1_000, -13):
        text = words.encode(capacity)
        assert len(text) <= capacity
        shorter = decode(text)
        assert (shorter.identity, shorter.span.span_id) == (IDENTITY, SPAN.span_id)
        assert shorter.span == stack or "long tags" in shorter.left_out
        if shorter.left_out not in left_out:
            left_out.append(shorter.left_out)
    order = ("older calls", "recent", "legend", "frames", "ranks", "idle groups", "groups", "long tags")
    assert left_out == [order[:many] for many in range(9)]
    with pytest.raises(ValueError, match="identity and span alone take"):
        words.encode(100)


def test_of_sixteen_groups_that_are_in_use_the_last_calls_of_each_are_there() -> None:
    groups = {str(number): replace(WORLD, name=str(number)) for number in range(16)}
    words = decode(replace(WORDS, state=replace(STATE, groups=groups)).encode(CAPACITY))
    assert words.left_out == ("older calls",)
    assert {group.recent for group in words.state.groups.values()} == {CALLS[-8:]}


def test_files_of_others_among_the_states_are_no_ranks(tmp_path: Path) -> None:
    folder = Path(places.folder(str(tmp_path), "job-7", "run"))
    folder.mkdir(parents=True)
    for name in ("notes.lock", "rank-.lock", "rank-x\udcff.lock", "rank-00003.lock.swp"):
        (folder / name).touch()
    mates = Mates([str(tmp_path)], "job-7", "run", "node-a")
    mates.meet()
    assert mates.states() == {}
    assert list(places.locks(str(tmp_path))) == []


@pytest.mark.parametrize("moved", [-(10**12), 0, 10**12], ids=["back", "not", "forth"])
def test_a_rank_is_silent_by_the_clock_that_nobody_moves(moved: int) -> None:
    """`moved`: by how many ns somebody has set the system's clock since the rank began."""
    clock = time.time_ns() - time.monotonic_ns() - moved
    for age, life in ((1, Life.ALIVE), (30, Life.SILENT)):
        beat = time.monotonic_ns() + clock - age * 10**9
        words = replace(WORDS, state=replace(STATE, as_of=beat), legend=Legend({"0": ("0", "barrier")}, (), clock))
        for capacity in (CAPACITY, 1_600):
            assert as_found(decode(words.encode(capacity)), alive=True).life is life


def test_in_a_huge_world_everything_is_said() -> None:
    every = tuple(range(8192))
    apart = {"0": every, "1": every[::8], "2": every[5::-1], "3": tuple(rank for rank in every if rank % 16 < 4)}
    groups = {name: replace(WORLD, name=name, ranks=ranks) for name, ranks in {**apart, "4": (7,), "5": ()}.items()}
    few = {name: replace(group, recent=()) for name, group in groups.items() if name != "0"}
    words = replace(WORDS, state=replace(STATE, groups={"0": groups["0"], **few}))
    assert decode(words.encode(CAPACITY)) == words


def test_in_a_huge_world_without_order_ranks_go_first_and_calls_stay() -> None:
    huge = replace(WORLD, ranks=tuple(rank * rank for rank in range(8192)))
    words = decode(replace(WORDS, state=replace(STATE, groups={"0": huge})).encode(CAPACITY))
    assert words.left_out == ("ranks",)
    assert words.state.groups["0"].recent == CALLS


def test_what_cannot_fit_is_not_tried() -> None:
    """The least that calls and groups take is no more than they do."""
    bare = Call("", 0)
    empty = GroupState("", "", (), "")
    for many, calls in ((1, 0), (1, 1), (40, 0), (40, 32)):
        groups = {str(number): replace(empty, recent=(bare,) * calls) for number in range(many)}
        words = replace(WORDS, state=replace(STATE, groups=groups))
        assert words._least() <= len(words.encode(10**6)) - len(replace(WORDS, state=RankState(3)).encode(10**6))


def test_of_more_groups_than_there_is_room_for_those_stay_that_the_rank_is_in_a_call_of() -> None:
    every = tuple(range(1024))
    groups = {
        f"mesh {number}": replace(WORLD, name=f"mesh {number}", ranks=every, current=None) for number in range(300)
    }
    groups["mesh 7"] = replace(groups["mesh 7"], current=CALLS[-1])
    text = replace(WORDS, state=replace(STATE, groups=groups)).encode(CAPACITY)
    assert json.loads(text)["members"] == {"mesh 7": [[0, 1023, 1]]}
    words = decode(text)
    assert words.left_out[-1] == "idle groups"
    assert {name: group.ranks for name, group in words.state.groups.items()} == {"mesh 7": every}


def test_more_ranks_than_any_job_has_are_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "MOST_RANKS", 9_000)
    groups = {str(number): replace(WORLD, name=str(number), ranks=tuple(range(4_500))) for number in range(3)}
    words = decode(replace(WORDS, state=replace(STATE, groups=groups)).encode(CAPACITY))
    assert words.left_out[0] == "ranks"
    said = json.loads(WORDS.encode(CAPACITY))
    row = [0, 8_999, 1]
    assert len(decode(json.dumps({**said, "members": {"0": [row]}}).encode()).state.groups["0"].ranks) == 9_000
    for members in ({"0": [row, row]}, {"0": [[0, 2**60, 1]]}, {"0": [row], "1": [row, [0, -9_000, 1]]}):
        with pytest.raises(ValueError, match="ranks in all groups"):
            decode(json.dumps({**said, "members": members}).encode())


def test_the_span_of_a_dead_rank_ends_with_its_last_beat_as_an_error() -> None:
    span = WORDS.finished_span()
    assert (span.trace_id, span.span_id, span.start + span.duration) == (SPAN.trace_id, SPAN.span_id, 10**18)
    assert span.error
    assert span.metrics == {}
    assert span.tags["env"] == "prod"
    assert (span.tags["pytorch.end_reason"], span.tags["error.type"]) == ("killed", "killed")
    assert "in all_reduce on world" in span.tags["error.message"]


def test_what_a_rank_was_in_is_its_collective_or_its_line() -> None:
    idle = replace(STATE, groups={"0": replace(WORLD, current=None)}, frames=("/home/me/train.py:7 step", "b.py:1 f"))
    assert replace(WORDS, state=idle).was_in() == "train.py:7 step"
    torchs = ("/v/lib/python3.11/site-packages/torch/optim/adam.py:152 _init_group", "/job/train.py:70 main")
    inside = replace(WORDS, state=replace(idle, frames=torchs))
    assert inside.was_in() == "train.py:70 main"
    assert inside.finished_span().tags["error.message"].endswith("in train.py:70 main")
    assert replace(WORDS, state=RankState(3)).was_in() == ""


def test_a_rank_that_ended_but_could_not_send_it_is_told_as_it_ended() -> None:
    ended = replace(SPAN, tags={"pytorch.end_reason": "exit"}, metrics={})
    words = decode(LastWords(IDENTITY, replace(STATE, life=Life.ENDED), ended).encode(CAPACITY))
    assert words.finished_span() == ended
    assert words.end_reason == "exit"


# ---- on disk ----


def keeper(*roots: Path) -> Keeper:
    return Keeper(
        [str(root) for root in roots],
        lambda: replace(STATE, pid=os.getpid()),
        lambda: SPAN,
        lambda: NO_LEGEND,
        lambda memory: None,
    )


@contextlib.contextmanager
def dead_rank(root: Path, identity: Identity = IDENTITY, pid: int = 0, ended: str = "") -> Iterator[None]:
    """A rank that is gone, and whose pid is now `pid`."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            one = Keeper(
                [str(root)], lambda: replace(STATE, pid=pid), lambda: SPAN, lambda: NO_LEGEND, lambda memory: None
            )
            one.begin(identity)
            if ended:
                one.end(replace(SPAN, tags={"pytorch.end_reason": ended}))
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    yield


def recovered(root: Path, tells: bool = True) -> tuple[list[Found], list[LastWords]]:
    told: list[LastWords] = []

    def tell(words: LastWords) -> bool:
        told.append(words)
        return tells

    return list(recover([str(root)], tell)), told


def test_a_living_rank_is_never_told_of_and_its_state_is_what_it_last_did(tmp_path: Path) -> None:
    one = keeper(tmp_path)
    one.begin(IDENTITY)
    (found,), told = recovered(tmp_path)
    assert (found.fate, told) == (Fate.ALIVE, [])
    assert found.words.state.pid == os.getpid()
    one.end(replace(SPAN, tags={"pytorch.end_reason": "exit"}))
    (found,), told = recovered(tmp_path)
    assert (found.fate, found.words.end_reason, told) == (Fate.ALIVE, "exit", [])
    one.forget()
    assert recovered(tmp_path) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_a_dead_rank_whose_pid_is_anothers_now_is_told_of(tmp_path: Path) -> None:
    with dead_rank(tmp_path, pid=os.getpid()):
        (found,), (words,) = recovered(tmp_path)
    assert (found.fate, words.end_reason) == (Fate.TOLD, "killed")
    assert recovered(tmp_path) == ([], [])


def test_one_that_said_how_it_ended_is_told_as_that(tmp_path: Path) -> None:
    with dead_rank(tmp_path, ended="signal:SIGTERM"):
        _, (words,) = recovered(tmp_path)
    assert words.end_reason == words.finished_span().tags["pytorch.end_reason"] == "signal:SIGTERM"


def test_what_nobody_took_stays_for_the_next_time(tmp_path: Path) -> None:
    with dead_rank(tmp_path):
        for tells, fate in ((False, Fate.UNTOLD), (False, Fate.UNTOLD), (True, Fate.TOLD)):
            (found,), _ = recovered(tmp_path, tells)
            assert found.fate is fate


def test_of_another_hosts_rank_nothing_is_said(tmp_path: Path) -> None:
    # On a file system that both share: a lock over there may not show here.
    for boot, host, fate in (
        ("another", "another", Fate.ELSEWHERE),
        ("another", os.uname().nodename, Fate.TOLD),  # this host, before it was started anew
        (places.BOOT, "another", Fate.TOLD),  # a container of it
    ):
        with dead_rank(tmp_path / boot / host, replace(IDENTITY, boot=boot, host=host)):
            (found,), _ = recovered(tmp_path / boot / host)
        assert found.fate is fate, (boot, host)


def test_files_that_say_nothing_and_belong_to_nobody_are_cleared_away(tmp_path: Path) -> None:
    place = tmp_path / "job" / "run"
    place.mkdir(parents=True)
    (place / "rank-00000.lock").touch()
    (place / "rank-00001.lock").touch()
    (place / "rank-00001.state").write_bytes(b"\0" * 100)
    assert recovered(tmp_path) == ([], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trap", ["symlink", "other user", "writable by all", "file"])
def test_a_place_that_somebody_else_may_have_made_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trap: str
) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if trap == "symlink":
        root.symlink_to(elsewhere)
    elif trap == "file":
        root.touch()
    else:
        root.mkdir()
        os.chown(root, *((12345, 12345) if trap == "other user" else (-1, -1)))
        root.chmod(0o777 if trap == "writable by all" else 0o700)
    one = keeper(root, tmp_path / "second")
    one.begin(IDENTITY)
    assert [path.name for path in tmp_path.rglob("*.state")] == ["rank-00003.state"]
    assert list((tmp_path / "second").rglob("*.state"))
    one.forget()
    with caplog.at_level(logging.WARNING, "ddtrace_pytorch"):
        for _ in range(2):
            alone = keeper(root)
            alone.begin(IDENTITY)
            alone.beat()
            alone.end(replace(SPAN, tags={"pytorch.end_reason": "exit"}))
            alone.forget()
    assert [str(root) in record.getMessage() for record in caplog.records] == [True]


def test_a_keeper_whose_files_are_cleared_away_makes_them_anew(tmp_path: Path) -> None:
    one = keeper(tmp_path)
    one.begin(IDENTITY)
    for path in tmp_path.rglob("rank-*"):
        path.unlink()
    one.beat()
    (path,) = tmp_path.rglob("*.state")
    text, _ = state_file.read(str(path))
    assert text is not None
    assert last_words.decode(text).identity == IDENTITY
    one.forget()


def test_after_its_end_a_keeper_begins_only_if_told_to_resume(tmp_path: Path) -> None:
    one = keeper(tmp_path)
    one.forget()
    one.begin(IDENTITY)  # the ranks agreed on it when the session was over already
    assert not list(tmp_path.rglob("*.state"))
    one.resume()
    assert list(tmp_path.rglob("*.state"))
    one.forget()


def test_states_are_in_memory_or_else_in_the_temporary_directory_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = f"ddtrace-pytorch-state-{os.geteuid()}"
    assert places.roots(None) == (f"/dev/shm/{own}", f"{tmp_path}/{own}")
    assert places.roots("/scratch") == (f"/scratch/{own}",)
