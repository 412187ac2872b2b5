"""Between the user's threads and ours: what was recorded and is not yet told. No torch in here.

A thread that records adds a row of plain values to one deque, in one go of the interpreter's, without a lock: none that
a fork could leave locked, or that a signal handler could wait for. The values lie in the deque one after the other,
because a tuple for each row would be something more for the garbage collector to look through, which takes tens of
milliseconds where torch is loaded.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from ddtrace_pytorch.records.on_gpu import Cuda, OnGpu
from ddtrace_pytorch.training.progress import Progress, Step

if TYPE_CHECKING:
    from ddtrace_pytorch.records.user_span import Open

SPAN, EVENT, SCALAR = "user_span", "event", "scalar"

# How many are held: until there is a session, and between two of its beats.
HELD_BEFORE = 10_000
HELD = 65_536
# So many names are each counted by themselves, and the others together.
MOST_NAMES = 1_000
OTHER = "(other)"
# For whoever takes them, while another does.
TURN_SECONDS = 1.0


class Failure(NamedTuple):
    """What a span ended with. `stack`: file, line and function, the outermost call first."""

    type: str
    message: str
    stack: tuple[tuple[str, int, str], ...]


class Row(NamedTuple):
    """One record. Times in ns on the monotonic clock.

    `number`: how many were made before. `at`: when it happened, or was over. `values`: a span's or event's attributes,
    or the numbers of a scalar; `types`: of what it has that is no number. `tags`: those of the step then. `code` and
    `instruction`: where in the user's code; `code` may be the place itself, in words. `task`: a number for the asyncio
    task. `parent`: the span around it.

    `of_step`: the number that the user gave a scalar. Of a span only: when it `started`, its `id`; whether it was
    `chosen` to be sent (None: that is decided with its step); whether the step was the same at its end (`within`); what
    it `failed` with.
    """

    kind: str
    number: int
    at: int
    name: str
    values: dict[str, Any]
    step: Step
    tags: tuple[str, ...]
    code: CodeType | str
    instruction: int
    thread: str
    task: int | None
    parent: Open | None
    types: dict[str, Any] | None = None
    of_step: tuple[int | None, int | None] | None = None
    started: int = 0
    id: int = 0
    chosen: bool | None = None
    within: bool = True
    failed: Failure | None = None


WIDTH = len(Row._fields)


class Recorder:
    """One process'. `numbers` gives each record its number; `ids` the spans' ids; `attended`: there is a
    session."""

    def __init__(
        self,
        progress: Progress,
        sample: int,
        set_step: Callable[[int, int | None], object],
        attend: Callable[[], object],
    ) -> None:
        """Of spans outside of steps, the first of each name is sent, and one in `sample` (0: no other). `attend` is
        called on the user's thread, for each record that is made while there is no session."""
        self.progress = progress
        self.set_step = set_step
        self.on_gpu = OnGpu(lambda: Cuda(sys.modules["torch"]))
        self.numbers = count(1)
        # One after the other, from anywhere in the lower half of what there is.
        self.ids = count(random.SystemRandom().getrandbits(62) | 1)
        self._raw: deque[Any] = deque()
        self._most = HELD_BEFORE * WIDTH
        self._refused = count()
        self._refused_read = self._refused_told = 0
        self._sample = sample
        self._seen: dict[str, int] = {}
        self.attend = attend
        self.attended = False
        self._turn = threading.Lock()

    def add(self, row: tuple[Any, ...]) -> None:
        """One record: the values of a :class:`Row`, all of them. Where there is no room it is counted."""
        raw = self._raw
        if len(raw) < self._most:
            raw.extend(row)
        else:
            next(self._refused)
        if not self.attended:
            self.attend()

    def chooses(self, name: str) -> bool:
        """Whether a span of that name that begins outside of steps is one of those that are sent."""
        seen = self._seen
        if name not in seen and len(seen) >= MOST_NAMES:
            name = OTHER
        many = seen[name] = seen.get(name, -1) + 1
        return many == 0 or (self._sample > 0 and many % self._sample == 0)

    @property
    def waiting(self) -> bool:
        """Whether there is something to be told."""
        return bool(self._raw)

    def begin(self) -> None:
        """A session takes them from now on."""
        self._most = HELD * WIDTH
        self.attended = True

    def rest(self) -> None:
        """There is no session any more."""
        self._most = HELD_BEFORE * WIDTH
        self.attended = False

    def take(self) -> tuple[Iterator[Row], int]:
        """What was recorded since the last time, oldest first, and how many were refused since then.

        The rows are made one by one as they are asked for: thousands at a time would bring the garbage collector on.
        """
        if not self._turn.acquire(timeout=TURN_SECONDS):
            return iter(()), 0
        try:
            raw = self._raw
            pop = raw.popleft
            values = iter([pop() for _ in range(len(raw) // WIDTH * WIDTH)])
            rows = map(Row._make, zip(*[values] * WIDTH, strict=True))
            # A counter can only be read by taking a number from it, so our own readings are taken off again.
            refused = next(self._refused) - self._refused_read
            self._refused_read += 1
            fresh, self._refused_told = refused - self._refused_told, refused
            return rows, fresh
        finally:
            self._turn.release()
