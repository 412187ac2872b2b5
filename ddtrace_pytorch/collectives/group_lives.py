"""When process groups come and go: told to whoever follows, by one layer around the functions that make and end them.

The layer stays for as long as we are switched on, so that nothing has to come off from under another one. Those around
`init_process_group` and `destroy_process_group` are :mod:`ddtrace_pytorch.instrumentation`'s, which tells here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.border import leave_no_trace

# What every group but the default one comes out of, whole and known to torch: `new_group` (the only one in 2.0),
# `new_subgroups` and `init_device_mesh` call one of them.
_MAKERS = ("_new_group_with_tag", "split_group", "shrink_group")
Made = Callable[[Any], object]
Going = Callable[[Any], object]


def makers(c10d: Any) -> list[str]:
    """The names of the functions of torch's module that make groups."""
    return [name for name in _MAKERS if hasattr(c10d, name)] or ["new_group"]


class GroupLives:
    """Followers come and go, groups too; what a follower raises reaches the user, so it must not."""

    def __init__(self) -> None:
        # Adding, removing and copying are one step each: a fork leaves no lock locked.
        self._followers: dict[object, tuple[Made, Going | None]] = {}

    def follow(self, made: Made, going: Going | None = None) -> Callable[[], None]:
        """Call ``made(process group)`` after one was made that this rank is in, and ``going(process group)`` before one
        is ended (None: all of them are). Gives what ends that."""
        key = object()
        self._followers[key] = (made, going)

        def unfollow() -> None:
            self._followers.pop(key, None)

        return unfollow

    def made(self, process_group: Any) -> None:
        for made, _ in tuple(self._followers.values()):
            made(process_group)

    def going(self, process_group: Any | None) -> None:
        for _, going in tuple(self._followers.values()):
            if going is not None:
                going(process_group)

    def around_maker(self, c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            try:
                group = original(*args, **kwargs)
            except BaseException as error:
                leave_no_trace(error)
                raise
            if isinstance(group, c10d.ProcessGroup):  # torch's marks for "not a member" are none
                self.made(group)
            return group

        return make

    def around_ender(self, c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(*args: Any, **kwargs: Any) -> Any:
            group = args[0] if args else kwargs.get("group")
            if group is None or isinstance(group, c10d.ProcessGroup):
                self.going(None if group is c10d.GroupMember.WORLD else group)
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_trace(error)
                raise

        return end
