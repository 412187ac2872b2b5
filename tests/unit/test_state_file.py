"""A rank's state on disk: a kill at any byte loses one beat, and one of many gets what a dead rank left."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.stalls import positions, state_file
from ddtrace_pytorch.stalls.state_file import CAPACITY, SIZE, Alive, StateFile, Taken, claim, is_alive, newest, pieces

texts = st.lists(st.binary(max_size=600), min_size=1, max_size=6)


def apply(memory: bytearray, number: int, text: bytes) -> None:
    for offset, piece in pieces(number, text):
        memory[offset : offset + len(piece)] = piece


def written(many: list[bytes]) -> bytearray:
    memory = bytearray(SIZE)
    for number, text in enumerate(many, 1):
        apply(memory, number, text)
    return memory


@given(texts, st.data())
def test_a_write_cut_short_at_any_byte_loses_that_one_only(many: list[bytes], data: st.DataObject) -> None:
    *before, last = many
    memory = written(before)
    todo = sum(len(piece) for _, piece in pieces(len(many), last))
    left = cut = data.draw(st.integers(0, todo))
    for offset, piece in pieces(len(many), last):
        memory[offset : offset + min(left, len(piece))] = piece[:left]
        left -= min(left, len(piece))
    # The last bytes may be those that are there already.
    complete = memory == written(many)
    assert complete or cut < todo
    assert newest(memory) == (last if complete else before[-1] if before else None)


@given(texts, st.data())
def test_a_reader_during_a_write_gets_the_one_before_or_the_new_one(many: list[bytes], data: st.DataObject) -> None:
    *before, last = many
    old, new = written(before), written(many)
    differing = [at for at in range(SIZE) if old[at] != new[at]]
    seen = bytearray(old)
    for at in data.draw(st.sets(st.sampled_from(differing))) if differing else ():
        seen[at] = new[at]
    assert newest(seen) in (before[-1] if before else None, last)


@given(st.binary(max_size=200), st.integers(0, SIZE))
def test_whatever_the_file_holds_reading_it_never_raises(junk: bytes, size: int) -> None:
    assert newest((b"DDP1" + junk).ljust(size, b"\0")) in (None, b"")


def test_a_text_of_the_whole_capacity_fits_and_spares_the_other_half() -> None:
    memory = written([b"a" * CAPACITY, b"b" * CAPACITY])
    assert len(memory) == SIZE
    assert newest(memory) == b"b" * CAPACITY
    for half in (1, 2):
        memory[half * (SIZE - positions.SIZE) // 2 - 1] ^= 1
    assert newest(memory) is None


@contextlib.contextmanager
def process(run: Callable[[], object]) -> Iterator[int]:
    """A forked process that does `run` and then stays until it is killed; `run` must succeed."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            run()
            os.write(write, b".")
            signal.pause()
        os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 1) == b".", "the forked process failed"
        yield pid
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def text_of(pid: int) -> bytes:
    return f"words of {pid}".encode()


def keep(directory: Path) -> None:
    StateFile(str(directory), "rank-00003").write(text_of(os.getpid()))


def lock_in(directory: Path) -> str:
    return str(directory / "rank-00003.lock")


