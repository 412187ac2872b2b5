"""Which lines need not be parsed, because their number alone says that they are not drawn. Pure.

Parsing is most of the work, and of a large job most lines are thinned out. What is read here of a line is what
:class:`~ddtrace_pytorch.timeline.selection.Window` and :class:`~ddtrace_pytorch.timeline.selection.Thinning` would read
of the record. Where that is not certain the line is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ddtrace_pytorch.timeline.selection import COARSE, Thinning, Window

# In the order in which records are written. A quotation mark inside of text is escaped, so that none of these is found
# in it; where a record holds names of the user's, what comes before the number says that it isn't one of theirs.
_NUMBER = {
    b"step": re.compile(rb'\{"type":"step","ts":\d+,"step":(\d+),'),
    b"beat": re.compile(rb'\{"type":"beat","ts":\d+,"seq":(\d+)[,}]'),
    b"scalar": re.compile(rb'\},"step":(\d+)[,}]'),
    b"user_span": re.compile(rb'\{"type":"user_span","ts":\d+,"name":"(?:[^"\\]|\\.)*","seq":\d+,"step":(\d+)[,}]'),
    b"call": re.compile(rb'"key":(\d+)[,}]'),
}
_OF_A_STEP = (b"step", b"scalar", b"user_span")
_FAILED = b'"error":'


def number_of(kind: bytes, line: bytes) -> int | None:
    """What a line is counted by; None if that isn't certain."""
    pattern = _NUMBER.get(kind)
    found = pattern.search(line) if pattern is not None else None
    return int(found[1]) if found is not None and len(found[1]) < 20 and line.endswith(b"}\n") else None


def sieve(window: Window | None, thinning: Thinning) -> Callable[[bytes, bytes], str]:
    """What says of a line's type and the line that it is ``outside`` of the window or ``thinned`` out; else nothing."""
    every = {
        kind: thinning.coarse if kind.decode() in COARSE else thinning.fine for kind in _NUMBER
    }  # fmt: skip

    def look(kind: bytes, line: bytes) -> str:
        number = number_of(kind, line)
        if number is None:
            return ""
        if window is not None:
            if kind not in _OF_A_STEP:
                return ""
            if number not in window.steps:
                return "outside"
        if number % every[kind] and not (kind == b"user_span" and _FAILED in line):
            return "thinned"
        return ""

    return look
