"""Finds what dead ranks left behind on this host and has each told once, however many look at the same time."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ddtrace_pytorch.stalls import last_words, places, state_file
from ddtrace_pytorch.stalls.last_words import LastWords
from ddtrace_pytorch.stalls.state_file import LOCK, STATE, Alive, Taken, claim


class Fate(Enum):
    """What was found of a rank, and done about it."""

    ALIVE = "alive"  # its process is there, stopped or not
    TOLD = "told"
    UNTOLD = "untold"  # nobody took it: it stays for the next time
    TAKEN = "taken"  # somebody else is at it
    FORGOTTEN = "forgotten"  # nobody took it, and it is gone
    ELSEWHERE = "elsewhere"  # it runs, or ran, on another host, which alone can say whether it lives


@dataclass(frozen=True)
class Found:
    words: LastWords
    fate: Fate


def recover(
    roots: Sequence[str],
    tell: Callable[[LastWords], bool],
    wanted: Callable[[LastWords], bool] = lambda words: True,
    forget: bool = False,
) -> Iterator[Found]:
    """Go through the states of the ranks that are `wanted`, and have those of dead ones told; a caller that stops
    early leaves the rest as it is.

    `tell` gives whether it did; then, and only then, the rank's files are removed: unless what nobody took is to be
    forgotten (`forget`).
    """
    for lock in _locks(roots):
        words = _read(lock)
        if words is None or (words.told and wanted(words)):
            _clear_away(lock)
        elif wanted(words):
            yield Found(words, _settle(lock, words, tell, forget))


def left(roots: Sequence[str]) -> list[Found]:
    """What there is of ranks that live, and of dead ones that are untold: nothing is claimed, told or cleared away."""
    found = []
    for lock in _locks(roots):
        # Before the words are read: a rank that dies in between has left some that are whole.
        alive = state_file.is_alive(lock)
        words = _read(lock)
        if words is not None and not words.told:
            dead = Fate.ELSEWHERE if not _is_here(words) else Fate.UNTOLD
            found.append(Found(words, Fate.ALIVE if alive else dead))
    return found


def look(roots: Sequence[str], job: str, incarnation: str) -> Iterator[tuple[LastWords, bool]]:
    """What ranks of one incarnation of a job left on this host, and whether each lives: nothing is claimed or told."""
    for root in roots:
        if not _is_ours(root):
            continue
        folder = places.folder(root, job, incarnation)
        for file in places.entries(folder):
            if not places.is_lock(file):
                continue
            lock = os.path.join(folder, file)
            # Before the words are read: a rank that dies in between has left some that are whole.
            alive = state_file.is_alive(lock)
            words = _read(lock)
            if words is not None and _is_here(words):
                yield words, alive


def _locks(roots: Sequence[str]) -> Iterator[str]:
    for root in roots:
        if _is_ours(root):
            yield from places.locks(root)


def _settle(lock: str, words: LastWords, tell: Callable[[LastWords], bool], forget: bool) -> Fate:
    if not _is_here(words):
        return Fate.ELSEWHERE
    try:
        with claim(lock) as found:
            # Read anew: what was read before it was claimed may be a beat older.
            newest = _decoded(found.text, found.entered)
            if newest is None:
                return Fate.TAKEN
            told = tell(newest)
            if not (told or forget):
                return Fate.UNTOLD
            found.remove()
            return Fate.TOLD if told else Fate.FORGOTTEN
    except Alive:
        return Fate.ALIVE
    except Taken:
        return Fate.TAKEN
    except OSError:
        return Fate.UNTOLD


def _clear_away(lock: str) -> None:
    """Delete what tells nothing any more and belongs to nobody: of a rank that was killed as it began, or has ended."""
    try:
        with claim(lock) as found:
            found.remove()
    except (Alive, Taken, OSError):
        pass


def _read(lock: str) -> LastWords | None:
    return _decoded(*state_file.read(lock.removesuffix(LOCK) + STATE))


def _decoded(text: bytes | None, entered: bytes) -> LastWords | None:
    try:
        return None if text is None else last_words.decode(text, entered)
    except ValueError:
        return None


def _is_here(words: LastWords) -> bool:
    """Whether the rank's lock, if it has one, can be seen from here: its kernel is this one, or was here before."""
    said = words.identity
    return (said.boot == places.BOOT != "") or said.host == os.uname().nodename


def _is_ours(root: str) -> bool:
    try:
        found = os.lstat(root)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
