"""The step under way, which all that is told of a training is stamped with. No torch in here.

:mod:`ddtrace_pytorch.training.steps` says when one step ends and the next begins; everybody else reads
:attr:`Progress.step`, and keeps the :class:`Step` where it will matter later whether that got a span.
"""

from __future__ import annotations

import random
from ctypes import c_int64

_random = random.Random(random.SystemRandom().getrandbits(64))


class Step:
    """One step of the training.

    `number`: of the whole training; `relative`: since it was begun or resumed, from 1 on; both None as long as it isn't
    known that there are steps. `sampled`: whether it gets a span, None until its end. `tags`: words that somebody put
    on it, in their order.
    """

    __slots__ = ("_span_id", "number", "relative", "sampled", "tags")

    def __init__(self, number: int | None = None, relative: int | None = None) -> None:
        self.number = number
        self.relative = relative
        self.sampled: bool | None = None
        self.tags: dict[str, None] = {}
        self._span_id = 0

    @property
    def span_id(self) -> int:
        """Of its span, if it gets one. For the Pulse alone: most get none, and random numbers take their time."""
        self._span_id = self._span_id or _random.getrandbits(63) | 1
        return self._span_id


class Progress:
    """Where this process is in its training."""

    def __init__(self) -> None:
        self.step = Step()
        self._number = self._nowhere = c_int64()

    def begin(self, step: Step) -> None:
        """`step` is under way now."""
        self.step = step
        number = 0 if step.number is None else step.number + 1
        # Without a call, where the memory could be given back between looking and writing.
        self._number.value = number

    def write_to(self, memory: int) -> None:
        """Write each step's number, from 1 on, to the 8 bytes at that address, which outlive the process; 0: none."""
        self._number = c_int64.from_address(memory) if memory else self._nowhere
        # Not begin(), which would set the training back where that is a step further meanwhile.
        number = self.step.number
        self._number.value = 0 if number is None else number + 1

    def tag(self, word: str) -> None:
        """Put `word` on the step under way."""
        self.step.tags[word] = None
