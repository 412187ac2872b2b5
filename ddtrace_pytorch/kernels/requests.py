"""A window that somebody asks a running job for: a file in its run log's directory, which every rank there sees.

It names the step that the window begins with, far enough ahead for all ranks to have seen it, so that they take the
same ones. It is for its owner alone to write, as the run log is: whoever could would have the job write files.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ddtrace_pytorch.border import safely, warn_first
from ddtrace_pytorch.kernels.schedule import Plan
from ddtrace_pytorch.runlog.schema import REQUEST
from ddtrace_pytorch.settings import BadValue, RankChoice, rank_choice

VERSION = 1
MOST_STEPS = 1000
MOST_WARMUP = 100
_LARGEST = 4096
_MOST = 10**15
# How often the directory is looked into.
LOOK_SECONDS = 1.0


class Malformed(ValueError):
    """It is no request, or not from somebody who may ask; the message says why."""


class Request(NamedTuple):
    """A window over the steps of `plan`, of these `ranks`."""

    plan: Plan
    ranks: RankChoice


def write(directory: str, request: Request) -> str:
    """Ask the job that writes its run log to `directory`; gives the path of the request.

    Raises:
        FileExistsError: another one waits there.
        OSError: it can't be written.
    """
    plan, path = request.plan, os.path.join(directory, REQUEST)
    told = {"version": VERSION, "first": plan.first, "steps": plan.active, "warmup": plan.warmup,
            "ranks": request.ranks.text}  # fmt: skip
    partial = f"{path}.{os.getpid()}.tmp"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(told).encode() + b"\n")
        # Not a rename, which would replace one that ranks have begun to see.
        os.link(partial, path)
    finally:
        os.unlink(partial)
    return path


def parse(text: bytes) -> Request:
    """The request that `text` is.

    Raises:
        Malformed: it is none.
    """
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed("it is no JSON") from None
    if not isinstance(told, dict) or told.get("version") != VERSION:
        raise Malformed(f"its version is not {VERSION}")
    try:
        ranks = rank_choice(told["ranks"]) if isinstance(told.get("ranks"), str) else None
    except BadValue as accepted:
        raise Malformed(f"its ranks are not {accepted}") from None
    if ranks is None:
        raise Malformed("it names no ranks")
    numbers = [
        _whole(told, name, least, most)
        for name, least, most in (("first", 1, _MOST), ("steps", 1, MOST_STEPS), ("warmup", 0, MOST_WARMUP))
    ]
    return Request(Plan(*numbers), ranks)


def _whole(told: dict[str, Any], name: str, least: int, most: int) -> int:
    value = told.get(name)
    if type(value) is not int or not least <= value <= most:
        raise Malformed(f"its {name} is not a whole number from {least} to {most}")
    return value


def read(path: str) -> Request:
    """The request at `path`.

    Raises:
        Malformed: it is none, or others may have written it.
        OSError: there is none, or it can't be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Malformed("it is no plain file")
        if found.st_uid != os.geteuid():
            raise Malformed(f"it belongs to user {found.st_uid}")
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Malformed("others than its owner may read or write it")
        text = os.read(descriptor, _LARGEST + 1)
    finally:
        os.close(descriptor)
    if len(text) > _LARGEST:
        raise Malformed("it is too long")
    return parse(text)


class Requests:
    """Those that one rank sees; on the thread that writes its run log."""

    def __init__(self, rank: int, ask: Callable[[Plan], object], is_over: Callable[[Plan], bool]) -> None:
        """`ask`: for a window; `is_over`: whether its steps have passed."""
        self._rank = rank
        self._ask = ask
        self._is_over = is_over
        self._looked = 0.0
        self._seen: tuple[int, int] | None = None
        self._plan: Plan | None = None

    @safely("look for requests of profiler windows")
    def look(self, directory: str) -> None:
        """See whether there is one, at most once a second; the first rank that is past it takes it away."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        path = os.path.join(directory, REQUEST)
        try:
            found = os.lstat(path)
        except OSError:
            return
        which = found.st_ino, found.st_mtime_ns
        if which != self._seen:
            self._seen, self._plan = which, None
            self._read(path)
        if self._plan is not None and self._is_over(self._plan):
            try:
                os.unlink(path)
            except OSError:
                pass

    def _read(self, path: str) -> None:
        try:
            request = read(path)
        except (Malformed, OSError) as error:
            warn_first(f"{path} is ignored: {error}", about=f"a request that can't be taken: {path}")
            return
        self._plan = request.plan
        if self._rank in request.ranks:
            self._ask(request.plan)
