"""Every operation of `torch.distributed` that is recorded, on every release: one row each. Pure.

The wrappers are generated from these rows (:mod:`~ddtrace_pytorch.collectives.wrappers`), and a test compares them
with the signatures of the torch at hand. A release that adds or renames an operation needs one row.

Bus factors are those of NVIDIA's nccl-tests (``doc/PERFORMANCE.md``), for a group of n ranks. all_to_all, gather and
scatter leave out the slice that stays on the rank, so their message is what crosses the wire and their factor is 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

BYTES_OF_ONE = re.compile(r"(\w+)\.nbytes")


class Kind(Enum):
    """How calls of an operation are counted."""

    COLLECTIVE = "collective"  # every member of the group calls it: has a number that all ranks agree on
    P2P = "point to point"  # two ranks call it
    UNNUMBERED = "unnumbered"  # every member calls it, and torch's sequence numbers leave it out
    OBJECTS = "objects"  # made of other operations; its size is what those moved
    COALESCING = "coalescing"  # collects other operations and issues them as one


def _all_reduce(n: int) -> float:
    return 2 * (n - 1) / n


def _scatter_or_gather_all(n: int) -> float:
    return (n - 1) / n


def _whole(n: int) -> float:
    return 1.0


def _nothing(n: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Operation:
    """One function of `torch.distributed`.

    `function` is its name there, `name` the one that dashboards see: one spelling over all releases. `parameters` in
    order, ``group_src@2.6`` where a later release added one. `size` is an expression for the bytes of the message on
    this rank, over the parameters and ``here`` (the :class:`~ddtrace_pytorch.ledger.Group`: its ``rank`` and
    ``size``), with the functions of :mod:`~ddtrace_pytorch.collectives.sizes`. `bus` goes from the group's size to
    the factor between algorithm and bus bandwidth. `deferred` is an expression: true where the call returns before
    it is complete. `root` names the parameter that holds the global rank of the root or peer. `since` is the first
    release that has the function; `renamed` the first in which it only passes on to one of another row; `gone` the
    first that has it no more. `native` are the names that torch's C++ side has for it (process-group hooks, flight
    recorder), without the backend.
    """

    function: str
    parameters: str
    size: str = "0"
    bus: Callable[[int], float] = _nothing
    kind: Kind = Kind.COLLECTIVE
    deferred: str = "False"
    root: str | None = None
    spelling: str | None = None
    since: tuple[int, int] = (2, 0)
    renamed: tuple[int, int] | None = None
    gone: tuple[int, int] | None = None
    native: tuple[str, ...] = ()

    @property
    def between_two(self) -> bool:
        """Whether it is a transfer between two ranks, which the others know nothing of."""
        return self.kind is Kind.P2P or self.function in ("send_object_list", "recv_object_list")

    @property
    def numbered(self) -> bool:
        """Whether its calls have a number that all ranks of the group agree on."""
        return self.kind in (Kind.COLLECTIVE, Kind.OBJECTS, Kind.COALESCING) and not self.between_two

    @property
    def name(self) -> str:
        return self.spelling or self.function

    def exists_in(self, release: tuple[int, int]) -> bool:
        """Whether torch `release` has the function."""
        return self.since <= release and (self.gone is None or release < self.gone)

    def in_release(self, release: tuple[int, int]) -> bool:
        """Whether torch `release` has the function, as one that does the work itself."""
        return self.exists_in(release) and (self.renamed is None or release < self.renamed)

    def for_release(self, release: tuple[int, int]) -> Operation:
        """The row with a size that tensors of torch `release` can be asked for."""
        return self if release >= (2, 1) else replace(self, size=BYTES_OF_ONE.sub(r"nbytes(\1)", self.size))

    def parameters_in(self, release: tuple[int, int]) -> tuple[str, ...]:
        """The parameters that the function has in torch `release`, in order."""
        names = []
        for name, _, since in (parameter.strip().partition("@") for parameter in self.parameters.split(",")):
            if not since or tuple(int(part) for part in since.split(".")) <= release:
                names.append(name)
        return tuple(names)


ASYNC = "async_op"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "all_reduce",
        "tensor, op, group, async_op",
        size="tensor.nbytes",
        bus=_all_reduce,
        deferred=ASYNC,
        native=("allreduce", "all_reduce"),
    ),
    Operation(
        "broadcast",
        "tensor, src, group, async_op, group_src@2.6",
        size="tensor.nbytes",
        bus=_whole,
        deferred=ASYNC,
        root="src",
        native=("broadcast",),
    ),
    Operation(
        "reduce",
        "tensor, dst, op, group, async_op, group_dst@2.6",
        size="tensor.nbytes",
        bus=_whole,
        deferred=ASYNC,
        root="dst",
        native=("reduce",),
    ),
    Operation(
        "all_gather",
        "tensor_list, tensor, group, async_op",
        size="total(tensor_list)",
        bus=_scatter_or_gather_all,
        deferred=ASYNC,
        native=("allgather", "all_gather"),
    ),
    Operation(
        "all_gather_single",
        "output_tensor, input_tensor, group, async_op",
        size="output_tensor.nbytes",
        bus=_scatter_or_gather_all,
        deferred=ASYNC,
        spelling="all_gather_into_tensor",
        since=(2, 13),
        native=("_allgather_base", "_all_gather_base", "allgather_into_tensor", "all_gather_single"),
    ),
    Operation(
        "all_gather_into_tensor",
        "output_tensor, input_tensor, group, async_op",
        size="output_tensor.nbytes",
        bus=_scatter_or_gather_all,
        deferred=ASYNC,
        renamed=(2, 13),
    ),
    Operation(
        "reduce_scatter",
        "output, input_list, op, group, async_op",
        size="total(input_list)",
        bus=_scatter_or_gather_all,
        deferred=ASYNC,
        native=("reduce_scatter",),
    ),
    Operation(
        "reduce_scatter_single",
        "output, input, op, group, async_op",
        size="input.nbytes",
        bus=_scatter_or_gather_all,
        deferred=ASYNC,
        spelling="reduce_scatter_tensor",
        since=(2, 13),
        native=("_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single"),
    ),
    Operation(
        "reduce_scatter_tensor",
        "output, input, op, group, async_op",
        size="input.nbytes",
        bus=_scatter_or_gather_all,
        deferred=ASYNC,
        renamed=(2, 13),
    ),
    Operation(
        "all_to_all_single",
        "output, input, output_split_sizes, input_split_sizes, group, async_op",
        size="split_for_others(input, input_split_sizes, here)",
        bus=_whole,
        deferred=ASYNC,
        native=("alltoall_base", "all_to_all_single"),
    ),
    Operation(
        "all_to_all",
        "output_tensor_list, input_tensor_list, group, async_op",
        size="for_others(input_tensor_list, here)",
        bus=_whole,
        deferred=ASYNC,
        native=("alltoall", "all_to_all"),
    ),
    Operation(
        "gather",
        "tensor, gather_list, dst, group, async_op, group_dst@2.6",
        size="for_others(gather_list, here)",
        bus=_whole,
        deferred=ASYNC,
        root="dst",
        native=("gather",),
    ),
    Operation(
        "gather_single",
        "tensor, gather_tensor, dst, group, async_op, group_dst",
        size="gathered_from_others(gather_tensor, tensor, dst, group_dst, here)",
        bus=_whole,
        deferred=ASYNC,
        root="dst",
        spelling="gather",
        since=(2, 14),
    ),
    Operation(
        "scatter",
        "tensor, scatter_list, src, group, async_op, group_src@2.6",
        size="for_others(scatter_list, here)",
        bus=_whole,
        deferred=ASYNC,
        root="src",
        native=("scatter",),
    ),
    Operation(
        "isend",
        "tensor, dst, group, tag, group_dst@2.6",
        size="tensor.nbytes",
        bus=_whole,
        kind=Kind.P2P,
        deferred="True",
        root="dst",
    ),
    Operation(
        "irecv",
        "tensor, src, group, tag, group_src@2.6",
        size="tensor.nbytes",
        bus=_whole,
        kind=Kind.P2P,
        deferred="True",
        root="src",
    ),
    Operation(
        "send",
        "tensor, dst, group, tag, group_dst@2.6",
        size="tensor.nbytes",
        bus=_whole,
        kind=Kind.P2P,
        root="dst",
        native=("send",),
    ),
    Operation(
        "recv",
        "tensor, src, group, tag, group_src@2.6",
        size="tensor.nbytes",
        bus=_whole,
        kind=Kind.P2P,
        root="src",
        native=("recv", "recvAnysource"),
    ),
    Operation("barrier", "group, async_op, device_ids, timeout@2.12", deferred=ASYNC, native=("barrier",)),
    Operation("monitored_barrier", "group, timeout, wait_all_ranks", kind=Kind.UNNUMBERED),
    Operation(
        "all_reduce_coalesced",
        "tensors, op, group, async_op",
        size="total(tensors)",
        bus=_all_reduce,
        deferred=ASYNC,
        native=("allreduce_coalesced",),
    ),
    Operation(
        "all_gather_coalesced",
        "output_tensor_lists, input_tensor_list, group, async_op",
        size="grand_total(output_tensor_lists)",
        bus=_scatter_or_gather_all,
        deferred=ASYNC,
        native=("allgather_coalesced",),
    ),
    # 2.0's only says where a group of NCCL begins and ends: what is called inside is issued call by call.
    Operation(
        "_coalescing_manager", "group, device, async_ops", kind=Kind.COALESCING, spelling="coalesced", since=(2, 1)
    ),
    Operation("all_gather_object", "object_list, obj, group, weights_only@2.14", kind=Kind.OBJECTS),
    Operation(
        "gather_object",
        "obj, object_gather_list, dst, group, group_dst@2.6, weights_only@2.14",
        kind=Kind.OBJECTS,
        root="dst",
    ),
    Operation(
        "broadcast_object_list",
        "object_list, src, group, device, group_src@2.6, weights_only@2.14",
        kind=Kind.OBJECTS,
        root="src",
    ),
    Operation(
        "scatter_object_list",
        "scatter_object_output_list, scatter_object_input_list, src, group, group_src@2.6, weights_only@2.14",
        kind=Kind.OBJECTS,
        root="src",
    ),
    Operation(
        "send_object_list",
        "object_list, dst, group, device, group_dst@2.6, use_batch@2.9, weights_only@2.14",
        kind=Kind.OBJECTS,
        root="dst",
        since=(2, 4),
    ),
    Operation(
        "recv_object_list",
        "object_list, src, group, device, group_src@2.6, use_batch@2.9, weights_only@2.14",
        kind=Kind.OBJECTS,
        root="src",
        since=(2, 4),
    ),
    # Of NCCL's, with a tensor on each of the rank's GPUs. How many GPUs take part nobody says, so no bandwidth.
    Operation(
        "broadcast_multigpu",
        "tensor_list, src, group, async_op, src_tensor",
        size="total(tensor_list)",
        deferred=ASYNC,
        root="src",
        gone=(2, 2),
    ),
    Operation(
        "all_reduce_multigpu",
        "tensor_list, op, group, async_op",
        size="total(tensor_list)",
        deferred=ASYNC,
        gone=(2, 2),
    ),
    Operation(
        "reduce_multigpu",
        "tensor_list, dst, op, group, async_op, dst_tensor",
        size="total(tensor_list)",
        deferred=ASYNC,
        root="dst",
        gone=(2, 2),
    ),
    Operation(
        "all_gather_multigpu",
        "output_tensor_lists, input_tensor_list, group, async_op",
        size="grand_total(output_tensor_lists)",
        deferred=ASYNC,
        gone=(2, 2),
    ),
    Operation(
        "reduce_scatter_multigpu",
        "output_tensor_list, input_tensor_lists, op, group, async_op",
        size="grand_total(input_tensor_lists)",
        deferred=ASYNC,
        gone=(2, 2),
    ),
)

# The rows that do the work themselves, by the name that dashboards see and by those of torch's C++ side.
BY_NAME = {operation.name: operation for operation in OPERATIONS if operation.renamed is None}
BY_NATIVE_NAME = {name: operation for operation in BY_NAME.values() for name in operation.native}

# In which nobody comes back before all have come. A root needs not wait for anybody.
ALL_WAIT_FOR_ALL = frozenset(
    one.name for one in OPERATIONS if one.root is None and one.kind in (Kind.COLLECTIVE, Kind.OBJECTS)
)

# What backends count tensor by tensor where it is coalesced (see ddtrace_pytorch.collectives.coverage).
SCATTERS = "reduce_scatter_tensor"

# Functions that only pass on to ones of the table, so that their calls are counted there, under its name.
PASSED_ON = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "gather_into_tensor": "gather",
    "batch_isend_irecv": "isend and irecv",
}


def release_of(version: str) -> tuple[int, int]:
    """Major and minor number of a torch version; vendor builds and pre-releases count as what they lead to."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
