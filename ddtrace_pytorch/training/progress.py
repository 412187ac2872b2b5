"""The step under way, which all that is told of a training is stamped with. No torch in here.

:mod:`ddtrace_pytorch.training.steps` says when one step ends and the next begins; everybody else reads
:attr:`Progress.step`, and keeps the :class:`Step` where it will matter later whether that got a span.
"""

from __future__ import annotations

import random

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

    def tag(self, word: str) -> None:
        """Put `word` on the step under way."""
        self.step.tags[word] = None
