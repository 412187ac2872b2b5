"""Who a process group is: what the ledger knows it by. Reads torch, changes nothing."""

from __future__ import annotations

import weakref
from typing import Any

from ddtrace_pytorch.identity.topology import Nodes
from ddtrace_pytorch.ledger import Group


class TorchGroups:
    """Answers the ledger's questions about process groups; see :class:`ddtrace_pytorch.ledger.Groups`."""

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._c10d = distributed.distributed_c10d
        # What torch had counted on groups that were made since we came, when they were.
        self._born: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        # Of the default group's ranks, once that is known.
        self.nodes: Nodes | None = None

    def actual(self, process_group: Any) -> Any:
        return self._c10d._get_default_group() if process_group is None else process_group

    def describe(self, process_group: Any) -> Group | None:
        if not self.is_member(process_group):
            return None
        ranks = self.ranks(process_group)
        group = Group(
            name=name_of(process_group, self._c10d),
            label=self._label(process_group),
            backend=self._backend(process_group),
            ranks=ranks,
            rank=process_group.rank(),
        )
        born = process_group in self._born
        group.launched_before = self._born[process_group] if born else launched(process_group)
        group.crosses_nodes = self.crosses_nodes(process_group)
        group.timeout = _timeout(process_group)
        return group

    def born(self, process_group: Any) -> None:
        """`process_group` is new: whatever is launched on it is launched after we came.

        Not counted from 0 by every release: gloo's count began with a random number in 2.0.
        """
        self._born[process_group] = launched(process_group)

    def crosses_nodes(self, process_group: Any) -> bool | None:
        """Whether its ranks are on more than one node; None where that isn't known."""
        if self.nodes is None:
            return None
        try:
            return self.nodes.crosses(self._distributed.get_process_group_ranks(process_group))
        except KeyError:  # made by hand: nobody says which ranks of the world its members are
            return None

    def all(self) -> list[Any]:
        """The process groups there are that this rank is in."""
        return [one for one in tuple(self._c10d._world.pg_map) if self.is_member(one)]

    def is_member(self, process_group: Any) -> bool:
        """Whether that is a group with this rank in it; for others torch has marks of several kinds."""
        return isinstance(process_group, self._c10d.ProcessGroup)

    def ranks(self, process_group: Any) -> tuple[int, ...]:
        """The global ranks in the group, in its order."""
        try:
            return tuple(self._distributed.get_process_group_ranks(process_group))
        except KeyError:  # made by hand, without torch's register
            return tuple(range(process_group.size()))

    def _backend(self, process_group: Any) -> str:
        try:
            named = str(self._distributed.get_backend(process_group))
        except (KeyError, ValueError):
            named = "undefined"
        # So torch calls it where `init_process_group` was told no backend.
        return str(process_group.name()).lower() if named == "undefined" else named

    def _label(self, process_group: Any) -> str:
        """``world``, a mesh's dimension (``dp``), what the user called it, or torch's own name."""
        described = getattr(process_group, "group_desc", "")
        if described.startswith("mesh_"):
            return str(described.removeprefix("mesh_"))
        if process_group is self._distributed.group.WORLD:
            return "world"
        named = described not in ("", "undefined", "default_pg")
        return str(described) if named else name_of(process_group, self._c10d)


def name_of(process_group: Any, c10d: Any) -> str:
    """Torch's own name of a group, the same on all its ranks. Before 2.2 only torch's register has it."""
    return str(getattr(process_group, "group_name", "") or c10d._world.pg_names.get(process_group, ""))


def _timeout(process_group: Any) -> int | None:
    """After how many ns a collective on `process_group` is ended; None where that can't be told."""
    try:
        (device, *_) = process_group._device_types
        seconds: float = process_group._get_backend(device).options._timeout.total_seconds()
        return round(seconds * 1e9)
    except (AttributeError, RuntimeError, ValueError):
        return None


def launched(process_group: Any) -> int | None:
    """How many collectives torch counts on `process_group`; None where its backend doesn't count."""
    try:
        return int(process_group._get_sequence_number_for_group())
    except RuntimeError:
        return None
