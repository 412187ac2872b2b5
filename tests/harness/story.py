"""What ranks write into their run logs around an end, on paper."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddtrace_pytorch.runlog.schema import encode
from ddtrace_pytorch.stalls.roll import Call, GroupState, Raised, RankState

SECOND = 10**9
T0 = 1_790_000_000 * SECOND
RANKS = (0, 1, 2, 3)
CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"
BROKEN = ("RuntimeError", CLOSED.partition(": ")[2])

Record = dict[str, Any]


def write_rank(root: Path, rank: int, told: Iterable[Record]) -> None:
    """The run log of a rank, one of two of job 4242, below `root`: who it is at :data:`T0`, then what it `told`."""
    directory = root / "4242" / "aaa"
    directory.mkdir(parents=True, exist_ok=True)
    job = {"id": "4242", "incarnation": "aaa", "attempt": 0, "launcher": "slurm", "source": "SLURM_JOB_ID", "ids": {}}
    identity = {"type": "identity", "ts": T0, "schema": 1, "rank": rank, "world_size": 2, "host": "a", "job": job}
    (directory / f"rank-{rank:05d}.jsonl").write_bytes(b"".join(map(encode, [identity, *told])))


def at(seconds: float) -> int:
    return T0 + round(seconds * SECOND)


def beats(until: float, entered: int = 0, since: float | None = None, operation: str = "all_reduce") -> list[Record]:
    """A beat a second; the rank has been in its call number `entered` since then, or in none."""
    found = []
    for second in range(int(until) + 1):
        inside = since is not None and second >= since
        completed = entered - 1 if since is not None else entered
        now = [
            entered if inside else completed,
            completed,
            operation if inside else None,
            at(since or 0) if inside else 0,
        ]
        found.append({"type": "beat", "ts": at(second), "seq": second + 1, "groups": {"0": now} if entered else {}})
    return found


def ended(reason: str, second: float, error: tuple[str, str] | None = None) -> Record:
    tags = {"pytorch.end_reason": reason}
    if error:
        tags |= {"error.type": error[0], "error.message": error[1]}
    return {
        "type": "span",
        "name": "pytorch.rank",
        "ts": at(second),
        "start": T0,
        "tags": tags,
        "error": int(bool(error)),
    }


def state_of(
    rank: int, entered: int, second: float, since: float | None = None, recent: Iterable[Call] = (), **more: Any
) -> RankState:
    now = Call("all_reduce", entered, 16, (4,), "float32", since=at(since)) if since is not None else None
    ring = (*recent, *([now] if now else []))
    here = GroupState("0", "world", RANKS, "gloo", entered, entered - (now is not None), now, ring)
    return RankState(rank, "host-a", as_of=at(second), groups={"0": here}, **more)


def stated(state: RankState, why: str) -> Record:
    return {"type": "state", "ts": state.as_of, "why": why, "state": state.plain()}


def raised(rank: int, key: int, second: float, error: str, operation: str = "all_reduce", **more: Any) -> Record:
    call = Call(operation, key, 16, (4,), "float32", since=at(second - 1))
    state = state_of(rank, key - 1, second, raised=Raised("0", call, error, at(second)), **more)
    return stated(state, "raised")
