"""Who feeds a training, and who only looks on: which of the batches that are asked for begin a step. No torch in here.

After an optimizer has stepped, the next batch of one who fed that step begins the next. A stranger's, an evaluation's,
begins nothing: what is done with it belongs to the step that it follows. Unless an optimizer steps before anybody else
is asked: then it was the first batch of a new one's, as those of an epoch may be.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class _Stranger(Generic[T]):
    def __init__(self, first: T) -> None:
        self.first = first
        self.times = 0


class Feeding(Generic[T]):
    """Sources are numbers. `T`: a reading of the time."""

    def __init__(self) -> None:
        self._here: set[int] = set()
        self._next: set[int] = set()
        # Since the last optimizer step, in the order in which they were first asked.
        self._strangers: dict[int, _Stranger[T]] = {}

    def feeds(self, source: int) -> None:
        """`source` was asked for what the step under way needs."""
        self._here.add(source)

    def feeds_next(self, source: int) -> None:
        """The same for the next one, which has begun."""
        self._next.add(source)

    def asked(self, source: int, now: T) -> T | None:
        """`source` is asked after an optimizer has stepped: where the next step begins, if it does."""
        if source not in self._here:
            self._strangers.setdefault(source, _Stranger(now)).times += 1
            return None
        # One that is asked between two steps once, just before another, may feed the next one too.
        began = self._welcome(1)
        self._next.add(source)
        return now if began is None else began

    def over(self, source: int) -> None:
        """It had nothing any more."""
        self._strangers.pop(source, None)

    def fed_by(self) -> T | None:
        """An optimizer begins the next step, and nobody who fed this one was asked: where that step began, if strangers
        were. They were asked as often as the last of them; who evaluated before was asked more often."""
        last = next(reversed(self._strangers.values()), None)
        return None if last is None else self._welcome(last.times)

    def stepped(self) -> None:
        """An optimizer steps in the step under way."""
        self._here.update(self._strangers)
        self._strangers.clear()

    def ended(self) -> None:
        """The next step is the one under way."""
        if self._next:
            self._here, self._next = self._next, set()
        self._strangers.clear()

    def _welcome(self, times: int) -> T | None:
        """Have the last strangers that were asked so often at most feed the next step; since when."""
        began = None
        for source, stranger in reversed(self._strangers.items()):
            if stranger.times > times:
                break
            self._next.add(source)
            began = stranger.first
        self._strangers.clear()
        return began
