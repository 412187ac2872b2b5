"""Which rank talks to which, from the totals that ranks tell of their groups. Pure.

Totals say how many bytes a rank's messages in a group had, not to whom they went. In a collective all ranks of the
group have a part: an equal share of a rank's bytes is counted for each of the others. A transfer in a group of two has
the other one for its end, and is counted where it is sent. Between whom transfers in larger groups went isn't known:
they are in no cell, and their bytes are told by themselves.
"""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtrace_pytorch.collectives.surface import BY_NAME
from ddtrace_pytorch.runlog.fields import mapping, number, text

MOST_BLOCKS = 128
LEVELS = 254
# What is smaller by more than that looks like the smallest.
WIDEST = 1e9

_RECEIVES = frozenset(name for name, one in BY_NAME.items() if one.between_two and "recv" in name)
_SENDS = frozenset(name for name, one in BY_NAME.items() if one.between_two) - _RECEIVES


@dataclass
class Sent:
    """Of one rank in one group: bytes in `collectives` and in transfers that it was the sender of."""

    label: str = ""
    size: int = 0
    collectives: int = 0
    transfers: int = 0


@dataclass
class RankTraffic:
    """What one rank said in each of its groups, by torch's name."""

    groups: dict[str, Sent] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        """One `summary` record of collectives."""
        tags, metrics = mapping(record, "tags"), mapping(record, "metrics")
        sent = self.groups.setdefault(text(tags, "collective.group_name"), Sent())
        sent.label = text(tags, "collective.group") or sent.label
        sent.size = max(sent.size, int(number(metrics, "collective.group_size") or 0))
        moved = max(int(number(metrics, "collective.bytes") or 0), 0)
        operation = text(tags, "collective.op")
        if operation in _SENDS:
            sent.transfers += moved
        elif operation not in _RECEIVES:
            sent.collectives += moved

    def pour(self, other: RankTraffic) -> None:
        """Add what another process said that was the same rank."""
        for name, theirs in other.groups.items():
            sent = self.groups.setdefault(name, theirs)
            if sent is not theirs:
                sent.label, sent.size = theirs.label or sent.label, max(theirs.size, sent.size)
                sent.collectives += theirs.collectives
                sent.transfers += theirs.transfers


@dataclass
class Matrix:
    """Bytes from the ranks of each of the `blocks` (rows) to those of each (columns), on a scale of one byte: 0 is
    none, 1 to 255 go from `least` to `most` evenly on a logarithmic scale; in base64, row by row. `unplaced` are
    transfers by the group's label: to whom they went isn't known."""

    blocks: list[list[int]]
    least: float
    most: float
    levels: str
    total: int
    unplaced: dict[str, int]

    @property
    def anything(self) -> bool:
        """Whether there is something in it to see."""
        return self.total > sum(self.unplaced.values())


def draw(ranks: Mapping[int, RankTraffic]) -> Matrix | None:
    """The picture; None where nobody sent anything."""
    everybody = sorted(ranks)
    many = max(-(-len(everybody) // MOST_BLOCKS), 1)
    blocks = [everybody[at : at + many] for at in range(0, len(everybody), many)]
    block_of = {rank: at for at, those in enumerate(blocks) for rank in those}
    members: defaultdict[str, dict[int, Sent]] = defaultdict(dict)
    for rank, traffic in ranks.items():
        for name, sent in traffic.groups.items():
            members[name][rank] = sent
    cells: defaultdict[tuple[int, int], float] = defaultdict(float)
    unplaced: defaultdict[str, int] = defaultdict(int)
    total = 0
    for name, here in members.items():
        size = max(len(here), *(sent.size for sent in here.values()))
        total += sum(sent.collectives + sent.transfers for sent in here.values())
        _place(here, size, block_of, cells)
        astray = sum(sent.transfers for sent in here.values())
        if size != 2 and astray:
            unplaced[next(iter(here.values())).label or name] += astray
    if not total:
        return None
    return _picture(blocks, cells, total, dict(unplaced))


def _place(
    here: Mapping[int, Sent], size: int, block_of: Mapping[int, int], cells: defaultdict[tuple[int, int], float]
) -> None:
    if size < 2:
        return
    weight: defaultdict[int, float] = defaultdict(float)
    count: defaultdict[int, int] = defaultdict(int)
    for rank, sent in here.items():
        weight[block_of[rank]] += (sent.collectives + (sent.transfers if size == 2 else 0)) / (size - 1)
        count[block_of[rank]] += 1
    for sender, share in weight.items():
        if share:
            for receiver, those in count.items():
                # Nobody sends to itself.
                cells[sender, receiver] += share * (those - (sender == receiver))


def _picture(
    blocks: list[list[int]], cells: Mapping[tuple[int, int], float], total: int, unplaced: dict[str, int]
) -> Matrix:
    there = [value for value in cells.values() if value > 0]
    most = max(there, default=1.0)
    least = max(min(there, default=1.0), most / WIDEST)
    steps = LEVELS / math.log(most / least) if most > least else 0.0
    levels = bytearray(len(blocks) ** 2)
    for (sender, receiver), value in cells.items():
        if value > 0:
            up = round(steps * math.log(value / least)) if value > least else 0
            levels[sender * len(blocks) + receiver] = 1 + min(up, LEVELS)
    return Matrix(blocks, least, most, base64.b64encode(levels).decode(), total, unplaced)
