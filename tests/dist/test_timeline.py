"""`ddtrace-pytorch timeline` of a job that really ran."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness.job import Jobs, environment, torchrun
from harness.log import records

from ddtrace_pytorch.cli.main import cli

pytestmark = pytest.mark.dist

SCRIPT = """
import asyncio
import torch, torch.distributed as dist
import ddtrace_pytorch
from ddtrace_pytorch import event, scalar, set_step, span
ddtrace_pytorch.patch()

async def ask(number):
    async with span(f"ask {number}"):
        await asyncio.sleep(0.01)
        with span("answer"):
            await asyncio.sleep(0.01)

async def rollout():
    await asyncio.gather(*map(ask, range(3)))

dist.init_process_group("gloo")
for step in range(1, 4):
    set_step(step)
    with span("work"):
        with span("reduce"):
            dist.all_reduce(torch.ones(4))
    scalar({"loss": 1 / step})
asyncio.run(rollout())
event("done")
torch.save({"w": torch.ones(1)}, f"{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_on_one_clock_with_arrows_between_them(jobs: Jobs, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out.json"
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log))
    jobs.run([*torchrun(2), jobs.script(SCRIPT)], env).ok()

    result = CliRunner().invoke(cli, ["timeline", str(log), "-o", str(out), "--every", "1"])
    assert result.exit_code == 0, result.output
    assert f"2 processes, {len(records(log))} records drawn of {len(records(log))}" in result.stdout
    events = json.loads(out.read_bytes())["traceEvents"]
    shown = [Counter(one["name"] for one in events if one["ph"] in "XC" and one["pid"] == pid) for pid in (1, 2)]
    for names in shown:
        assert {"step 1", "step 2", "step 3", "work", "reduce", "loss"} <= names.keys()
        assert (names["work"], names["answer"], names["loss"]) == (3, 3, 3)
    assert Counter(one["name"] for one in events if one["ph"] == "i")["done"] == 2
    slices = [one for one in events if one["ph"] == "X" and one["pid"] == 1]
    titles = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    asked = [one for one in slices if one["name"].startswith("ask ")]
    assert sorted(titles[one["tid"]] for one in asked) == ["MainThread", "MainThread (2)", "MainThread (3)"]
    answers = [one["tid"] for one in slices if one["name"] == "answer"]
    assert sorted(answers) == sorted(one["tid"] for one in asked)

    saved = {one["name"] for one in slices if titles[one["tid"]] == "checkpoints"}
    assert saved == {"0.pt"}

    flows: dict[int, list[tuple[float, str, int]]] = {}
    for one in events:
        if one["ph"] in "stf":
            flows.setdefault(one["id"], []).append((one["ts"], one["ph"], one["pid"]))
    assert len(flows) >= 3
    for points in flows.values():
        (begin, s, first), (end, f, last) = sorted(points, key=lambda point: point[0])
        assert (s, f, {first, last}) == ("s", "f", {1, 2})
        assert begin <= end
