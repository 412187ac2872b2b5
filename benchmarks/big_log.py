"""Writes the run log of a large job that never ran, with records as those of a small one that did.

    python benchmarks/big_log.py DIR [--ranks 1024] [--steps 1000]

Of each rank and step: the step, one span and one scalar of the user's, and five sampled collectives; once a second a
beat, once a minute the totals, at the beginning who the rank is and at the end its span. Steps take a quarter of a
second, so that as many collectives are sampled as ever are, 20 a second. Eight ranks share a host, whose clock is off
by its number of milliseconds; one rank is slow. tests/dist/test_default_run.py compares the fields with a real run's.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddtrace_pytorch.runlog.writer import RunLogFile, log_directory  # noqa: E402
from ddtrace_pytorch.sampling import chosen  # noqa: E402

Record = dict[str, Any]

MIB = 1024 * 1024
MS = 1_000_000
SECOND = 1000 * MS
MINUTE = 60 * SECOND
BEGAN = 1_790_000_000 * SECOND
STEP = 250 * MS

JOB = "big-run"
INCARNATION = "20260921T141320Z-0a1b2c3d"
RANKS_A_HOST = 8
CALLS_A_STEP = 5
LEVEL = 3  # one of every 2**3 is sampled
LAUNCHED_A_STEP = CALLS_A_STEP << LEVEL
PLACE = "/home/user/project/train.py"


class Rank:
    """What one rank would have recorded."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._random = random.Random(rank)
        self._slow = 20 * MS if rank == ranks // 2 else 0
        node = rank // RANKS_A_HOST
        self._host = f"node{node:04}"
        self._off = node * MS
        self._seq = 0
        place = {"node": str(node), "host": self._host}
        self._tags: dict[str, Any] = {
            "component": "pytorch", "framework": "ddp", "host": self._host, "pytorch.node": place["node"],
            "pytorch.instrument": "in_place", "torchelastic.run_id": JOB, "torchelastic.max_restarts": "0",
            "torchelastic.role_name": "default", "torchelastic.role_rank": str(rank),
            "torchelastic.restart_count": "0", "nccl.async_error_handling": "1", "pytorch.master_addr": "node0000",
            "torch.version": "2.13.0", "torch.cudnn.enabled": "true", "torch.cudnn.benchmark": "false",
            "torch.cudnn.deterministic": "false", "torch.float32_matmul_precision": "highest",
            "torch.mps.available": "false", "launcher": "torchrun", "pytorch.attempt": "0",
            "torch.distributed.backend": "gloo", "training_job.id": JOB, "job_id": JOB,
            "training_job.id.source": "TORCHELASTIC_RUN_ID", "pytorch.source": "trainer",
            "device.id": f"{self._host}:cpu", "device.kind": "cpu", "pytorch.incarnation": INCARNATION,
            "pytorch.stall_watch": "full", "pytorch.parallelism": "ddp",
        }  # fmt: skip
        self._metrics: dict[str, Any] = {
            "pytorch.master_port": 29500, "pytorch.local_rank": rank % RANKS_A_HOST,
            "pytorch.local_world_size": RANKS_A_HOST, "pytorch.group_rank": node,
            "pytorch.group_world_size": -(-ranks // RANKS_A_HOST), "rank": rank, "world_size": ranks,
            "pytorch.steps": 0, "pytorch.collective_calls": 0, "pytorch.dataloader.workers": 0,
        }  # fmt: skip

    def at(self, ns: int) -> int:
        """That time of the job on this rank's clock."""
        return BEGAN + self._off + ns

    def identity(self) -> Record:
        return {
            "schema": 1, "ts": self.at(0), "mono": 36_530_985_556_489, "rank": self.rank, "world_size": self.ranks,
            "host": self._host, "node": self._tags["pytorch.node"], "pid": 4000 + self.rank, "source": "trainer",
            "metadata": {}, "log_ranks": "all", "collectives": "summary",
            "job": {
                "id": JOB, "source": "TORCHELASTIC_RUN_ID", "attempt": 0, "incarnation": INCARNATION,
                "launcher": "torchrun", "ids": {"torchelastic.run_id": JOB},
            },
            "device": {"device.id": f"{self._host}:cpu", "device.kind": "cpu"}, "tags": {**self._tags, **self._metrics},
            "versions": {"ddtrace_pytorch": "0.1.0", "ddtrace": "4.16.0", "torch": "2.13.0", "python": "3.11.7"},
        }  # fmt: skip

    def records(self, steps: int) -> Iterator[Record]:
        beats = totals = 0
        for step in range(1, steps + 1):
            yield from self._step(step)
            now = step * STEP
            if now >= (beats + 1) * SECOND:
                beats += 1
                yield self._beat(beats, step, now)
            if now >= (totals + 1) * MINUTE or step == steps:
                yield from self._totals(totals * MINUTE, now, step)
                totals += 1
        yield self._span(steps)

    def _step(self, step: int) -> Iterator[Record]:
        start, end = (step - 1) * STEP, step * STEP
        waited = self._random.randrange(1 * MS, 4 * MS) + self._slow
        came = start + 40 * MS + waited
        spent = 0
        for turn in range(CALLS_A_STEP):
            until = start + (turn + 2) * 40 * MS + self._random.randrange(50_000)
            took = until - came
            spent += took
            yield {
                "type": "call", "ts": self.at(until), "op": "all_reduce", "group": "0",
                "key": chosen((step - 1) * CALLS_A_STEP + turn, LEVEL), "start": self.at(came), "duration": took,
                "bytes": 4_194_304, "source": "completion", "step": step,
            }  # fmt: skip
            came = until + self._random.randrange(10 * MS, 20 * MS)
        yield {
            "type": "user_span", "ts": self.at(came), "name": "forward and backward", "seq": self._count(),
            **self._stamp(step), "at": f"{PLACE}:31:<module>", "thread": "MainThread",
            "id": str(self._random.getrandbits(63)), "start": self.at(start + waited),
            "duration": came - start - waited,
        }  # fmt: skip
        yield {
            "type": "scalar", "ts": self.at(end - MS), "seq": self._count(),
            "metrics": {"loss": 2.0 + self._random.random() - step / 1000, "lr": 0.001},
            **self._stamp(step), "at": f"{PLACE}:37:<module>", "thread": "MainThread",
        }  # fmt: skip
        record: Record = {
            "type": "step", "ts": self.at(end), **self._stamp(step), "start": self.at(start), "duration": end - start,
            "metrics": {"data_ns": waited, "collective_ns": spent, "optimizer_ns": 4 * MS},
        }  # fmt: skip
        yield {**record, "first": True} if step == 1 else record

    def _count(self) -> int:
        self._seq += 1
        return self._seq

    def _stamp(self, step: int) -> Record:
        return {"step": step, "relative_step": step}

    def _beat(self, seq: int, steps: int, now: int) -> Record:
        launched = steps * LAUNCHED_A_STEP
        return {
            "type": "beat", "ts": self.at(now), "seq": seq, "steps": steps, "calls": launched,
            "groups": {"0": [launched, launched - 1, "all_reduce", self.at(now)]},
        }  # fmt: skip

    def _totals(self, since: int, now: int, step: int) -> Iterator[Record]:
        steps = (now - since) // STEP
        calls, launched = steps * LAUNCHED_A_STEP, step * LAUNCHED_A_STEP
        group = {
            "component": "pytorch", "collective.group": "world", "collective.group_name": "0",
            "collective.backend": "gloo", "collective.cross_node": "true",
        }  # fmt: skip
        covered = {
            "collective.group_launched": launched * 2, "collective.group_seen": launched,
            "collective.group_coverage": 0.5,
        }  # fmt: skip
        ms = 2.5 * calls
        yield self._summary("pytorch.collectives", "all_reduce", since, now, {
            **group, "collective.op": "all_reduce", "collective.time_source": "completion", "collective.async": "false",
            "collective.slowest_at": f"{PLACE}:35",
        }, {
            "collective.group_size": self.ranks, "collective.count": calls, "collective.bytes": calls * 4_194_304,
            "collective.time_ms.total": ms, "collective.time_ms.mean": 2.5, "collective.time_ms.max": 24.672,
            "collective.time_ms.p50": 1.623, "collective.time_ms.p95": 7.692, "collective.time_ms.p99": 14.382,
            "collective.algbw_gbps": 1.7, "collective.busbw_gbps": 3.3, **covered,
        }, how="waited", buckets={"20": calls // 4, "21": calls // 2, "24": calls // 4})  # fmt: skip
        yield self._summary("pytorch.collectives", "unseen", since, now, {
            **group, "collective.op": "unseen", "collective.recorded_as": "all_reduce",
        }, {
            "collective.group_size": self.ranks, **covered, "collective.count": calls, "collective.sized": calls,
            "collective.bytes": calls * 25_000_000,
        })  # fmt: skip
        yield self._summary("pytorch.steps", "ddp", since, now, {"component": "pytorch"}, {
            "pytorch.steps": steps, **({} if since else {"step.first_ms": STEP / MS}), "step.time_ms.p50": STEP / MS,
            "step.time_ms.p95": STEP / MS, "step.time_ms.p99": STEP / MS, "step.time_ms.max": STEP / MS,
            "step.per_second": SECOND / STEP, "step.share.data": 0.02, "step.share.collective": 0.27,
            "step.share.optimizer": 0.02, "step.share.compute": 0.69, "scalar.loss.last": 1.87, "scalar.loss.min": 0.5,
            "scalar.loss.max": 2.9, "scalar.lr.last": 0.001, "scalar.lr.min": 0.001, "scalar.lr.max": 0.001,
        })  # fmt: skip
        yield self._summary("pytorch.spans", "forward and backward", since, now, {
            "component": "pytorch", "span.slowest_at": f"{PLACE}:31:<module>",
        }, {
            "span.count": steps, "span.errors": 0, "span.time_ms.total": 200.0 * steps, "span.time_ms.mean": 200.0,
            "span.time_ms.max": 210.5, "span.time_ms.p50": 200.1, "span.time_ms.p95": 204.2, "span.time_ms.p99": 208.9,
        }, buckets={"28": steps})  # fmt: skip

    def _summary(
        self, name: str, resource: str, since: int, now: int, tags: Mapping[str, Any], metrics: Mapping[str, Any],
        **more: Any,
    ) -> Record:  # fmt: skip
        return {
            "type": "summary", "ts": self.at(now), "name": name, "resource": resource, "start": self.at(since),
            "tags": tags, "metrics": metrics, **more,
        }  # fmt: skip

    def _span(self, steps: int) -> Record:
        return {
            "type": "span", "ts": self.at(steps * STEP), "name": "pytorch.rank", "resource": f"rank {self.rank}",
            "service": "pytorch", "trace_id": f"{self._random.getrandbits(128):032x}",
            "span_id": str(self._random.getrandbits(63)), "parent_id": None, "start": self.at(0),
            "duration": steps * STEP, "error": 0, "tags": {**self._tags, "pytorch.end_reason": "destroyed"},
            "metrics": {
                **self._metrics, "pytorch.piece": 0, "pytorch.steps": steps,
                "pytorch.collective_calls": steps * LAUNCHED_A_STEP,
            }, "links": [],
        }  # fmt: skip


def write_rank(directory: str, rank: int, ranks: int, steps: int) -> tuple[int, int]:
    """Records and bytes of it."""
    one = Rank(rank, ranks)
    records = [*one.records(steps)]
    file = RunLogFile(log_directory(directory, JOB, INCARNATION), rank, one.identity, 256 * MIB)
    file.write(records)
    path = file.path
    file.close()
    assert path is not None
    return len(records) + 1, os.path.getsize(path)


def write(directory: str, ranks: int, steps: int) -> tuple[int, int]:
    """Write the whole job into `directory`; gives how many records and bytes that is."""
    many = size = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for records, written in pool.map(
            write_rank, [directory] * ranks, range(ranks), [ranks] * ranks, [steps] * ranks, chunksize=4
        ):
            many, size = many + records, size + written
    return many, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    asked = parser.parse_args()
    records, size = write(asked.directory, asked.ranks, asked.steps)
    share = asked.ranks * asked.steps
    print(f"{records:,} records, {size / 1e6:,.0f} MB: {records / share:.1f} and {size / share:,.0f} B a rank and step")


if __name__ == "__main__":
    main()
