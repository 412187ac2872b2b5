"""The file of one window's trace: what it is called, and how it gets there, compressed, without a plain copy on a disk.

A rank has a cap on what all its traces take; the oldest go first. Nothing but whole traces bears a trace's name.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddtrace_pytorch.spans import Fact

# The directory of the traces, in that of the run.
FOLDER = "profiles"
SUFFIX = ".json.gz"
MEMORY_SUFFIX = ".memory.pickle"
# In memory, before it is compressed; whoever writes it holds the interpreter, a second for about 90 MiB.
PLAIN_LIMIT = 256 * 1024 * 1024
# What one event takes there, about.
EVENT_BYTES = 300
_CHUNK = 256 * 1024
_FAST = 3
# Dimensions of meshes in the name of a file.
_MOST_DIMENSIONS = 6
_MESH = "pytorch.mesh."


class NoTrace(Exception):
    """There is no file; the message says why."""


def coordinates(facts: Mapping[str, Fact]) -> tuple[tuple[str, int], ...]:
    """By the tags of a rank span, where this rank is in each dimension of the job's meshes that has several ranks."""
    found = []
    for name, value in facts.items():
        size = facts.get(f"{name}.size")
        if name.startswith(_MESH) and isinstance(size, int) and size > 1 and isinstance(value, int):
            found.append((name.removeprefix(_MESH), value))
    return tuple(found[:_MOST_DIMENSIONS])


def name_of(rank: int, mesh: tuple[tuple[str, int], ...], step: int) -> str:
    """``rank-00003_dp1_tp0_step-000500.json.gz``."""
    places = "".join(f"_{re.sub('[^A-Za-z0-9]', '', dimension)}{at}" for dimension, at in mesh)
    return f"rank-{rank:05d}{places}_step-{step:06d}{SUFFIX}"


def write(
    save: Callable[[str], object],
    directory: str,
    name: str,
    rank: int,
    limit: int,
    may_go_on: Callable[[], bool] = lambda: True,
    earlier: Sequence[str] = (),
) -> tuple[str, int]:
    """Have ``save(path)`` write a trace, and keep it compressed as `name`, or a name near it that is free, in
    `directory`, which exists; gives its path, and how many bytes it takes, of at most `limit`, together with those in
    the `earlier` directories.

    Raises:
        NoTrace: it would be too large, `may_go_on` said no meanwhile, or there is no memory to be had for it.
        OSError: it can't be written.
    """
    partial = os.path.join(directory, f".{name}.{os.getpid()}")
    plain = _in_memory(save)
    try:
        size = os.fstat(plain).st_size
        if not size:
            raise NoTrace("torch has written no trace")
        try:
            _compress(plain, size, partial, limit, may_go_on)
            written = os.path.getsize(partial)
            make_room((*earlier, directory), rank, limit - written)
            path = _free(os.path.join(directory, name))
            os.rename(partial, path)
        except BaseException:
            _remove(partial)
            raise
    finally:
        os.close(plain)
    return path, written


def write_snapshot(snapshot: Any, trace: str, rank: int, limit: int, earlier: Sequence[str] = ()) -> str:
    """Keep a snapshot of memory beside the file of its `trace`, within what all of the rank's files may take; gives its
    path.

    Raises:
        NoTrace: it would be too large.
        OSError: it can't be written.
    """
    path = trace.removesuffix(SUFFIX) + MEMORY_SUFFIX
    data = pickle.dumps(snapshot)
    if len(data) + os.path.getsize(trace) > limit:
        raise _too_large(limit)
    make_room((*earlier, os.path.dirname(trace)), rank, limit - len(data))
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
    return path


def make_room(directories: Iterable[str], rank: int, limit: int) -> None:
    """Remove the oldest traces of `rank` until the others take no more than `limit` bytes."""
    mine = []
    for directory in dict.fromkeys(directories):
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(f"rank-{rank:05d}_") and entry.name.endswith((SUFFIX, MEMORY_SUFFIX)):
                    found = entry.stat(follow_symlinks=False)
                    mine.append((found.st_mtime_ns, entry.path, found.st_size))
    taken = sum(size for _, _, size in mine)
    for _, path, size in sorted(mine):
        if taken <= limit:
            break
        _remove(path)
        taken -= size


def _in_memory(save: Callable[[str], object]) -> int:
    """The descriptor of what it saves. It takes a path only, and by some releases of torch adds ``.tmp`` to it and
    renames that: both names lead into memory."""
    try:
        plain = os.memfd_create("ddtrace_pytorch trace", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise NoTrace(f"no memory for it: {error}") from error
    try:
        names = tempfile.mkdtemp(prefix="ddtrace-pytorch-trace-")
        try:
            path = os.path.join(names, "trace.json")
            for link in (path, f"{path}.tmp"):
                os.symlink(f"/proc/self/fd/{plain}", link)
            save(path)
        finally:
            shutil.rmtree(names, ignore_errors=True)
    except BaseException:
        os.close(plain)
        raise
    return plain


def _compress(plain: int, size: int, path: str, limit: int, may_go_on: Callable[[], bool]) -> None:
    # Names of ranges are whatever the user's code has: JSON has to be UTF-8 all the same.
    text = codecs.getincrementaldecoder("utf-8")("replace")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file, gzip.GzipFile("", "wb", _FAST, file, mtime=0) as compressed:
        at = 0
        while at < size:
            if not may_go_on():
                raise NoTrace("the session was ending")
            chunk = os.pread(plain, _CHUNK, at)
            at += len(chunk)
            compressed.write(text.decode(chunk, final=at >= size or not chunk).encode())
            if not chunk:
                break
            if file.tell() > limit:
                raise _too_large(limit)
    if os.path.getsize(path) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> NoTrace:
    return NoTrace(f"it takes more than {limit / 1024 / 1024:g} MiB")


def _free(path: str) -> str:
    """The path, or one with a number, that no file has yet."""
    stem, number, free = path.removesuffix(SUFFIX), 1, path
    while os.path.lexists(free):
        number += 1
        free = f"{stem}-{number}{SUFFIX}"
    return free


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def plain_size(many: int) -> int:
    """How many bytes a trace of so `many` events takes before it is compressed, about."""
    return many * EVENT_BYTES


def metadata(**facts: Any) -> dict[str, str]:
    """`facts` as torch's profiler takes them: it can't do with quotation marks and backslashes inside of text."""
    return {name: _bare(value) for name, value in facts.items()}


def _bare(value: Any) -> str:
    return re.sub(r'["\\\x00-\x1f]', "", str(value))
