"""When process groups come and go: the functions that make and end them, instrumented in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.collectives import in_place

# What everything else that makes or ends a group goes through (new_subgroups, init_device_mesh), and where torch knows
# the ranks of a new one; the default group is made before there is a session.
MAKERS = ("_new_group_with_tag", "split_group", "shrink_group")
ENDERS = ("destroy_process_group", "_abort_process_group")


def watch(
    distributed: Any, made: Callable[[Any], object], going: Callable[[Any], object] | None = None
) -> list[Callable[[], None]]:
    """Call ``made(process group)`` after one was made that this rank is in, and ``going(process group)`` before one is
    ended (None: all of them are). Both must not raise. Gives what undoes it."""
    c10d = distributed.distributed_c10d

    def around_maker(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if isinstance(result, c10d.ProcessGroup):
                made(result)
            return result

        return make

    def around_ender(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(group: Any = None) -> Any:
            if going is not None and (group is None or isinstance(group, c10d.ProcessGroup)):
                going(None if group is c10d.GroupMember.WORLD else group)
            return original(group)

        return end

    layers = [(name, around_maker) for name in MAKERS]
    if going is not None:
        layers += [(name, around_ender) for name in ENDERS]
    undo: list[Callable[[], None]] = []
    for name, around in layers:
        if hasattr(c10d, name):
            undo += in_place.place(distributed, name, around)[0]
    return undo
