"""Who a process group is: what the ledger knows it by. Reads torch, changes nothing."""

from __future__ import annotations

from typing import Any

from ddtrace_pytorch.ledger import Group


class TorchGroups:
    """Answers the ledger's questions about process groups; see :class:`ddtrace_pytorch.ledger.Groups`."""

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._c10d = distributed.distributed_c10d

    def actual(self, process_group: Any) -> Any:
        return self._c10d._get_default_group() if process_group is None else process_group

    def describe(self, process_group: Any) -> Group | None:
        if not isinstance(process_group, self._c10d.ProcessGroup):
            return None  # torch's mark for "not a member"
        ranks = self._ranks(process_group)
        group = Group(
            name=str(process_group.group_name),
            label=self._label(process_group),
            backend=self._backend(process_group),
            ranks=ranks,
            rank=process_group.rank(),
        )
        group.launched_before = launched(process_group)
        return group

    def all(self) -> list[Any]:
        """The process groups there are that this rank is in."""
        return [one for one in self._c10d._world.pg_map if isinstance(one, self._c10d.ProcessGroup)]

    def _ranks(self, process_group: Any) -> tuple[int, ...]:
        try:
            return tuple(self._distributed.get_process_group_ranks(process_group))
        except KeyError:  # made by hand, without torch's register
            return tuple(range(process_group.size()))

    def _backend(self, process_group: Any) -> str:
        try:
            return str(self._distributed.get_backend(process_group))
        except (KeyError, ValueError):
            return str(process_group.name())

    def _label(self, process_group: Any) -> str:
        """``world``, a mesh's dimension (``dp``), what the user called it, or torch's own name."""
        described = getattr(process_group, "group_desc", "")
        if described.startswith("mesh_"):
            return str(described.removeprefix("mesh_"))
        if process_group is self._c10d._get_default_group():
            return "world"
        return str(described if described not in ("", "undefined", "default_pg") else process_group.group_name)


def launched(process_group: Any) -> int | None:
    """How many collectives torch counts on `process_group`; None where its backend doesn't count."""
    try:
        return int(process_group._get_sequence_number_for_group())
    except RuntimeError:
        return None
