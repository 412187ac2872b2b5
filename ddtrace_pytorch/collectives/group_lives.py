"""When process groups come and go: told to whoever follows, by one layer around the functions that make and end them.

The layer stays for as long as we are switched on, so that nothing has to come off from under another one. Those around
`init_process_group` and `destroy_process_group` are :mod:`ddtrace_pytorch.instrumentation`'s, which tells here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ddtrace_pytorch.border import leave_no_trace

# What every group but the default one comes out of, whole and known to torch: `new_group` (the only one in 2.0),
# `new_subgroups` and `init_device_mesh` call one of them.
_MAKERS = ("_new_group_with_tag", "split_group", "shrink_group")
Made = Callable[[Any], object]
Going = Callable[[Any], object]
# What making a group goes by where it is told of who waits in it.
NEW_GROUP, SPLIT_GROUP = MAKING = ("new_group", "split_group")
# Called with what was raised, if anything, when the making of a group is over.
Ended = Callable[[BaseException | None], object]
# Called before ranks wait for each other to make a group, with what that goes by, the group whose ranks these are
# (None: the world's), and a list that gets what is called when it is over.
Making = Callable[[str, Any, list[Ended]], object]


class _Waited(NamedTuple):
    """How ranks wait for each other in a maker. `name`: what that goes by; `unless`, `among`: the maker's parameters
    that say that they don't, and which group's ranks all have to call it; empty where it has none."""

    name: str
    unless: str = ""
    among: str = ""


_NEW = _Waited(NEW_GROUP, unless="use_local_synchronization")
_WAITED = {"_new_group_with_tag": _NEW, "new_group": _NEW, "split_group": _Waited(SPLIT_GROUP, among="parent_pg")}


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

    def _making(self, waited: _Waited, argument: Callable[[str], Any], over: list[Ended]) -> None:
        if argument(waited.unless):
            return
        for _, _, making in tuple(self._followers.values()):
            if making is not None:
                making(waited.name, argument(waited.among), over)

    def around_maker(self, c10d: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`name`: torch's for `original`, which others may have put something of their own in the place of."""
        waited = _WAITED.get(name)
        positions = _positions(original)

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            over: list[Ended] = []
            try:
                if waited is not None:
                    self._making(waited, functools.partial(_argument, positions, args, kwargs), over)
                group = original(*args, **kwargs)
                for end in over:
                    end(None)
            except BaseException as error:
                for end in over:
                    end(error)
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


def _positions(function: Callable[..., Any]) -> dict[str, int]:
    """Where each parameter is among those given by position; of a function that doesn't say, nothing is known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {one.name: number for number, one in enumerate(parameters) if one.kind is one.POSITIONAL_OR_KEYWORD}


def _argument(positions: Mapping[str, int], args: Sequence[Any], kwargs: Mapping[str, Any], parameter: str) -> Any:
    position = positions.get(parameter, len(args))
    return args[position] if position < len(args) else kwargs.get(parameter)
