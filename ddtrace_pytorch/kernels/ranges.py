"""Ranges (`record_function`) that outlive the profile they were opened in.

One that is closed while another profiler is on writes where the first one's memory was (*ran*, 2.5: ``free(): invalid
pointer``). So those that are open when a window of ours ends are never closed. Those of a profile of the user's can't
be watched without being seen in it: after one, they are looked for.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.border import leave_no_trace, safely

# What torch opens around each optimizer's step (windows begin and end there, and it is closed at once), and what a
# schedule of the profiler has around each of its steps, and keeps when it is closed.
_TORCHS = ("Optimizer.step#", "ProfilerStep#")


class Ranges:
    """Those of this process."""

    def __init__(self) -> None:
        # Holding them, so that their ids stay theirs.
        self._open: dict[int, Any] = {}
        # What would be closed by being forgotten.
        self._unclosed: list[Any] = []
        self._give_back: Callable[[], None] | None = None

    @safely("watch ranges")
    def begin(self, torch: Any) -> None:
        """A window of ours begins to record."""
        if self._give_back is None:
            self._give_back = self._watch(torch.autograd.profiler.record_function)

    @safely("leave ranges unclosed")
    def end(self) -> None:
        """It is over."""
        if self._give_back is None:
            return
        give_back, self._give_back = self._give_back, None
        give_back()
        for one in self._open.values():
            if not _is_torchs(one):
                one.run_callbacks_on_exit = False
                self._unclosed.append(one.record)
        self._open.clear()

    def left_by_the_user(self, torch: Any) -> bool:
        """Whether one may be open that was opened in a profile that is over. Takes some ms."""
        kind = torch.autograd.profiler.record_function
        return any(
            one.record is not None and one.run_callbacks_on_exit and not _is_torchs(one)
            for one in gc.get_objects()
            if type(one) is kind
        )

    def _watch(self, kind: Any) -> Callable[[], None]:
        enter, leave = kind.__enter__, kind.__exit__

        @functools.wraps(enter)
        def entered(one: Any) -> Any:
            result = enter(one)
            if self._give_back is not None:
                self._open[id(one)] = one
            return result

        @functools.wraps(leave)
        def left(one: Any, *why: Any) -> Any:
            self._open.pop(id(one), None)
            try:
                return leave(one, *why)
            except BaseException as error:
                leave_no_trace(error)
                raise

        def give_back() -> None:
            # Who has wrapped these since goes on to call them.
            if kind.__enter__ is entered:
                kind.__enter__ = enter
            if kind.__exit__ is left:
                kind.__exit__ = leave

        kind.__enter__, kind.__exit__ = entered, left
        return give_back


def _is_torchs(one: Any) -> bool:
    return str(one.name).startswith(_TORCHS)
