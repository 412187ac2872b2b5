"""What a job with default settings writes: how much, which fields, and what can be asked of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import duckdb
import pytest
from harness.job import environment, jobs_in, torchrun
from harness.log import Record, of_type, records

from ddtrace_pytorch.runlog.schema import RECORDS, encode

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
STEPS = 200

SCRIPT = f"""
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import ddtrace_pytorch
ddtrace_pytorch.patch()

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn({STEPS} * 4, 16), torch.randn({STEPS} * 4, 1))
for given, wanted in DataLoader(data, batch_size=4):
    with ddtrace_pytorch.span("forward and backward"):
        loss = torch.nn.functional.mse_loss(model(given), wanted)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    ddtrace_pytorch.scalar({{"loss": total, "lr": 1e-3}})
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("default")
    with jobs_in(place) as jobs:
        env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(place / "log"))
        jobs.run([*torchrun(2), jobs.script(SCRIPT)], env).ok()
        yield place / "log"


def test_it_is_no_more_than_a_kib_for_each_step_and_rank(log: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in log.rglob("rank-*")}
    assert sizes.keys() == {"rank-00000.jsonl", "rank-00001.jsonl"}
    assert Counter(one["type"] for one in records(log))["step"] == 2 * STEPS
    assert max(sizes.values()) <= 1024 * STEPS


def test_all_of_its_fields_are_documented(log: Path) -> None:
    for one in records(log):
        assert one.keys() - {"type", "ts", "_file"} <= RECORDS[one["type"]], one


class Kind(NamedTuple):
    type: str
    name: str
    operation: str


# Whose keys are no names of fields, or go with the machine.
FREE = {"buckets", "ids", "device"}


def fields(one: Record) -> set[str]:
    """All keys, also those of what is in it."""

    def of(value: Any, path: str) -> Iterator[str]:
        for key, inner in value.items() if isinstance(value, dict) else ():
            if key.startswith("device."):
                continue
            yield f"{path}.{key}"
            if key not in FREE:
                yield from of(inner, f"{path}.{key}")

    return {*of({key: value for key, value in one.items() if key != "_file"}, "")}


def by_kind(found: list[Record]) -> dict[Kind, list[set[str]]]:
    kinds: dict[Kind, list[set[str]]] = defaultdict(list)
    for one in found:
        # Names of the user's spans are no kinds, and which operations torch issued by itself depends on the release.
        name = "" if one["type"] == "user_span" else str(one.get("name", ""))
        operation = one.get("tags", {}).get("collective.op", "") if one["type"] == "summary" else ""
        kinds[Kind(one["type"], name, operation)].append(fields(one))
    return kinds


def test_the_benchmarks_log_has_the_fields_of_a_real_one(log: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "big_log.py"), str(tmp_path), "--ranks", "2", "--steps", "50"]
    subprocess.run(command, check=True, timeout=60)
    # A first identity is from before all is known; a first step, or one that garbage was collected in, has more.
    real = by_kind(records(log))
    known = by_kind([one for one in records(log) if one["type"] != "identity" or "pytorch.parallelism" in one["tags"]])
    made = by_kind(records(tmp_path))
    assert made.keys() == real.keys()
    for kind, all_of_them in made.items():
        ever, always = set.union(*real[kind]), set.intersection(*known[kind])
        for one in all_of_them:
            assert always - one == set(), kind
            assert one - ever == set(), kind


@pytest.fixture(scope="module")
def answers(log: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[Any, ...]]]:
    """What DuckDB gives for the questions in the docs, but for the first, which only makes the views. Beside the job
    lie earlier ones, with long steps, and in its own log one that was broken off: none of that is asked for."""
    root = tmp_path_factory.mktemp("asked") / "logs"
    shutil.copytree(log, root)
    long = {"type": "step", "ts": 2, "step": 7, "start": 1, "duration": 10**15, "metrics": {"data_ns": 1}}
    (mine,) = root.rglob("rank-00000.jsonl")
    mine.write_bytes(mine.read_bytes() + encode(long | {"unfinished": True}))
    for job, incarnation in ((mine.parts[-3], "aaa"), ("another", mine.parts[-2])):
        (root / job / incarnation).mkdir(parents=True, exist_ok=True)
        scalar = {"type": "scalar", "ts": 2, "step": 1, "metrics": {"loss": 1e9}}
        told = ({"type": "identity", "ts": 1, "rank": 0}, long, scalar)
        (root / job / incarnation / mine.name).write_bytes(b"".join(map(encode, told)))
    text = (ROOT / "docs" / "run-log.md").read_text(encoding="utf-8")
    view, *questions = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    assert "'/local/logs/" in view
    with duckdb.connect() as database:
        database.execute(view.replace("'/local/logs/", f"'{root}/"))
        return [database.execute(one).fetchall() for one in questions]


def rank_of(one: Record) -> int:
    return int(Path(one["_file"]).name[5:10])


def test_the_last_operation_of_each_rank(log: Path, answers: list[list[tuple[Any, ...]]]) -> None:
    found = {rank: rest for rank, *rest in answers[0]}
    assert found.keys() == {0, 1}
    for rank, (operation, step, groups, _) in found.items():
        mine = [one for one in records(log) if rank_of(one) == rank]
        last = max((one for one in mine if one["type"] in ("call", "user_span", "event", "step")), key=lambda r: r["ts"])
        assert last["type"] == "step"
        assert operation == f"step {STEPS}"
        assert step == STEPS
        assert groups.startswith('{"0":[')


def test_the_slowest_steps_by_rank(log: Path, answers: list[list[tuple[Any, ...]]]) -> None:
    expected = []
    for rank in (0, 1):
        steps = [one for one in of_type(log, "step") if rank_of(one) == rank and not one.get("first")]
        slowest = sorted(steps, key=lambda one: -one["duration"])[:3]
        expected += [(rank, one["step"], one["duration"] / 1e6, one["metrics"]["data_ns"] / 1e6) for one in slowest]
    assert [pytest.approx(one) for one in expected] == answers[1]


def test_the_loss_by_step(log: Path, answers: list[list[tuple[Any, ...]]]) -> None:
    losses = defaultdict(list)
    for one in of_type(log, "scalar"):
        losses[one["step"]].append(one["metrics"]["loss"])
    assert [pytest.approx((step, mean(those), 2)) for step, those in sorted(losses.items())] == answers[2]
    assert len(losses) == STEPS
