"""What a rank leaves behind on its host that was killed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.stalls import places
from ddtrace_pytorch.stalls.last_words import Identity, LastWords
from ddtrace_pytorch.stalls.roll import Life
from ddtrace_pytorch.stalls.state_file import STATE, StateFile, pieces
from harness.story import SECOND, T0, state_of


def leave_last_words(
    state_dir: Path, rank: int, log_root: Path, *, pid: int, job: str = "4242", incarnation: str = "aaa"
) -> None:
    """The last words of `rank`, which is dead, in `state_dir`."""
    span = SpanRecord("pytorch.rank", f"rank {rank}", "pytorch", 2**100, 5, None, T0, 20 * SECOND, {}, {})
    state = replace(state_of(rank, 41, 20, frames=("/job/train.py:24 load",)), pid=pid, life=Life.ALIVE)
    host = os.uname().nodename
    words = LastWords(Identity(job, incarnation, 0, rank, 4, host, places.BOOT, str(log_root)), state, span)
    folder = places.folder(places.roots(str(state_dir))[0], job, incarnation)
    file = StateFile(folder, places.name(rank))
    file.remove()
    os.makedirs(folder)
    data = bytearray(64 * 1024)
    for offset, piece in pieces(1, words.encode(20_000)):
        data[offset : offset + len(piece)] = piece
    (Path(folder) / (places.name(rank) + STATE)).write_bytes(data)
    (Path(folder) / (places.name(rank) + ".lock")).touch()
