"""Which calls are under way on a thread, as its stack has it.

A flag that is set before a call and reset after it stays set where a signal's handler raises in between, whatever
``finally`` there is. So a flag only says that it is worth looking here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from ddtrace_pytorch.stalls import doing


def code_in(function: Callable[..., Any], name: str) -> CodeType:
    """Of the function `name` that is defined in `function`: all those it makes run the same."""
    codes: Any = function
    return next(one for one in codes.__code__.co_consts if isinstance(one, CodeType) and one.co_name == name)


def calls_of(code: CodeType, frame: FrameType | None = None) -> int:
    """How many calls that run `code` are on the stack, from `frame` on, or here."""
    many = 0
    frame = frame or sys._getframe(1)
    while frame is not None:
        many += frame.f_code is code
        frame = frame.f_back
    return many


def frames_of(frame: FrameType | None) -> list[doing.Frame]:
    """All of a stack, innermost first. Which line a frame is at takes some microseconds to find out: of torch's own
    frames it is told where they will be shown."""
    found: list[doing.Frame] = []
    while frame is not None:
        file = frame.f_code.co_filename
        told = len(found) < doing.FRAMES or "/torch/" not in file
        found.append((file, frame.f_code.co_name, (frame.f_lineno or 0) if told else 0))
        frame = frame.f_back
    return found
