"""What the ledger says of collectives, as spans and run-log records. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddtrace_pytorch.collectives.surface import BY_NAME
from ddtrace_pytorch.histogram import BUCKETS, percentile
from ddtrace_pytorch.ledger import Cell, Group, How, Note
from ddtrace_pytorch.source_lines import place
from ddtrace_pytorch.spans import Fact

SUMMARY = "pytorch.collectives"
CALL = "pytorch.collective"

# Backends whose blocking calls come back when the data is there. On a GPU they come back when the work is queued.
ON_THE_HOST = ("gloo", "mpi", "fake")


class Totals(NamedTuple):
    """What a cell had counted at one moment; times in ns."""

    calls: int = 0
    bytes: int = 0
    time: int = 0
    errors: int = 0
    unsized: int = 0
    waits: int = 0
    waited: int = 0
    buckets: Sequence[int] = (0,) * BUCKETS


def totals(cell: Cell) -> Totals:
    # The display is straight-line code: its numbers belong together (see ddtrace_pytorch.ledger).
    taken = cell.bytes, cell.time, cell.errors, cell.unsized, cell.waits, cell.waited, [*cell.buckets]
    return Totals(sum(taken[-1]), *taken)


def difference(now: Totals, before: Totals) -> Totals:
    """What was counted between two moments."""
    return Totals(
        now.calls - before.calls,
        now.bytes - before.bytes,
        now.time - before.time,
        now.errors - before.errors,
        now.unsized - before.unsized,
        now.waits - before.waits,
        now.waited - before.waited,
        [late - early for late, early in zip(now.buckets, before.buckets, strict=True)],
    )


def time_source(how: How, backend: str) -> str:
    """What a cell's time is: ``completion`` (of the collective), ``issue`` (of the call alone), or ``none``."""
    if how is How.NATIVE:
        return "none"
    return "completion" if how is How.WAITED and backend in ON_THE_HOST else "issue"


def bus_factor(operation: str, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth; 0 where the operation has none. A coalesced one is like its parts."""
    row = BY_NAME.get(operation.removesuffix("_coalesced"))
    return row.bus(size) if row is not None and size else 0.0


def group_facts(here: Group) -> dict[str, Fact]:
    """What spans say of the group."""
    facts: dict[str, Fact] = {
        "collective.group": here.label,
        "collective.group_name": here.name,
        "collective.group_size": here.size,
        "collective.backend": here.backend,
    }
    if here.crosses_nodes is not None:
        facts["collective.cross_node"] = "true" if here.crosses_nodes else "false"
    return facts


def summary_facts(cell: Cell, told: Totals, slowest: int, at: str | None) -> dict[str, Fact]:
    """The tags and metrics of one summary: `told` is what was counted since the one before, `slowest` in ns."""
    here = cell.group
    source = time_source(cell.how, here.backend)
    facts: dict[str, Fact] = {
        **group_facts(here),
        "collective.op": cell.operation,
        "collective.time_source": source,
        "collective.count": told.calls,
        "collective.bytes": told.bytes,
    }
    facts |= {
        name: many
        for name, many in {"collective.errors": told.errors, "collective.unsized": told.unsized}.items()
        if many
    }
    if cell.how is How.NATIVE:
        return facts
    facts |= {
        "collective.async": "true" if cell.how is How.ISSUED else "false",
        "collective.time_ms.total": told.time / 1e6,
    }
    if told.calls:
        facts["collective.time_ms.mean"] = told.time / told.calls / 1e6
        facts["collective.time_ms.max"] = slowest / 1e6
        for share in (50, 95, 99):
            facts[f"collective.time_ms.p{share}"] = percentile(told.buckets, share / 100, slowest) / 1e6
    if at is not None:
        facts["collective.slowest_at"] = at
    if cell.how is How.ISSUED:
        facts |= {"collective.waits": told.waits, "collective.wait_ms.total": told.waited / 1e6}
    if source == "completion":
        facts |= bandwidths(cell.operation, here.size, told.bytes, told.time)
    return facts


def bandwidths(operation: str, size: int, moved: int, time: int) -> dict[str, Fact]:
    """GB/s (10^9 bytes) of `moved` bytes in `time` ns in a group of `size` ranks; nothing for what moves none."""
    factor = bus_factor(operation, size)
    if not (moved and time and factor):
        return {}
    return {"collective.algbw_gbps": moved / time, "collective.busbw_gbps": moved / time * factor}


def slowest_of_each(notes: Sequence[Note]) -> list[tuple[Note, int]]:
    """Of each operation the call that took longest, and how many of its calls are among `notes`."""
    by_operation: dict[str, list[Note]] = {}
    for note in notes:
        by_operation.setdefault(note.cell.operation, []).append(note)
    return [(max(those, key=lambda note: note.took), len(those)) for those in by_operation.values()]


def call_facts(note: Note) -> dict[str, Fact]:
    """The tags and metrics of one call with a span of its own."""
    cell, here = note.cell, note.cell.group
    source = time_source(cell.how, here.backend)
    facts: dict[str, Fact] = {
        **group_facts(here),
        "collective.op": cell.operation,
        "collective.time_source": source,
        "collective.async": "true" if cell.how is How.ISSUED else "false",
        "collective.bytes": note.size,
        "collective.time_ms": note.took / 1e6,
    }
    if note.key:
        facts["collective.seq"] = note.key
    if note.step is not None:
        facts["step"] = note.step
    if note.code is not None:
        facts["collective.at"] = place(note.code, note.instruction)
    if source == "completion":
        facts |= bandwidths(cell.operation, here.size, note.size, note.took)
    return facts
