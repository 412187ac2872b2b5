"""Whether an exception was caught, found out on threads that it doesn't pass through."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from ddtrace_pytorch.stack import frames_of
from ddtrace_pytorch.stalls import doing

# What our own code does with an exception, and torch's when it hands one from thread to thread, is done by then.
PASSES_NS = 10**9 // 2
# Not as a class of the user's may have it.
_context_of = BaseException.__dict__["__context__"].__get__


class Thrown:
    """An exception that is on its way on this thread.

    While it is in a handler, a `finally` or a `with`, the interpreter says that the thread handles it. Once it has
    ended what the thread was running, the outermost frame is gone, and what runs then has another one. So who runs in
    code of the user's under the same outermost frame, and doesn't handle it, has caught it. What is raised on a thread
    of torch's is raised once more where that was waited for: there a later step tells.
    """

    def __init__(self, error: BaseException, step: object) -> None:
        """`step`: that of the training which is under way."""
        # Not the exception itself, which would keep all that its frames hold.
        self._error = id(error)
        self._step = step
        self._thread = threading.get_ident()
        self._of_main = threading.current_thread() is threading.main_thread()
        self._bottom = _outermost(sys._getframe())
        self._at = time.monotonic_ns()
        self._caught = False

    def is_caught(self, step: object) -> bool:
        """Whether it is known to be; `step`: the one under way now."""
        if not self._caught and time.monotonic_ns() - self._at >= PASSES_NS:
            # First: who handles nothing and has the frames after that has not been at its end in between.
            handled = self._is_handled()
            self._caught = not handled and (self._is_passed() or (not self._of_main and step is not self._step))
        return self._caught

    def _is_handled(self) -> bool:
        """Whether some thread is in a handler of it, or of what was raised in one."""
        # A tuple before Python 3.12.
        active = [one[1] if isinstance(one, tuple) else one for one in sys._current_exceptions().values()]
        seen: set[int] = set()
        while active:
            error = active.pop()
            if error is None or id(error) in seen:
                continue
            seen.add(id(error))
            active.append(_context_of(error))
        return self._error in seen

    def _is_passed(self) -> bool:
        """Whether the thread runs code of the user's, as part of what it was running then."""
        frame = sys._current_frames().get(self._thread)
        if frame is None or _outermost(frame) != self._bottom:
            return False
        return doing.own_frame(doing.spelled(doing.theirs(frames_of(frame)))) is not None


def _outermost(frame: FrameType) -> tuple[str, str]:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_code.co_name
