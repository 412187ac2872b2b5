"""The roll call of a job of many ranks, all in this process, each with its own client of one counted store.

What they answer is short, because one interpreter packs it for all; :func:`state` is of a real one's size.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

from ddtrace_pytorch.stalls.roll import Call, GroupState, RankState
from ddtrace_pytorch.stalls.roll_call import Roll, RollCall
from harness.counted_store import IMPATIENT_RESOLVER, CountedStore, counted_store, raise_descriptor_limit
from harness.waiting import until

RANKS_PER_NODE = 8


def state(rank: int, world_size: int) -> RankState:
    recent = tuple(Call("all_reduce", key, 4 << 20, (1024, 1024), "float32", since=key * 10**9) for key in range(32))
    groups = {
        name: GroupState(name, name, tuple(range(ranks)), "nccl", 31, 30, recent[-1], recent)
        for name, ranks in (("default", world_size), ("dp", world_size // 8), ("tp", 8))
    }
    # A world group of all ranks and two smaller ones, 32 recent calls each.
    frames = tuple(f"/home/user/train.py:{line} step_{line}" for line in range(20))
    return RankState(rank, f"host-{rank // RANKS_PER_NODE}", rank // RANKS_PER_NODE, groups=groups, frames=frames)


@dataclass
class ManyRanks:
    store: CountedStore
    calls: list[RollCall]

    def operations_in(self, seconds: float) -> collections.Counter[str]:
        before = self.store.counts()
        threading.Event().wait(seconds)
        return self.store.counts() - before

    def all_stall(self) -> tuple[list[Roll], float]:
        """The first rank of every node finds a stall at the same moment; the rolls, and seconds to the last."""
        first = self.calls[::RANKS_PER_NODE]
        with ThreadPoolExecutor(len(first)) as pool:
            began = time.monotonic()
            rolls = [roll for roll in pool.map(RollCall.call, first) if roll is not None]
            return rolls, time.monotonic() - began


@contextlib.contextmanager
def many_ranks(world_size: int) -> Iterator[ManyRanks]:
    from torch.distributed import PrefixStore, TCPStore

    raise_descriptor_limit()
    os.environ.update(IMPATIENT_RESOLVER)
    node_of = [rank // RANKS_PER_NODE for rank in range(world_size)]
    states = [RankState(rank, node=node) for rank, node in enumerate(node_of)]

    def rank_of(store: CountedStore, rank: int) -> RollCall:
        client = TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=60), wait_for_workers=False)
        first = rank - rank % RANKS_PER_NODE
        return RollCall(
            PrefixStore("default_pg", client),
            "0/0",
            rank,
            node_of,
            lambda: {one.rank: one for one in states[first : first + RANKS_PER_NODE]},
        )

    with counted_store() as store:
        with ThreadPoolExecutor(32) as pool:
            calls = list(pool.map(lambda rank: rank_of(store, rank), range(world_size)))
        for call in calls:
            call.open()
        ears = 2 * world_size // RANKS_PER_NODE
        until(lambda: store.counts()["wait"] >= ears, 60, f"{ears} ranks listen")
        try:
            yield ManyRanks(store, calls)
        finally:
            with ThreadPoolExecutor(32) as pool:
                list(pool.map(RollCall.leave, calls))
