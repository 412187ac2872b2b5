"""Which lines need not be parsed, because their number alone says that they are not drawn. Pure.

Parsing is most of the work, and of a large job most lines are thinned out. What is read here of a line is what
:class:`~ddtrace_pytorch.timeline.selection.Window` and :class:`~ddtrace_pytorch.timeline.selection.Thinning` would read
of the record. Where that is not certain the line is parsed.
"""

from __future__ import annotations

import re
from collections import Counter

from ddtrace_pytorch.runlog.reader import Sift
from ddtrace_pytorch.timeline.selection import COARSE, Thinning, Window

# By type, what is before and after the number, in the order in which records are written. A quotation mark inside of
# text is escaped, so that none of these is found in it.
_TEXT = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_AROUND = {
    "call": (rb'"op":' + _TEXT + rb',"group":' + _TEXT + rb',"key":', b"[,}]"),
    "step": (rb'"step":', b","),
    "user_span": (rb'"name":' + _TEXT + rb',"seq":\d+,(?:"attributes":\{[^{}]*\},)?"step":', b"[,}]"),
    "scalar": (rb'(?:"seq":\d+,)?"metrics":\{[^{}]*\},(?:"types":\{[^{}]*\},)?"step":', b"[,}]"),
    "beat": (rb'"seq":', b"[,}]"),
}
KINDS = tuple(_AROUND)
_OF_A_STEP = ("step", "scalar", "user_span")
_NUMBERED = re.compile(
    rb'\{"type":"(?:' + b"|".join(
        kind.encode() + rb'","ts":\d+,' + before + rb"(\d{1,19})" + after for kind, (before, after) in _AROUND.items()
    ) + b")"
)  # fmt: skip
_FAILED = b'"error":'
_END = ord("}")


def number_of(line: bytes) -> int | None:
    """What a line is counted by; None if that isn't certain."""
    found = _NUMBERED.match(line)
    return int(found[found.lastindex or 0]) if found is not None and line[-1] == _END else None


# How many lines, by their type and why they are left out: ``outside`` of the window, or ``thinned`` out.
LeftOut = Counter[tuple[str, str]]


def sieve(window: Window | None, thinning: Thinning, left_out: LeftOut) -> Sift | None:
    """What takes out the lines that needn't be drawn, and counts them in `left_out`; None if all have to be."""
    if window is None and thinning == Thinning():
        return None
    every = [1, *(thinning.coarse if kind in COARSE else thinning.fine for kind in KINDS)]
    within = [None, *(window.steps if window is not None and kind in _OF_A_STEP else None for kind in KINDS)]
    # Of a window only what says its step: when the rest was says the whole record.
    sure = [False, *(window is None or kind in _OF_A_STEP for kind in KINDS)]
    match, span = _NUMBERED.match, KINDS.index("user_span") + 1

    def sift(lines: list[bytes]) -> list[bytes]:
        kept, outside, thinned = [], [0] * len(every), [0] * len(every)
        for line in lines:
            found = match(line)
            if found is not None and line[-1] == _END:
                kind = found.lastindex or 0
                number, steps = int(found[kind]), within[kind]
                if steps is not None and number not in steps:
                    outside[kind] += 1
                    continue
                if number % every[kind] and sure[kind] and not (kind == span and _FAILED in line):
                    thinned[kind] += 1
                    continue
            kept.append(line)
        left_out.update({(kind, "outside"): many for kind, many in zip(KINDS, outside[1:], strict=True) if many})
        left_out.update({(kind, "thinned"): many for kind, many in zip(KINDS, thinned[1:], strict=True) if many})
        return kept

    return sift
