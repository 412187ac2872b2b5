"""Interrupts our code at each of its bytecodes, one after the other, as a signal's handler of the user's may."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Interrupt(Exception):
    """What the user's code raises in the midst of ours."""


def nothing() -> None:
    """What most handlers do."""


def interrupted_everywhere(
    run: Callable[[], object], *files: str, every: int = 1, handler: Callable[[], object] = nothing
) -> Iterator[int]:
    """Call `run` once for each bytecode that it runs in `files`, or one in so many, with `handler` called and an
    :class:`Interrupt` raised there; after each the caller may look at what is left."""
    for number in itertools.count(step=every):
        if not _interrupted(run, number, files, handler):
            return
        yield number


def _interrupted(run: Callable[[], object], number: int, files: tuple[str, ...], handler: Callable[[], object]) -> bool:
    left = number

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                handler()
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        run()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    assert left >= 0, f"the interrupt at bytecode {number} was swallowed"
    return False
