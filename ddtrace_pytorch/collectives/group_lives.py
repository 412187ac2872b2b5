"""When process groups come and go: the functions that make and end them, instrumented in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch.collectives import in_place

# What every group but the default one comes out of, whole and known to torch: `new_group` (the only one in 2.0),
# `new_subgroups` and `init_device_mesh` call one of them.
MAKERS = ("_new_group_with_tag", "split_group", "shrink_group")
DEFAULT_MAKER = "init_process_group"
ENDERS = ("destroy_process_group", "_abort_process_group")


def watch(
    distributed: Any,
    made: Callable[[Any], object],
    going: Callable[[Any], object] | None = None,
    *,
    default: bool = False,
) -> list[Callable[[], None]]:
    """Call ``made(process group)`` after one was made that this rank is in, and ``going(process group)`` before one is
    ended (None: all of them are). Both must not raise. With `default`, the default group too. Gives what undoes it."""
    c10d = distributed.distributed_c10d

    def around_maker(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            group = c10d.GroupMember.WORLD if original.__name__ == DEFAULT_MAKER else result
            if isinstance(group, c10d.ProcessGroup):  # torch's marks for "not a member" are none
                made(group)
            return result

        return make

    def around_ender(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(*args: Any, **kwargs: Any) -> Any:
            group = args[0] if args else kwargs.get("group")
            if going is not None and (group is None or isinstance(group, c10d.ProcessGroup)):
                going(None if group is c10d.GroupMember.WORLD else group)
            return original(*args, **kwargs)

        return end

    makers = [name for name in MAKERS if hasattr(c10d, name)] or ["new_group"]
    layers = [(name, around_maker) for name in makers + [DEFAULT_MAKER] * default]
    if going is not None:
        layers += [(name, around_ender) for name in ENDERS if hasattr(c10d, name)]
    undo: list[Callable[[], None]] = []
    for name, around in layers:
        undo += in_place.place(distributed, name, around)[0]
    return undo
