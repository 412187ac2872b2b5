"""Which node every rank is on, as the ranks themselves say it: never guessed from counts of devices.

A node is a host name on one running kernel. The name tells apart containers that have their own, as `pytorch.node`
does; the kernel's boot id tells apart machines that go by the same name, as images of one disk may.

Each rank says its node where the ranks meet, rank 0 hears them all in two questions and says the whole in one word
that the others hear: three operations of a rank, and some looks while the others are not there yet. Where one torchrun
started all ranks, or there is one rank only, nothing has to be said.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ddtrace_pytorch.border import log
from ddtrace_pytorch.identity.meeting import Meeting

# Rank 0 waits this long for the others, and they so much longer for it.
PATIENCE_SECONDS = 30.0
GRACE_SECONDS = 10.0

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Nodes:
    """The node of each rank; None where that isn't known."""

    def __init__(self, names: Sequence[str | None]) -> None:
        self.names = tuple(names)

    def of(self, rank: int) -> str | None:
        return self.names[rank] if 0 <= rank < len(self.names) else None

    def crosses(self, ranks: Iterable[int]) -> bool | None:
        """Whether `ranks` are on more than one node; None where it depends on one that isn't known."""
        names = {self.of(rank) for rank in ranks}
        return True if len(names - {None}) > 1 else None if None in names else False

    def encode(self) -> str:
        """In one word: each name once, and how many ranks in a row are on it."""
        distinct = list(dict.fromkeys(self.names))
        index = {name: number for number, name in enumerate(distinct)}
        runs = [[index[name], len(list(ranks))] for name, ranks in itertools.groupby(self.names)]
        return json.dumps({"names": distinct, "runs": runs}, separators=(",", ":"))

    @classmethod
    def decode(cls, word: str) -> Nodes:
        said = json.loads(word)
        return cls([said["names"][number] for number, many in said["runs"] for _ in range(many)])


def this_node(host: str) -> str:
    """The node that this process is on."""
    try:
        return f"{host}/{_BOOT_ID.read_text().strip()}"
    except OSError:
        return host


def from_one_agent(environ: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Whether torchrun's agent on this node, by what it told its workers, started all ranks of the process group."""
    return (
        "TORCHELASTIC_RUN_ID" in environ
        and environ.get("RANK") == str(rank)
        and environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    )


def find_nodes(meeting: Meeting, rank: int, world_size: int, node: str, environ: Mapping[str, str]) -> Nodes | None:
    """The nodes of all ranks, this one's being `node`; None if they can't be heard of. For the store thread."""
    if world_size == 1 or from_one_agent(environ, rank, world_size):
        return Nodes([node] * world_size)
    if meeting.alone:
        return None
    try:
        return _gather(meeting, world_size, node) if rank == 0 else _ask(meeting, rank, node)
    except Exception as error:
        # The store's host may be gone, which is told where it matters; here it only leaves a fact unknown.
        log.debug("which rank is on which node can't be found out", exc_info=error)
        return None


def _gather(meeting: Meeting, world_size: int, node: str) -> Nodes:
    nodes = Nodes([node, *meeting.hear_all([f"node/{rank}" for rank in range(1, world_size)], PATIENCE_SECONDS)])
    if not meeting.hurried:
        meeting.say("nodes", nodes.encode())
    return nodes


def _ask(meeting: Meeting, rank: int, node: str) -> Nodes | None:
    meeting.say(f"node/{rank}", node)
    heard = meeting.hear("nodes", PATIENCE_SECONDS + GRACE_SECONDS)
    return None if heard is None else Nodes.decode(heard)
