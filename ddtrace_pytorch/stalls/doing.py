"""What a main thread is at, from its frames. Pure.

Frames are innermost first, each ``(file, function, line)``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

Frame = tuple[str, str, int]

FRAMES = 20

# By parts of paths; whatever matches first, of all frames, is what the thread is at: a collective inside a checkpoint
# waits for the others, a compiled optimizer that is being compiled compiles, a dataset that loads tensors loads data.
_SIGNS = (
    # Work.wait is torch's C++, under a wrapper of ours.
    ("collective", ("torch/distributed/distributed_c10d.py", "ddtrace_pytorch/collectives/")),
    # Files that run compiled code too (eval_frame.py, all of _functorch) tell nothing.
    (
        "compile",
        ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py", "torch/_inductor/async_compile.py"),
    ),
    ("data", ("torch/utils/data/",)),
    ("checkpoint", ("torch/distributed/checkpoint/", "torch/serialization.py")),
    ("optimizer", ("torch/optim/",)),
)

# `/lib/python3.11/` is the standard library, unless it goes on to the installed packages.
_INSTALLED = re.compile(r"/(site|dist)-packages/")
_STANDARD = re.compile(r"^<|/lib/python3[.\d]*/(?!(site|dist)-packages/)")
# ddtrace is among us: it calls us in a signal's handler.
_OURS = re.compile(r"/ddtrace_pytorch/|/(site|dist)-packages/ddtrace/")
# What a user did not write.
_NOBODYS = re.compile(
    rf"{_STANDARD.pattern}|{_OURS.pattern}|/(site|dist)-packages/(torch|wrapt|_pytest|pytest)/|/pytorch/torch/"
)

_SPELLED = re.compile(r"(?P<file>.+):(?P<line>\d+) (?P<function>.+)")


def theirs(frames: Sequence[Frame]) -> list[Frame]:
    """`frames` without ours, and those of the standard library that ours call: what the thread would show if we weren't
    there."""
    kept: list[Frame] = []
    at_our_work = False
    for frame in reversed(frames):
        file = frame[0].replace(os.sep, "/")
        ours = _OURS.search(file) is not None
        at_our_work = ours or (at_our_work and _STANDARD.search(file) is not None)
        if not at_our_work:
            kept.append(frame)
    return kept[::-1]


def doing(frames: Sequence[Frame]) -> str:
    """``collective``, ``compile``, ``data``, ``checkpoint``, ``optimizer``, or ``user`` for all else."""
    files = {file.replace(os.sep, "/") for file, _, _ in frames}
    for name, signs in _SIGNS:
        if any(sign in file for file in files for sign in signs):
            return name
    return "user"


def spelled(frames: Sequence[Frame], limit: int = FRAMES) -> tuple[str, ...]:
    """The innermost `limit` frames as ``file:line function``. The user's own innermost one is always among them: if it
    is deeper, it takes the place of the last."""
    words = [f"{file}:{line} {function}" for file, function, line in frames]
    shown, own = words[:limit], own_frame(words)
    if own is not None and own not in shown:
        shown[-1:] = [own]
    return tuple(shown)


def own_frame(words: Sequence[str]) -> str | None:
    """The innermost of some :func:`spelled` frames that the user wrote: outside the installed packages if there is
    one, else outside torch, the standard library and this package."""
    candidates = [one for one in words if not _NOBODYS.search(one)]
    return next((one for one in candidates if not _INSTALLED.search(one)), candidates[0] if candidates else None)


def short(word: str) -> str:
    """A :func:`spelled` frame with the file's name alone: ``train.py:88 load_batch``."""
    parts = _SPELLED.fullmatch(word)
    return f"{os.path.basename(parts['file'])}:{parts['line']} {parts['function']}" if parts else word
