"""Tells the users' process-group hooks of each group that is made, while there is such a hook."""

from __future__ import annotations

from typing import Any

from ddtrace_pytorch import hooks
from ddtrace_pytorch.border import safely
from ddtrace_pytorch.collectives import group_lives, in_place


class NewGroups:
    """From :meth:`open` to :meth:`close`; instruments nothing while no hook is registered."""

    def __init__(self, distributed: Any) -> None:
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
            self._undo += group_lives.watch(self._distributed, self._tell, default=True)

    def _remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    @safely("tell of a process group")
    def _tell(self, group: Any) -> None:
        for handle in tuple(hooks.process_groups):
            handle.call(group, str(group.group_name))
