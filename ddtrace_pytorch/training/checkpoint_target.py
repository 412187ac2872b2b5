"""Where a checkpoint goes or comes from, and how large it is: from what is at hand, without running code of the user's.

A file just written or read is asked for its size, on the thread that wrote or read it. Nothing else is read.
"""

from __future__ import annotations

import io
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ddtrace_pytorch.border import pass_on
from ddtrace_pytorch.classes import name_of
from ddtrace_pytorch.records.attributes import short, short_name
from ddtrace_pytorch.tensors import nbytes

# Of exactly these types it is known what their methods do.
_FILES = (io.BufferedWriter, io.BufferedReader, io.BufferedRandom, io.FileIO)


class Size(NamedTuple):
    """`of`: what has that many bytes: the ``file``, this rank's files (``rank``), the whole ``checkpoint``, the tensors
    that this rank loads into (``local_tensors``), or what was written to a ``stream``."""

    bytes: int
    of: str


class File:
    """What `torch.save` or `torch.load` was given: a path or a file object."""

    def __init__(self, target: Any) -> None:
        self.in_memory = type(target) is io.BytesIO
        self._file = _real_file(target)
        self.path = _path(target)
        if self.path is None and not self.in_memory:
            name = _of(target, "name")
            self.path = _path(name) if isinstance(name, str) else None
        self.resource = self.path or short_name(name_of(type(target)))
        self._began = self._position()

    def size(self, kind: str) -> Size | None:
        """Of what was saved or loaded; None where that isn't known."""
        if self._file is None:
            return _size_on_disk(self.path) if self.path is not None else None
        if kind == "save":
            return Size(self._position() - self._began, "stream")
        if isinstance(self._file, io.BytesIO):
            return Size(self._file.getbuffer().nbytes, "stream")
        return _size_on_disk(self._file.fileno())

    def _position(self) -> int:
        return self._file.tell() if self._file is not None else 0


def _path(given: Any) -> str | None:
    """`given` as text, if it is a path: its beginning, of a long one."""
    try:
        if not issubclass(type(given), (str, bytes, os.PathLike)):
            return None
        return short(str.__str__(os.fsdecode(given))) or None
    except Exception as error:
        pass_on(error)
        return None  # a path of the user's own kind; torch will say so


def _of(target: Any, what: str) -> Any:
    try:
        return getattr(target, what, None)
    except Exception as error:
        pass_on(error)
        return None  # a file of the user's own kind, with a property that raises


def _real_file(target: Any) -> Any:
    if type(target) is io.BytesIO:
        return None if target.closed else target
    if type(target) is tempfile._TemporaryFileWrapper:
        target = target.file
    return target if type(target) in _FILES and not target.closed and target.seekable() else None


def _size_on_disk(path: str | int) -> Size | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        pass_on(error)
        return None  # a file object's name may be of no file
    return Size(found.st_size, "file") if stat.S_ISREG(found.st_mode) else None


class Storage:
    """What `torch.distributed.checkpoint` was given: an id, or a storage writer or reader that has one."""

    in_memory = False

    def __init__(self, checkpoint_id: Any, storage: Any) -> None:
        if checkpoint_id is None:
            self.path = _path(_of(storage, "checkpoint_id")) or _path(_of(storage, "path"))
        else:
            self.path = _path(checkpoint_id)
        self.resource = self.path or (short_name(name_of(type(storage))) if storage is not None else "unknown")


def size_of_saved(metadata: Any, rank: int) -> Size | None:
    """Of what `rank` of the saving group wrote, by what `torch.distributed.checkpoint.save` returns; where its files
    can't be told from the others', of the whole checkpoint."""
    stored = getattr(metadata, "storage_data", None)
    if not isinstance(stored, Mapping) or not stored:
        return None
    mine, everybodys, prefix = 0, 0, f"__{rank}_"
    known = False
    for one in stored.values():
        length, path = getattr(one, "length", None), getattr(one, "relative_path", None)
        if not isinstance(length, int) or not isinstance(path, str):
            return None
        everybodys += length
        known = known or path.startswith("__")
        if path.startswith(prefix):
            mine += length
    return Size(mine, "rank") if known else Size(everybodys, "checkpoint")


def size_of_tensors(torch: Any, state: Any) -> Size | None:
    """Of the tensors in `state`, dicts and lists of them; of a tensor that is spread over ranks, this rank's part."""
    found = list(_lengths(torch, state, set()))
    return Size(sum(found), "local_tensors") if found else None


def _lengths(torch: Any, state: Any, seen: set[int]) -> Iterator[int]:
    if isinstance(state, torch.Tensor):
        if hasattr(state, "local_shards"):
            yield from (nbytes(shard.tensor) for shard in state.local_shards())
        else:
            yield nbytes(getattr(state, "_local_tensor", state))
    elif isinstance(state, (Mapping, list, tuple)) and id(state) not in seen:
        seen.add(id(state))
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _lengths(torch, value, seen)