def test_the_files_are_small_private_and_leave_nothing_behind(tmp_path: Path) -> None:
    place = tmp_path / "job" / "incarnation"
    one = StateFile(str(place), "rank-00003")
    one.write(b"first")
    one.write(b"second")
    path = place / "rank-00003.state"
    assert state_file.read(str(path))[0] == b"second"
    assert path.stat().st_size == SIZE == path.stat().st_blocks * 512
    assert [stat.S_IMODE(at.stat().st_mode) for at in (place, path)] == [0o700, 0o600]
    one.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_lives_while_its_process_does_stopped_or_not(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    with process(lambda: keep(tmp_path)) as pid:
        assert is_alive(lock)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert is_alive(lock)
        with pytest.raises(Alive), claim(lock):
            pass
        words = text_of(pid)
    assert not is_alive(lock)
    with claim(lock) as left:
        assert left.text == words


def test_a_forked_child_does_not_keep_its_dead_parent_alive_and_knows_that_it_is_dead(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    wait, go = os.pipe()
    hear, say = os.pipe()

    def rank_with_a_worker() -> None:
        keep(tmp_path)
        if not os.fork():
            os.close(go)
            os.read(wait, 1)  # until its parent is gone and the test has looked
            os.write(say, b"alive" if is_alive(lock) else b"dead")
            os._exit(0)

    with process(rank_with_a_worker):
        assert is_alive(lock)
    assert not is_alive(lock)
    os.close(go)
    assert os.read(hear, 5) == b"dead"
    for number in (wait, hear, say):
        os.close(number)


def test_a_lock_of_a_file_that_was_cleared_away_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, locked = lock_in(tmp_path), state_file._lock
    cleared = []

    def clear_then_lock(fd: int, length: int) -> bool:
        if not cleared:
            cleared.append(lock)
            os.unlink(lock)
        return locked(fd, length)

    monkeypatch.setattr(state_file, "_lock", clear_then_lock)
    one = StateFile(str(tmp_path), "rank-00003")
    assert one.is_whole()
    one.remove()
    with process(lambda: keep(tmp_path)):
        pass
    cleared.clear()
    with pytest.raises(Taken), claim(lock):
        pass


def test_one_that_looks_at_its_own_files_does_not_lose_its_lock_by_that(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)

    def look_at_oneself() -> None:
        keep(tmp_path)
        assert is_alive(lock)
        with contextlib.suppress(Alive), claim(lock):
            raise AssertionError

    with process(look_at_oneself):
        assert is_alive(lock)


def test_a_second_living_process_does_not_get_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "_BETWEEN_SECONDS", 0.0)
    with process(lambda: keep(tmp_path)) as pid:
        with pytest.raises(OSError, match="another living process"):
            StateFile(str(tmp_path), "rank-00003")
        assert state_file.read(str(tmp_path / "rank-00003.state"))[0] == text_of(pid)


def test_a_lock_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-00003.lock")
    assert not is_alive(str(tmp_path / "rank-00003.lock"))


def test_of_many_that_claim_at_once_one_has_it_and_the_others_are_told_so(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    with process(lambda: keep(tmp_path)):
        pass
    read, write = os.pipe()

    def compete() -> str:
        try:
            with claim(lock) as left:
                os.write(write, b"claimed\n")
                assert not is_alive(lock), "being told of is not being alive"
                left.remove()
                return ""
        except Taken:
            return "taken\n"

    children = []
    for _ in range(30):
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os.write(write, compete().encode())
                os._exit(0)
            os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 30
    os.close(write)
    with open(read) as said:
        assert sorted(said.read().split()) == ["claimed"] + ["taken"] * 29
    assert list(tmp_path.iterdir()) == [] if tmp_path.exists() else True


def test_a_claim_that_is_given_up_leaves_everything_as_it_was(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    with process(lambda: keep(tmp_path)):
        pass
    texts = []
    for _ in range(2):
        with claim(lock) as left:
            texts.append(left.text)
    assert texts[0] == texts[1] is not None


def test_files_that_are_made_while_others_clear_the_folder_are_whole(tmp_path: Path) -> None:
    place = tmp_path / "job" / "incarnation"
    lock = lock_in(place)

    def clear() -> None:
        while True:
            with contextlib.suppress(Alive, Taken), claim(lock) as left:
                left.remove()

    def begin() -> None:
        for _ in range(200):
            one = StateFile(str(place), "rank-00003")
            one.write(b"words")
            assert one.is_whole()
            assert state_file.read(str(place / "rank-00003.state"))[0] == b"words"
            one.remove()

    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            clear()
        os._exit(1)
    try:
        begin()
    finally:
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("how", ["closed", "closed and used by somebody", "deleted"])
def test_lost_files_are_noticed_and_nobody_elses_descriptor_is_closed(tmp_path: Path, how: str) -> None:
    one = StateFile(str(tmp_path / "job" / "run"), "rank-00003")
    assert one.is_whole()
    lock = tmp_path / "job" / "run" / "rank-00003.lock"
    number = one._lock
    if how == "deleted":
        lock.unlink()
    else:
        os.close(number)
    users = os.open(os.devnull, os.O_RDONLY)
    if how == "closed and used by somebody":
        os.dup2(users, number)
    assert not one.is_whole()
    one.remove()
    if how == "closed and used by somebody":
        os.close(number)  # it was still theirs
    os.close(users)
    again = StateFile(str(tmp_path / "job" / "run"), "rank-00003")
    assert again.is_whole()
    again.remove()


def test_without_room_there_is_no_file_and_no_bus_error(tmp_path: Path) -> None:
    def without_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))
        with pytest.raises(OSError, match="large"):
            StateFile(str(tmp_path / "job" / "run"), "rank-00003")
        assert list(tmp_path.iterdir()) == []

    with process(without_room):
        pass


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            keep(tmp_path)
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with claim(lock_in(tmp_path)) as left:
        assert left.text == text_of(pid)
    os.waitpid(pid, 0)
