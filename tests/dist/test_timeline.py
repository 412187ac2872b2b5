"""`ddtrace-pytorch timeline` of a job that really ran."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness import chromium
from harness.chromium import needs_chromium
from harness.job import environment, jobs_in, torchrun
from harness.log import records
from harness.trace_events import checked
from harness.viewer import COMPLAINTS, Viewer, viewer

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
    scalar({"loss": 1 / step, "grad norm": float("inf")})
asyncio.run(rollout())
event("done")
torch.save({"w": torch.ones(1)}, f"{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("job")
    with jobs_in(place) as jobs:
        env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(place / "log"))
        jobs.run([*torchrun(2), jobs.script(SCRIPT)], env).ok()
    return place / "log"


def drawn(log: Path, out: Path, form: str = "json") -> Path:
    """All of it."""
    result = CliRunner().invoke(cli, ["timeline", str(log), "-o", str(out), "--every", "1", "--format", form])
    assert result.exit_code == 0, result.output
    assert f"2 processes, {len(records(log))} records drawn of {len(records(log))}" in result.stdout
    return out


def test_two_ranks_on_one_clock_with_arrows_between_them(log: Path, tmp_path: Path) -> None:
    events = checked(drawn(log, tmp_path / "out.json").read_bytes())
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


def marks_of(log: Path) -> Counter[str]:
    """How many slices, moments and numbers the records are, counted without our reader."""
    counted: Counter[str] = Counter()
    for one in records(log):
        kind, metrics = one["type"], one.get("metrics", {})
        numbers = [value for name, value in metrics.items() if kind == "scalar" or name.startswith("device.memory.")]
        counted["number"] += sum(not isinstance(value, str) and math.isfinite(value) for value in numbers)
        counted["slice"] += kind in ("span", "user_span", "call", "step")
        counted["slice"] += kind == "step" and metrics.get("data_ns", 0) > 0
        counted["number"] += kind == "beat"
        counted["moment"] += kind not in ("span", "user_span", "call", "step", "beat", "scalar")
        counted["moment"] += kind == "scalar" and sum(isinstance(value, str) for value in metrics.values())
    return counted


def test_perfettos_own_format_has_all_that_is_in_the_log(log: Path, tmp_path: Path) -> None:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as words

    trace = words.Trace.FromString(drawn(log, tmp_path / "out.pftrace", "pftrace").read_bytes())
    kind = words.TrackEvent
    counted = Counter(packet.track_event.type for packet in trace.packet if packet.HasField("track_event"))
    expected = marks_of(log)
    assert counted == {
        kind.TYPE_SLICE_BEGIN: expected["slice"], kind.TYPE_SLICE_END: expected["slice"],
        kind.TYPE_INSTANT: expected["moment"], kind.TYPE_COUNTER: expected["number"],
    }  # fmt: skip
    assert min(expected.values()) > 0


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    place = tmp_path_factory.mktemp("viewer")
    with chromium.browser(place / "chromium") as browser, viewer(browser, place / "files") as one:
        yield one


@needs_chromium
@pytest.mark.parametrize("form", ["json", "pftrace"])
def test_perfettos_viewer_shows_all_of_it(opened: Viewer, log: Path, tmp_path: Path, form: str) -> None:
    opened.open(drawn(log, tmp_path / f"out.{form}", form))
    assert opened.ask(COMPLAINTS) == []
    expected = marks_of(log)
    (shown,) = opened.ask("select count(*) as many, sum(dur < 0) as cut, sum(dur = 0) as moments from slice")
    assert shown["many"] == expected["slice"] + expected["moment"]
    assert shown["cut"] == 0
    assert shown["moments"] >= expected["moment"]
    assert opened.ask("select count(*) as many from counter") == [{"many": expected["number"]}]

    (arrows,) = opened.ask("""
        select count(*) as many, count(distinct trace_id) as ids, sum(a.name = b.name) as alike,
        sum(a.ts <= b.ts) as on_time from flow join slice a on a.id = slice_out join slice b on b.id = slice_in
    """)
    calls = Counter((one["group"], one["key"]) for one in records(log) if one["type"] == "call")
    assert set(calls.values()) == {2}
    assert arrows == dict.fromkeys(("many", "ids", "alike", "on_time"), len(calls))

    processes = opened.ask("select name from process where name is not null order by upid")
    assert [one["name"].partition(" · ")[0] for one in processes] == ["rank 0", "rank 1"]
    lines = opened.ask("""
        select thread.name from thread join process using (upid) where pid = 1 and thread.name <> '' order by tid
    """)
    assert [one["name"] for one in lines][:4] == ["rank", "steps", "MainThread", "MainThread (2)"]
