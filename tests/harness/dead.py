"""What a rank leaves behind on its host that was killed, and what one has there that lives."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.last_words import Identity, LastWords
from ddtrace_pytorch.stalls.roll import Life
from ddtrace_pytorch.stalls.state_file import STATE, StateFile, pieces
from harness.story import SECOND, T0, at, state_of

END = at(20)


def leave_last_words(
    state_dir: Path, rank: int, log_root: Path, *, pid: int, job: str = "4242", incarnation: str = "aaa", end: int = END
) -> None:
    """The last words of `rank`, which is dead since `end`, in `state_dir`."""
    folder = places.folder(places.roots(str(state_dir))[0], job, incarnation)
    file = StateFile(folder, places.name(rank))
    file.remove()
    os.makedirs(folder, exist_ok=True)
    data = bytearray(64 * 1024)
    for offset, piece in pieces(1, _words(rank, log_root, pid, job, incarnation, end).encode(20_000)):
        data[offset : offset + len(piece)] = piece
    (Path(folder) / (places.name(rank) + STATE)).write_bytes(data)
    (Path(folder) / (places.name(rank) + ".lock")).touch()


def live(
    state_dir: Path, rank: int, log_root: Path, *, job: str = "4242", incarnation: str = "aaa", end: int = END
) -> StateFile:
    """The state of `rank`, which lives in this process until it is removed, in `state_dir`; `end`: its last beat."""
    file = StateFile(places.folder(places.roots(str(state_dir))[0], job, incarnation), places.name(rank))
    file.write(_words(rank, log_root, os.getpid(), job, incarnation, end).encode(20_000))
    return file


def _words(rank: int, log_root: Path, pid: int, job: str, incarnation: str, end: int) -> LastWords:
    span = SpanRecord("pytorch.rank", f"rank {rank}", "pytorch", 2**100, 5, None, T0, 20 * SECOND, {}, {})
    state = state_of(rank, 41, 20, frames=("/job/train.py:24 load",))
    state = replace(state, pid=pid, life=Life.ALIVE, as_of=end)
    whose = Identity(job, incarnation, 0, rank, 4, os.uname().nodename, places.BOOT, str(log_root))
    return LastWords(whose, state, span)
