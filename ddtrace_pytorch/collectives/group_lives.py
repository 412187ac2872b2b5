"""When process groups come and go: told to whoever follows, by one layer around the functions that make and end them.

The layer stays for as long as we are switched on, so that nothing has to come off from under another one. Those around
`init_process_group` and `destroy_process_group` are :mod:`ddtrace_pytorch.instrumentation`'s, which tells here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ddtrace_pytorch.border import leave_no_trace

# What every group but the default one comes out of, whole and known to torch: `new_group` (the only one in 2.0),
# `new_subgroups` and `init_device_mesh` call one of them.
_MAKERS = ("_new_group_with_tag", "split_group", "shrink_group")
Made = Callable[[Any], object]
Going = Callable[[Any], object]
# Called before a group is made for which all ranks of the world are waited for; gives what is called when that is over,
# with what was raised.
Making = Callable[[], Callable[[BaseException | None], object]]

# Of the makers, those that all ranks of the world have to call, unless told otherwise by the parameter of that name.
_ALL_CALL = ("_new_group_with_tag", "new_group")
_MEMBERS_ALONE = "use_local_synchronization"


def makers(c10d: Any) -> list[str]:
    """The names of the functions of torch's module that make groups."""
    return [name for name in _MAKERS if hasattr(c10d, name)] or ["new_group"]


class GroupLives:
    """Followers come and go, groups too; what a follower raises reaches the user, so it must not."""

    def __init__(self) -> None:
        # Adding, removing and copying are one step each: a fork leaves no lock locked.
        self._followers: dict[object, tuple[Made, Going | None, Making | None]] = {}

    def follow(self, made: Made, going: Going | None = None, making: Making | None = None) -> Callable[[], None]:
        """Call ``made(process group)`` after one was made that this rank is in, ``going(process group)`` before one
        is ended (None: all of them are), and ``making()`` before one is made. Gives what ends that."""
        key = object()
        self._followers[key] = (made, going, making)

        def unfollow() -> None:
            self._followers.pop(key, None)

        return unfollow

    def made(self, process_group: Any) -> None:
        for made, _, _ in tuple(self._followers.values()):
            made(process_group)

    def going(self, process_group: Any | None) -> None:
        for _, going, _ in tuple(self._followers.values()):
            if going is not None:
                going(process_group)

    def _making(self) -> Sequence[Callable[[BaseException | None], object]]:
        followers = tuple(self._followers.values())
        return [making() for _, _, making in followers if making is not None]

    def around_maker(self, c10d: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        waits_for_all = original.__name__ in _ALL_CALL
        parameters = list(inspect.signature(original).parameters) if waits_for_all else []
        position = parameters.index(_MEMBERS_ALONE) if _MEMBERS_ALONE in parameters else len(parameters)

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            alone = args[position] if len(args) > position else kwargs.get(_MEMBERS_ALONE)
            over = self._making() if waits_for_all and not alone else ()
            try:
                group = original(*args, **kwargs)
            except BaseException as error:
                for end in over:
                    end(error)
                leave_no_trace(error)
                raise
            for end in over:
                end(None)
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
