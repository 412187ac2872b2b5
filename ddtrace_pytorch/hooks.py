"""Call your own functions as collectives start and end, and as process groups are made.

    from ddtrace_pytorch import hooks

    handle = hooks.register_collective_start_hook(lambda status: print(status.operation, status.pg_name))
    ...
    handle.remove()

Register whenever you like: before or after tracing is switched on and the process group is made. Until then, and in
processes where it isn't switched on, nothing is called. See ``docs/collectives.md``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddtrace_pytorch.border import run_theirs, safely, warn_first

__all__ = [
    "CollectiveStatus",
    "Handle",
    "register_collective_end_hook",
    "register_collective_start_hook",
    "register_process_group_hook",
]

# A hook that fails this often in a row is called no more.
FAILURES = 10


@dataclass(frozen=True)
class CollectiveStatus:
    """One collective, as it starts or ends.

    `pg_name` is torch's name of the process group, the one that process-group hooks get. `sequence_number` counts the
    collectives on that group, the same on each of its ranks (0: a transfer between two ranks, which has none).
    `timestamp` is when this start or end was first noticed, in ns since the epoch. `duration`, of an end only, in ms:
    until the collective was complete where `time_source` is ``completion``, until the call came back where it is
    ``issue``. `drop_count`: how many events of this kind were lost between the one before and this one.
    """

    pg_name: str
    backend: str
    sequence_number: int
    operation: str
    timestamp: int
    duration: float | None = None
    drop_count: int = 0
    time_source: str | None = None


class Handle:
    """What registering gives: :meth:`remove` takes the hook out again."""

    def __init__(self, function: Callable[..., object], among: dict[Handle, None]) -> None:
        if not callable(function):
            raise TypeError(f"a hook has to be callable; this is {function!r}")
        self._function = function
        self._name = str(getattr(function, "__qualname__", None) or type(function).__qualname__)
        say = functools.partial(warn_first, about=f"the hook {self._name}")
        self._guarded = safely(f"run the hook {self._name}", say)(self._run)
        self._among = among
        self._failures = 0

    def remove(self) -> None:
        """Call the function no more. Removing twice changes nothing."""
        self._among.pop(self, None)
        _tell_followers()

    def call(self, *arguments: Any) -> None:
        """Call the function; what it raises is logged, and after ten times in a row it is removed."""
        if self._guarded(*arguments):
            self._failures = 0
            return
        self._failures += 1
        if self._failures == FAILURES:
            self.remove()
            warn_first(f"the hook {self._name} failed {FAILURES} times in a row and is called no more")

    def _run(self, *arguments: Any) -> bool:
        run_theirs(self._function, *arguments)
        return True


# In the order of registration. Dictionaries, because adding, removing and copying are one step each: no lock that a
# fork could leave locked.
starts: dict[Handle, None] = {}
ends: dict[Handle, None] = {}
process_groups: dict[Handle, None] = {}
_followers: dict[Callable[[], None], None] = {}


def register_collective_start_hook(function: Callable[[CollectiveStatus], object]) -> Handle:
    """Call `function` with the status of each collective that starts, on a thread of ours, while it is in flight."""
    return _register(function, starts)


def register_collective_end_hook(function: Callable[[CollectiveStatus], object]) -> Handle:
    """Call `function` with the status of each collective that has ended, on a thread of ours."""
    return _register(function, ends)


def register_process_group_hook(function: Callable[[Any, str], object]) -> Handle:
    """Call ``function(process_group, name)`` for each process group made from now on that this rank is in.

    On the thread that makes it, before that goes on: be quick.
    """
    return _register(function, process_groups)


def tell_of(process_group: Any, name: str) -> None:
    """For the instrumentation: `process_group` is new, and torch calls it `name`."""
    for handle in tuple(process_groups):
        handle.call(process_group, name)


def follow(follower: Callable[[], None]) -> None:
    """For the instrumentation: call `follower` now, and whenever a hook was registered or removed."""
    _followers[follower] = None
    follower()


def unfollow(follower: Callable[[], None]) -> None:
    _followers.pop(follower, None)


def _register(function: Callable[..., object], among: dict[Handle, None]) -> Handle:
    handle = Handle(function, among)
    among[handle] = None
    _tell_followers()
    if not _switched_on():
        warn_first(
            "a hook is registered, but tracing is not switched on in this process, so nothing will call it: "
            "call ddtrace_pytorch.patch(), or set DD_PATCH_MODULES=pytorch:true and start with ddtrace-run"
        )
    return handle


def _tell_followers() -> None:
    for follower in tuple(_followers):
        safely("take note of a hook")(follower)()


def _switched_on() -> bool:
    instrumentation = sys.modules.get("ddtrace_pytorch.instrumentation")
    if instrumentation is not None and instrumentation.is_on():
        return True
    # A door that is open switches us on when torch is imported.
    autoload = sys.modules.get("ddtrace_pytorch.autoload")
    return "torch" not in sys.modules and autoload is not None and autoload.opened_by is not None
