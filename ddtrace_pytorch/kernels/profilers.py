"""Whether a profiler of the user's is there, in any state of its schedule, and who of us has to give way to it.

torch says of a profiler that it is on only while it records: not while its schedule waits or warms up, and of its own
thread alone. A second profiler that starts empties the first one. So what begins and ends them is watched.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ddtrace_pytorch import in_place
from ddtrace_pytorch.border import leave_no_trace, safely
from ddtrace_pytorch.kernels import teardown
from ddtrace_pytorch.kernels.ranges import Ranges

Undo = Callable[[], None]

# What torch's own others are made of, and where none of the user's code runs.
_KINETOS = "autograd.profiler.profile"
# Where each class is, and by which methods one of it begins and ends.
_CLASSES = (
    ("profiler.profile", "start", "stop"),
    ("profiler.profiler._KinetoProfile", "start", "stop"),
    (_KINETOS, "__enter__", "__exit__"),
    ("autograd.profiler.emit_nvtx", "__enter__", "__exit__"),
    ("autograd.profiler.emit_itt", "__enter__", "__exit__"),
)


class Ours(Protocol):
    """A window of ours that is open, or the sampler of kernels."""

    def give_way(self) -> None:
        """A profiler is about to begin, on this thread."""


class Profilers:
    """Those of this process, whatever sessions there are. `ours`: a window of ours that is open; `sampler`: of kernels;
    `none_yet`: none of the user's has been seen."""

    def __init__(self) -> None:
        self.ours: Ours | None = None
        self.sampler: Ours | None = None
        self.none_yet = True
        self.ranges = Ranges()
        self._one_was_there = False
        # By the id of each that has begun and not ended; one that is forgotten unended goes with its last reference.
        self._begun: dict[int, weakref.ref[Any]] = {}

    def watch(self, torch: Any) -> list[Undo]:
        """Be told when one begins and ends; gives what undoes it."""
        undo: list[Undo] = []
        for path, begins, ends in _CLASSES:
            owner = functools.reduce(lambda found, name: getattr(found, name, None), path.split("."), torch)
            if owner is None:
                continue
            around_end = functools.partial(self._around_end, torch if path == _KINETOS else None)
            for name, around in ((begins, self._around_begin), (ends, around_end)):
                if name in vars(owner):
                    undo += in_place.place_in([owner], name, around)[0]
        return undo

    def of_the_user(self, torch: Any) -> bool:
        """Whether there is one now that isn't ours, or a range that was opened in one may still be open. Called on the
        thread that trains."""
        if self._begun:
            return True
        if self.ours is not None:
            return False
        profiler = torch.autograd.profiler
        if getattr(profiler, "_is_profiler_enabled", False) or torch._C._autograd._profiler_enabled():
            self._saw_one()
            return True
        if self._one_was_there:
            self._one_was_there = self.ranges.left_by_the_user(torch)
        return self._one_was_there

    def _around_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def begin(self_: Any, *args: Any, **kwargs: Any) -> Any:
            is_new = self._begins(self_)
            try:
                return original(self_, *args, **kwargs)
            except BaseException as error:
                leave_no_trace(error)
                if is_new:
                    self._ended(self_)
                raise

        return begin

    def _around_end(self, torch: Any | None, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch`: whose CUPTI is let go of by it."""

        @functools.wraps(original)
        def end(self_: Any, *args: Any, **kwargs: Any) -> Any:
            threads = teardown.threads(torch) if torch else None
            try:
                return original(self_, *args, **kwargs)
            except BaseException as error:
                leave_no_trace(error)
                raise
            finally:
                self._ended(self_)
                teardown.wait(torch, threads)

        return end

    @safely("give way to a profiler of yours")
    def _begins(self, profiler: Any) -> bool:
        """Whether it hadn't yet."""
        key, is_new = id(profiler), id(profiler) not in self._begun

        def forget(gone: weakref.ref[Any]) -> None:
            if self._begun.get(key) is gone:
                del self._begun[key]

        self._begun[key] = weakref.ref(profiler, forget)
        self._saw_one()
        for one in (self.ours, self.sampler):
            if one is not None:
                one.give_way()
        return is_new

    def _saw_one(self) -> None:
        self._one_was_there, self.none_yet = True, False

    def _ended(self, profiler: Any) -> None:
        self._begun.pop(id(profiler), None)
