"""What the ranks of a training write into their run logs, on paper: steps, scalars, spans, totals of collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtrace_pytorch.runlog.schema import encode, safe_name

MS = 1_000_000
SECOND = 10**9
T0 = 1_790_000_000 * SECOND

Record = dict[str, Any]


@dataclass
class Training:
    """A job of `ranks` with eight on a host, in pairs of a ``tp`` group each, which takes `steps` of `step_ms`. The
    ranks that are `slow` wait so many ms longer for data. `names`: of the job, of a span, a scalar and an event."""

    root: Path
    ranks: int
    steps: int
    step_ms: float = 100.0
    slow: dict[int, float] = field(default_factory=dict)
    job: str = "4242"
    incarnation: str = "aaa"
    name: str = "loss"
    ended: bool = True
    more: dict[int, list[Record]] = field(default_factory=dict)

    def write(self) -> Path:
        """The directory that holds the logs."""
        folder = self.root / safe_name(self.job) / safe_name(self.incarnation)
        folder.mkdir(parents=True)
        for rank in range(self.ranks):
            told = [self._identity(rank), *self._steps(rank), *self._totals(rank), *self.more.get(rank, ())]
            (folder / f"rank-{rank:05d}.jsonl").write_bytes(b"".join(map(encode, [*told, *self._end(rank)])))
        return self.root

    @property
    def over(self) -> int:
        return T0 + round(self.steps * self.step_ms * MS)

    def _identity(self, rank: int) -> Record:
        job = {"id": self.job, "incarnation": self.incarnation, "attempt": 0, "launcher": "slurm", "ids": {},
               "source": "SLURM_JOB_ID"}  # fmt: skip
        return {
            "type": "identity", "ts": T0, "schema": 1, "rank": rank, "world_size": self.ranks, "pid": 100 + rank,
            "host": f"node{rank // 8}", "node": str(rank // 8), "source": "trainer", "job": job,
            "device": {"device.kind": "cuda", "device.id": f"GPU-{rank:08x}", "device.gpu.name": "H100"},
            "versions": {"torch": "2.13.0"},
        }  # fmt: skip

    def _steps(self, rank: int) -> Iterator[Record]:
        late = self.slow.get(rank, 0.0)
        most = max(self.slow.values(), default=0.0)
        whole = self.step_ms
        for step in range(1, self.steps + 1):
            end = T0 + round(step * whole * MS)
            parts = {"data_ns": 5 + late, "collective_ns": 10 + most - late, "optimizer_ns": 8.0}
            metrics = {name: round(ms * MS) for name, ms in parts.items()}
            yield {
                "type": "step", "ts": end, "step": step, "relative_step": step, "start": end - round(whole * MS),
                "duration": round(whole * MS), "metrics": metrics,
            }  # fmt: skip
            yield {"type": "scalar", "ts": end, "seq": step, "step": step,
                   "metrics": {self.name: 3.0 / step + rank * 0.001, "lr": 0.1}}  # fmt: skip

    def _totals(self, rank: int) -> Iterator[Record]:
        pair = rank // 2 * 2
        yield total(self.over, "all_reduce", "world", "0", self.ranks, self.steps, 40_000_000)
        yield total(self.over, "all_gather", "tp", f"tp{pair}", 2, self.steps, 400_000_000)

    def _end(self, rank: int) -> Iterable[Record]:
        yield {"type": "beat", "ts": self.over, "seq": self.steps, "steps": self.steps}
        if self.ended:
            yield {"type": "span", "ts": self.over, "name": "pytorch.rank", "span_id": str(rank), "start": T0,
                   "tags": {"pytorch.end_reason": "destroyed"}, "error": 0, "metrics": {}}  # fmt: skip


def total(
    at: int, operation: str, label: str, name: str, size: int, calls: int, moved: int, call_ms: float = 5.0
) -> Record:
    """What one rank tells of its calls on a group; `moved` bytes by each of them."""
    speed = moved / (call_ms * MS)
    return {
        "type": "summary", "ts": at, "start": T0, "name": "pytorch.collectives", "resource": operation,
        "how": "waited", "buckets": {str(round(call_ms * MS).bit_length()): calls},
        "tags": {
            "collective.op": operation, "collective.group": label, "collective.group_name": name,
            "collective.backend": "gloo", "collective.time_source": "completion",
            "collective.slowest_at": "/code/train.py:12",
        },
        "metrics": {
            "collective.group_size": size, "collective.count": calls, "collective.bytes": moved * calls,
            "collective.time_ms.total": calls * call_ms, "collective.time_ms.max": call_ms * 2,
            "collective.group_launched": calls + 2 * (calls > 0), "collective.group_seen": calls,
            "collective.algbw_gbps": speed, "collective.busbw_gbps": speed * 1.5,
        },
    }  # fmt: skip


def verdict(at: int, ranks: list[int], waiting: list[int], message: str, waited_s: float = 12.0) -> Record:
    """Who a collective waits for that takes too long."""
    tags = {"stall.group_name": "0", "stall.group": "world", "stall.op": "all_reduce", "stall.key": 42,
            "stall.waited_s": waited_s, "stall.moves": "false"}  # fmt: skip
    return {
        "type": "verdict", "ts": at, "kind": "absent", "detail": None, "ranks": ranks, "doing": "data", "moves": False,
        "group": "world", "op": "all_reduce", "key": 42, "message": message, "tags": tags, "waiting": waiting,
        "usual": None, "culprits": [{"rank": rank, "kind": "absent", "frames": ["/code/train.py:88 load"]}
                                    for rank in ranks],
    }  # fmt: skip


def stalled(at: int, name: str, seconds: float, **more: str) -> Record:
    """A rank's own word that it waits (``stall``), or did (``stall over``)."""
    told = {"waited_s" if name == "stall" else "took_s": seconds}
    tags = {"op": "all_reduce", "group": "world", "group_name": "0", "key": 42, **told, **more}
    return {"type": "event", "ts": at, "name": name, "tags": tags}
