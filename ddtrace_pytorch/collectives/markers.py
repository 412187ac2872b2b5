"""Marks each call where others look: NVTX ranges for Nsight, and lines on stdout. Only where somebody asks for it.

Two ways to write a mark: ours, and that of Google's `monitor_collectives.py`, for those who come from there with their
environment variables and their scripts. Nothing in here touches a device, so a CUDA graph may be captured meanwhile.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ddtrace_pytorch.border import warn_first
from ddtrace_pytorch.collectives.listening import BATCH, Call
from ddtrace_pytorch.ledger import users_frame
from ddtrace_pytorch.settings import Settings
from ddtrace_pytorch.source_lines import place
from ddtrace_pytorch.tensors import nbytes

Fields = dict[str, Any]
# The node that a rank is on, by its global rank; None where that isn't known.
NodeOf = Callable[[int], object]


@dataclass(frozen=True)
class Channel:
    """One place to put marks: only for calls between nodes or for all, in our words or in monitor_collectives'."""

    between_nodes: bool
    as_theirs: bool


def channels(settings: Settings) -> tuple[Channel | None, Channel | None]:
    """How to mark for NVTX and on stdout; None: not at all. Our own variables win, each over its counterpart."""
    theirs = settings.tracing
    their_print = theirs if settings.tracing_print else None
    narrow = settings.collectives == "crossnode"

    def channel(ours: str | None, counterpart: str | None) -> Channel | None:
        word = counterpart if ours is None else ours
        if word in (None, "false"):
            return None
        return Channel(narrow or word == "crossnode", as_theirs=ours is None)

    return channel(settings.nvtx, theirs), channel(settings.print_calls, their_print)


class Ranges(Protocol):
    """NVTX as far as we use it: a stack of ranges for each thread."""

    def push(self, message: str) -> object: ...

    def pop(self) -> object: ...


@dataclass(frozen=True)
class _Ranges:
    push: Callable[[str], object]
    pop: Callable[[], object]


