"""How ranks come to one id, with stores of every make."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from ddtrace_pytorch.identity.introduction import GENERATED, Introduced, Introduction
from ddtrace_pytorch.identity.job import identify
from ddtrace_pytorch.identity.meeting import Meeting


class OldStore:
    """A store as torch has it before 2.9: no `clone`, so what there is to ask is the user's own client."""

    def __init__(self, path: Path) -> None:
        self._store = dist.FileStore(str(path), 2)
        self.set, self.get, self.check = self._store.set, self._store.get, self._store.check


class OlderStore:
    """And before 2.2, where a prefixed store cannot even be asked whether a key is there."""

    def __init__(self, path: Path) -> None:
        self._store = dist.FileStore(str(path), 2)
        self.set, self.get, self.add = self._store.set, self._store.get, self._store.add


def nothing() -> None:
    pass


def introduce(store: object, rank: int, environ: dict[str, str], ordinal: int = 0) -> Introduction:
    return hurried(store, rank, environ, ordinal, hurry=False)


def hurried(store: object, rank: int, environ: dict[str, str], ordinal: int, hurry: bool = True) -> Introduction:
    job = identify(environ)
    meeting = Meeting(store, ordinal, job.restart_count)
    if hurry:
        meeting.hurry()
    return Introduction(job, rank, meeting)


@pytest.mark.parametrize(
    "make", [OlderStore, OldStore, lambda path: dist.FileStore(str(path), 2)], ids=["older", "old", "new"]
)
def test_a_rank_hears_what_rank_0_says_later(tmp_path: Path, make: Callable[[Path], object]) -> None:
    heard: list[Introduced] = []
    listening = threading.Event()
    one = introduce(make(tmp_path / "store"), 1, {})
    thread = threading.Thread(target=lambda: heard.append(one.agree(meanwhile=listening.set)))
    thread.start()
    assert listening.wait(5)
    said = introduce(make(tmp_path / "store"), 0, {}).agree(nothing)
    thread.join(10)
    assert heard == [said]
    assert said.source == GENERATED


def test_a_later_init_and_a_later_attempt_never_hear_the_word_of_an_earlier_one(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    first = introduce(store, 0, {}).agree(nothing)
    for ordinal, restarts in ((1, "0"), (0, "1")):
        later = hurried(store, 1, {"TORCHELASTIC_RESTART_COUNT": restarts}, ordinal)
        alone = later.agree(nothing)
        assert alone.incarnation != first.incarnation
        assert alone is later.own


def test_an_id_of_ones_own_environment_stands_and_the_incarnation_is_rank_0s(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    said = introduce(store, 0, {}).agree(nothing)
    heard = introduce(store, 1, {"SLURM_JOB_ID": "4242"}).agree(nothing)
    assert (heard.job_id, heard.source, heard.incarnation) == ("4242", "SLURM_JOB_ID", said.incarnation)


def test_a_store_that_raises_leaves_a_rank_to_its_own_word() -> None:
    broken = introduce(object(), 1, {})
    assert broken.agree(nothing) == broken.own
