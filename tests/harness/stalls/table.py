"""What is done to a job, and what has to be said of it: one row each. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from harness.stalls.plan import ALL_REDUCES, CALLS, GROUPS, Plan

Ranks = frozenset[int]


class Launch(Enum):
    """How the four ranks are started."""

    RANKS = "ranks"  # each by itself, as where a rank's peers are on other nodes: nobody ends them with it
    TORCHRUN = "torchrun"  # one agent, which ends all when one dies; the store is its own
    HOSTS = "hosts"  # two on each of two hosts, with a network for the store and one for data


def alone(plan: Plan) -> set[Ranks]:
    return {frozenset({plan.rank})}


def alone_or_pair(plan: Plan) -> set[Ranks]:
    """In a group of two nobody is in the majority: both may be named."""
    pair = plan.members(plan.group)
    return alone(plan) | ({frozenset(pair)} if len(pair) == 2 else set())


def second_host(plan: Plan) -> set[Ranks]:
    return {frozenset({2, 3})}


def anybody(plan: Plan) -> set[Ranks]:
    return set()


@dataclass(frozen=True)
class Expected:
    """`kinds`, `doing`, `details`: any of them is right, none given: whatever is said; `error`: whether the verdict is
    an error, None if that is open; `culprits`: sets of ranks of which one has to be named, none: whoever is."""

    kinds: tuple[str, ...]
    doing: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    error: bool | None = True
    culprits: Callable[[Plan], set[Ranks]] = alone


@dataclass(frozen=True)
class Row:
    """One fault. `expected`: None of a healthy job; `calls`: which of a group's calls it may hit; `rank`: the culprit,
    and `group`: its group, where they are not left to chance; `lasting`: in thresholds; `judged_by`: whose verdict
    counts, nobody given: the first of all ranks'."""

    name: str
    what: str
    fault: str
    expected: Expected | None
    launch: Launch = Launch.RANKS
    calls: tuple[str, ...] = CALLS
    rank: int | None = None
    group: str | None = None
    lasting: float = 4.0
    judged_by: tuple[int, ...] = ()

    def plan(self, job: Plan, chance: Random, threshold: float, healthy_seconds: float) -> Plan:
        """`job` with the fault at a rank, a group and a moment picked at random."""
        rank = chance.randrange(job.ranks)
        return replace(
            job,
            fault=self.fault,
            rank=rank if self.rank is None else self.rank,
            group=chance.choice(list(GROUPS[job.ranks])) if self.group is None else self.group,
            step=chance.randrange(20, 60),
            call=CALLS.index(chance.choice(self.calls)),
            delay=chance.uniform(0, 0.05),
            lasting=self.lasting * threshold,
            seconds=600.0 if self.expected else healthy_seconds,
        )


GONE = Expected(("gone",))
FROZEN = Expected(("frozen",))
# Until the others' next calls are seen, a call left out looks like another one made in its place, and the other way
# round; so does one more, and where the two wait in different groups it looks like another order. Of two ranks neither
# can be told to be the one that left out or added, if no other group of the kind is further.
MISSED = ("skipped", "extra", "operation", "order", "shape", "size", "root")
SKIPPED = Expected(("mismatch",), details=MISSED, culprits=alone_or_pair)
EXTRA = Expected(("mismatch",), details=("extra", *MISSED), culprits=alone_or_pair)
# Where a call that differed ended all the same, its bytes are all that is known of it.
SHAPE = Expected(("mismatch",), details=("shape", "size"), culprits=alone_or_pair)
DTYPE = Expected(("mismatch",), details=("dtype", "size"), culprits=alone_or_pair)
ORDER = Expected(("mismatch",), details=("operation", *MISSED), culprits=alone_or_pair)

ROWS = (
    Row("loader", "asleep in its data set", "loader", Expected(("absent",), ("data",))),
    # Its main thread looks up every few seconds, to see whether the worker lives.
    Row("loader-worker", "asleep in a loader's worker", "worker", Expected(("absent",), ("data",), error=None)),
    Row("sigstop", "SIGSTOP", "stop", FROZEN),
    Row("sigkill", "SIGKILL", "kill", GONE),
    Row("exit", "os._exit", "exit", GONE),
    Row("exception", "an exception in its own code", "exception", GONE),
    Row("skip", "a collective left out", "skip", SKIPPED),
    Row("extra", "a collective too many", "extra", EXTRA),
    Row("shape", "half the elements", "shape", SHAPE, calls=ALL_REDUCES),
    Row("dtype", "float64 for float32", "dtype", DTYPE, calls=ALL_REDUCES),
    Row("order", "two collectives of a group swapped", "order", ORDER, calls=CALLS[:-1]),
    Row("circle", "groups in another order", "circle",
        Expected(("mismatch", "absent"), details=MISSED,
                 culprits=lambda plan: alone(plan) | {frozenset(plan.members("tp"))})),
    Row("slow", "longer than the threshold in its own code, each step", "slow",
        Expected(("absent",), ("user",), error=False), lasting=1.5),
    Row("checkpoint", "busy in torch.save", "checkpoint", Expected(("absent",), ("checkpoint",), error=False)),
    Row("compile", "busy in torch.compile", "compile", Expected(("absent",), ("compile",), error=False)),
    Row("gil", "in a C call that holds the GIL", "gil", FROZEN),
    Row("store-host", "SIGSTOP of rank 0, which hosts the store", "stop", FROZEN, rank=0),
    Row("host-cut", "the second host cut off", "outside", Expected(("unreachable",), culprits=second_host),
        launch=Launch.HOSTS, rank=0, judged_by=(0, 1)),
    Row("data-cut", "the hosts' data network cut, the store's not", "outside",
        Expected(("stuck",), culprits=anybody), launch=Launch.HOSTS, rank=0),
    *(Row(f"{name}-torchrun", f"{what}, under torchrun", fault, expected, launch=Launch.TORCHRUN, calls=calls)
      for name, what, fault, expected, calls in (
          ("sigkill", "SIGKILL", "kill", GONE, CALLS),
          ("exit", "os._exit", "exit", GONE, CALLS),
          ("exception", "an exception in its own code", "exception", GONE, CALLS),
          ("shape", "half the elements", "shape", SHAPE, ALL_REDUCES),
          ("skip", "a collective left out", "skip", SKIPPED, CALLS),
          ("sigstop", "SIGSTOP", "stop", FROZEN, CALLS),
      )),
    *(Row(f"{fault}-torchrun", f"{what}, beside DDP's own, under torchrun", fault, expected, launch=Launch.TORCHRUN,
          group="world")
      for fault, what, expected in (
          ("ddp-skip", "a collective left out", Expected(("mismatch",), details=("skipped", "shape", "size"))),
          ("ddp-shape", "another number of elements", Expected(("mismatch",), details=("shape", "size"))),
      )),
    Row("pipeline", "healthy: a pipeline, P2P and overlapping collectives", "pipeline", None),
    Row("healthy", "healthy: nothing happens", "none", None),
    Row("late", "healthy: a rank late by a third of the threshold, each step", "late", None, lasting=1 / 3),
    Row("pause", "healthy: all ranks pause for twice the threshold", "pause", None, lasting=2.0),
)  # fmt: skip

BY_NAME = {row.name: row for row in ROWS}

# What NCCL has a part in, and the machine with the GPUs is there for long enough to try.
OVER_NCCL = (
    "loader", "slow", "checkpoint", "sigstop", "sigkill", "exit", "exception", "skip", "extra", "shape", "dtype",
    "order", "sigkill-torchrun", "shape-torchrun", "healthy", "late",
)  # fmt: skip
