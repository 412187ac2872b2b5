"""Where checkpoints go, and how large they are: by real files and what torch really returns."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ddtrace_pytorch.training.checkpoint_target import File, Size, Storage, size_of_saved, size_of_tensors

STATE = {"weight": torch.ones(100, 10), "more": [torch.ones(5, dtype=torch.int64), {"epoch": 3}]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_a_path(path: Path, kind: Any) -> None:
    file = File(kind(str(path)))
    torch.save(STATE, path)
    assert (file.resource, file.path, file.in_memory) == (str(path), str(path), False)
    for way in ("save", "load"):
        assert file.size(way) == Size(path.stat().st_size, "file")


def test_a_path_that_is_no_file(path: Path) -> None:
    assert File(str(path)).size("save") is None
    assert File(str(path.parent)).size("load") is None
    assert File("a\0b").size("load") is None
    os.mkfifo(path)
    assert File(path).size("load") is None


@pytest.mark.parametrize("temporary", [False, True])
def test_an_open_file(path: Path, temporary: bool) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent) if temporary else open(path, "w+b") as stream:
        stream.write(b"head")
        saved = File(stream)
        torch.save(STATE, stream)
        said = saved.size("save")
        stream.flush()
        whole = os.fstat(stream.fileno()).st_size
        assert said == Size(whole - 4, "stream")
        assert saved.resource == saved.path == stream.name
        assert File(stream).size("load") == Size(whole, "file")


def test_a_file_without_a_name(path: Path) -> None:
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT), "wb") as stream:
        file = File(stream)
        torch.save(STATE, stream)
        assert (file.resource, file.path) == ("BufferedWriter", None)
        assert file.size("save") == Size(stream.tell(), "stream")


def test_memory() -> None:
    buffer = io.BytesIO()
    file = File(buffer)
    torch.save(STATE, buffer)
    assert (file.resource, file.path, file.in_memory) == ("BytesIO", None, True)
    assert file.size("save") == file.size("load") == Size(len(buffer.getvalue()), "stream")


def test_what_is_closed_has_no_size(path: Path) -> None:
    with open(path, "wb") as stream, io.BytesIO() as buffer:
        pass
    assert File(buffer).size("save") is None
    assert File(stream).size("save") == Size(0, "file")


class Remote:
    """A file-like object of the user's: nothing of it is called."""

    def __getattr__(self, name: str) -> Any:
        assert name == "name", name
        return 7

    def __repr__(self) -> str:
        raise AssertionError


def test_a_file_like_object_is_told_by_its_type_and_left_alone() -> None:
    file = File(Remote())
    assert (file.resource, file.path, file.in_memory) == ("Remote", None, False)
    assert file.size("save") is file.size("load") is None


def test_storages(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path)
    for storage in (Storage(str(tmp_path), None), Storage(tmp_path, None), Storage(None, writer)):
        assert storage.resource == storage.path == str(tmp_path)
    assert (Storage(None, Remote2()).resource, Storage(None, None).resource) == ("Remote2", "unknown")
    assert Storage(17, None).path is None


class Remote2:
    """A storage writer without an id."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_rank_wrote(tmp_path: Path) -> None:
    metadata = dcp.save(dict(STATE), checkpoint_id=tmp_path / "at", no_dist=True)
    files = sum(file.stat().st_size for file in (tmp_path / "at").glob("__0_*.distcp"))
    size = size_of_saved(metadata, 0)
    assert size is not None
    assert size.of == "rank"
    assert 4_000 + 40 < size.bytes <= files
    assert size_of_saved(metadata, 1) == Size(0, "rank")


def test_a_checkpoint_whose_files_are_not_told_apart_by_rank(tmp_path: Path) -> None:
    class Stored:
        def __init__(self, relative_path: Any, length: Any) -> None:
            self.relative_path, self.length = relative_path, length

    class Metadata:
        def __init__(self, *stored: Any) -> None:
            self.storage_data = dict(enumerate(stored))

    assert size_of_saved(Metadata(Stored("model.safetensors", 5), Stored("more", 6)), 1) == Size(11, "checkpoint")
    for strange in (Metadata(), Metadata(Stored(None, 5)), Metadata(Stored("a", "5")), Metadata(object()), None, 3):
        assert size_of_saved(strange, 0) is None


def test_tensors() -> None:
    assert size_of_tensors(torch, STATE) == Size(4_040, "local_tensors")
    assert size_of_tensors(torch, {"epoch": 3, "name": "x"}) is None
    endless: dict[str, Any] = {"weight": torch.ones(1)}
    endless["again"] = [endless, endless]
    assert size_of_tensors(torch, endless) == Size(4, "local_tensors")


class Raises:
    @property
    def name(self) -> str:
        raise RuntimeError("no name")

    checkpoint_id = path = name


class RaisesAsPath(os.PathLike[str]):
    def __fspath__(self) -> str:
        raise RuntimeError("no path")


class Named:
    def __init__(self, name: Any) -> None:
        self.name = self.path = name


@pytest.mark.parametrize("target", [Raises(), RaisesAsPath(), Named(3), Named(None), Named(Raises()), None, 3])
def test_a_target_of_the_users_own_kind_has_no_path_and_raises_nothing(target: Any) -> None:
    for made in (File(target), Storage(target, None), Storage(None, target)):
        assert made.path is None
        assert len(made.resource) > 0
    assert File(target).size("save") is None


def test_a_path_of_a_million_characters_is_cut_off() -> None:
    long = "n" * 1_000_000
    for made in (File(long), File(Named(long)), Storage(long, None), Storage(None, Named(long))):
        assert made.path is not None
        assert len(made.path) < 5_000
        assert made.resource == made.path
    assert File(long).size("save") is None
