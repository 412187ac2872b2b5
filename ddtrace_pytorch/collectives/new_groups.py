"""Tells the users' process-group hooks of each group that is made, while there is such a hook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddtrace_pytorch import hooks
from ddtrace_pytorch.border import safely
from ddtrace_pytorch.collectives import in_place

# The functions that every new group comes out of, whole and known to torch: `new_group`, `new_subgroups` and
# `init_device_mesh` call one of them.
MAKERS = ("init_process_group", "_new_group_with_tag", "split_group", "shrink_group")


class NewGroups:
    """From :meth:`open` to :meth:`close`; instruments nothing while no hook is registered."""

    def __init__(self, distributed: Any) -> None:
        self._c10d = distributed.distributed_c10d
        self._distributed = distributed
        self._undo: list[in_place.Undo] = []

    def open(self) -> None:
        hooks.follow(self._look)

    def close(self) -> None:
        hooks.unfollow(self._look)
        self._remove()

    def _look(self) -> None:
        if not hooks.process_groups:
            self._remove()
        elif not self._undo:
            for name in MAKERS:
                if hasattr(self._c10d, name):
                    group_of = self._default if name == "init_process_group" else _itself
                    undo, _ = in_place.place(self._distributed, name, functools.partial(self._around, group_of))
                    self._undo += undo

    def _remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _around(self, group_of: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            self._tell(group_of, made)
            return made

        return make

    def _default(self, _: Any) -> Any:
        return self._c10d._get_default_group()

    @safely("tell of a process group")
    def _tell(self, group_of: Callable[[Any], Any], made: Any) -> None:
        group = group_of(made)
        if isinstance(group, self._c10d.ProcessGroup):  # torch's mark for "not a member" is none
            for handle in tuple(hooks.process_groups):
                handle.call(group, str(group.group_name))


def _itself(made: Any) -> Any:
    return made