def find_nvtx(torch: Any) -> Ranges | None:
    """torch's own NVTX where its build has one (asking whether there is a GPU might initialise CUDA), else the `nvtx`
    package's."""
    if hasattr(torch._C, "_nvtx"):
        return _Ranges(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    try:
        nvtx = importlib.import_module("nvtx")
    except ImportError:
        warn_first("NVTX ranges need a build of torch with CUDA, or the package nvtx; there will be none")
        return None
    return _Ranges(nvtx.push_range, nvtx.pop_range)


def markers(settings: Settings, torch: Any, node_of: NodeOf) -> Markers | None:
    """What marks calls as `settings` say; None if nobody wants a mark."""
    for_nvtx, for_stdout = channels(settings)
    nvtx = find_nvtx(torch) if for_nvtx else None
    if nvtx is None and for_stdout is None:
        return None
    origin = {"gpu_serial": settings.gpu_serial, "vm_id": settings.vm_id}
    return Markers(for_nvtx if nvtx else None, for_stdout, nvtx, torch, origin, node_of)


class Markers:
    """A :class:`~ddtrace_pytorch.collectives.listening.Listener`."""

    def __init__(
        self,
        for_nvtx: Channel | None,
        for_stdout: Channel | None,
        nvtx: Ranges | None,
        torch: Any,
        origin: Mapping[str, str],
        node_of: NodeOf,
    ) -> None:
        self._for_nvtx = for_nvtx
        self._for_stdout = for_stdout
        self._nvtx = nvtx
        self._torch = torch
        self._origin = origin
        self._node_of = node_of
        self._open: set[int] = set()

    def begin(self, call: Call) -> None:
        frame = users_frame(sys._getframe(1))
        line = place(frame.f_code, frame.f_lasti) if frame is not None else None
        if self._for_stdout is not None and self._is_for(self._for_stdout, call) and leads(call):
            say(self._line(self._for_stdout, call, line))
        if self._nvtx is not None and self._for_nvtx is not None and self._is_for(self._for_nvtx, call):
            if self._for_nvtx.as_theirs and call.operation is BATCH:
                return  # there, only its transfers have a mark
            self._nvtx.push(json.dumps(self._fields(self._for_nvtx, call, line)))
            self._open.add(id(call))

    def end(self, call: Call, result: Any) -> None:
        if id(call) in self._open and self._nvtx is not None:
            self._open.discard(id(call))
            self._nvtx.pop()

    def _is_for(self, channel: Channel, call: Call) -> bool:
        if channel.as_theirs and call.operation.name in ("gather", "scatter") and call.root != rank_of(call):
            return False
        return not channel.between_nodes or crosses_nodes(call, self._node_of)

    def _line(self, channel: Channel, call: Call, line: str | None) -> str:
        if channel.as_theirs and call.operation is BATCH:
            return f"Num p2p ops in batch: {len(call.transfers)}"
        return fitting(self._fields(channel, call, line))

    def _fields(self, channel: Channel, call: Call, line: str | None) -> Fields:
        if not channel.as_theirs:
            return our_fields(call, line)
        return their_fields(call, line, self._their_device(call), time.time(), self._origin)

    def _their_device(self, call: Call) -> int | None:
        device = call.device
        if device is not None and device.index is not None:
            return int(device.index)
        cuda = self._torch.cuda
        return int(cuda.current_device()) if cuda.is_initialized() else None


def rank_of(call: Call) -> int:
    return call.group.ranks[call.group.rank]


def leads(call: Call) -> bool:
    """Whether this rank speaks for the call: the root, else the group's first; both ends of a transfer."""
    if call.operation.between_two:
        return True
    return rank_of(call) == (call.group.ranks[0] if call.root is None else call.root)


def crosses_nodes(call: Call, node_of: NodeOf) -> bool:
    """Whether data goes from one node to another. Where a peer's node isn't known, the group's answer has to do."""
    peers = [one.peer for one in call.transfers] if call.operation is BATCH else [call.root]
    if not call.operation.between_two:
        return bool(call.group.crosses_nodes)
    here = node_of(rank_of(call))
    for peer in peers:
        there = None if peer is None else node_of(peer)
        if here is None or there is None:
            if call.group.crosses_nodes:
                return True
        elif here != there:
            return True
    return False


def our_fields(call: Call, line: str | None) -> Fields:
    """A mark in our words."""
    device = call.device
    fields: Fields = {
        "operation": call.operation.name,
        "bytes": call.size,
        "group": call.group.label,
        "group_ranks": call.group.ranks,
        "rank": rank_of(call),
    }
    if call.number:
        fields["seq"] = call.number
    if call.operation.root is not None:
        fields["peer" if call.operation.between_two else "root"] = call.root
    if call.operation is BATCH:
        fields["transfers"] = len(call.transfers)
    fields |= {"async": call.deferred, "device": None if device is None else str(device), "line": line}
    if call.batch is not None:
        fields["correlation_id"] = call.batch
    return fields


# Where monitor_collectives has another name for an operation.
_THEIR_NAMES = {
    "isend": "send",
    "irecv": "recv",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


def their_fields(call: Call, line: str | None, device: int | None, now: float, origin: Mapping[str, str]) -> Fields:
    """A mark in monitor_collectives' words: its keys, in its order, and what it takes for a message's size."""
    fields: Fields = {
        "name": _THEIR_NAMES.get(call.operation.name, call.operation.name),
        "rank": rank_of(call),
        "source_line": line,
        "message_size": _their_size(call),
        "device": device,
        "timestamp": int(now),
        **origin,
    }
    if call.arguments.get("group") is not None:
        fields["group_ranks"] = call.group.ranks
    if call.root is not None:
        fields["peer_rank" if call.operation.between_two else "root_rank"] = call.root
    if call.batch is not None:
        fields["correlation_id"] = call.batch
    return fields


def _their_size(call: Call) -> int | None:
    name = call.operation.name
    if name == "barrier":
        return 1
    if name in ("reduce_scatter", "reduce_scatter_tensor"):
        return nbytes(call.arguments["output"])  # what is left on one rank; ours is what goes in
    return call.size


def fitting(fields: Fields) -> str:
    """`fields` as JSON that :func:`say` can say in one piece: lists and texts that are too long for that lose their
    ends, and ``shortened`` has the lengths that they had."""
    text = json.dumps(fields)
    lengths: dict[str, int] = {}
    while len(text) >= select.PIPE_BUF:
        sized = [name for name, value in fields.items() if isinstance(value, (tuple, list, str))]
        longest = max(sized, key=lambda name: len(json.dumps(fields[name])))
        whole = fields[longest]
        lengths.setdefault(longest, len(whole))
        fields = {**fields, longest: whole[: len(whole) // 2], "shortened": lengths}
        text = json.dumps(fields)
    return text


def say(line: str) -> None:
    """One line on stdout, in one write: ranks share it, and nobody's line may end up inside of another's. A pipe keeps
    writes apart up to ``PIPE_BUF`` bytes."""
    os.write(1, line.encode() + b"\n")
