"""What the roll call asks of the store of a job of 1,024 ranks, and how long a whole roll takes.

    .demo/venv/bin/python benchmarks/roll_call.py [--ranks 1024] [--quiet 20]

All ranks, on 128 nodes of eight, are clients of one real TCPStore in a process of its own, behind a relay that counts
the operations that reach it. They share one process here, and the relay slows every operation: on a cluster each rank
has an interpreter of its own, and the network takes what the relay takes. What they answer is short for that reason;
what states of real size cost is measured beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from _machine import describe
from _results import Measured, publish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness.many_ranks import RANKS_PER_NODE, many_ranks, state

from ddtrace_pytorch.stalls.answer import pack, unpack

QUIET_OPERATIONS_PER_SECOND = 100.0
ROLL_SECONDS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--quiet", type=float, default=20.0, help="seconds")
    arguments = parser.parse_args()
    machine = describe()
    with many_ranks(arguments.ranks) as job:
        quiet = sum(job.operations_in(arguments.quiet).values()) / arguments.quiet
        before = job.store.counts()
        rolls, seconds = job.all_stall()
        operations = sum((job.store.counts() - before).values())
    states = {rank: state(rank, arguments.ranks) for rank in range(RANKS_PER_NODE)}
    began = time.perf_counter()
    packed = pack(states)
    packing = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(arguments.ranks // RANKS_PER_NODE):
        unpack(packed)
    unpacking = time.perf_counter() - began
    heard = [len(roll.states) for roll in rolls]
    if heard != [arguments.ranks]:
        sys.exit(f"one roll of all ranks was expected, not {heard}")
    publish(
        "roll_call",
        machine,
        [
            Measured(f"{arguments.ranks} ranks, quiet", quiet, "operations/s", QUIET_OPERATIONS_PER_SECOND, 1),
            Measured(f"{arguments.ranks} ranks, all stall: the whole roll", seconds, "s", ROLL_SECONDS, 1),
            Measured(f"{arguments.ranks} ranks, all stall: operations", operations, "", None, 1),
            Measured("one node packs its answer", packing * 1e3, "ms", None, 1),
            Measured("one node's answer", len(packed) / 1024, "KiB", 64, 1),
            Measured("the caller unpacks all answers", unpacking, "s", None, 1),
        ],
    )


if __name__ == "__main__":
    main()
