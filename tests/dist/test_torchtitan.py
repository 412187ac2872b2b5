"""torchtitan's structured log in ours: with the package where it is installed, and in the format of later releases."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from harness.job import DDTRACE_RUN, PYTHON, Jobs, environment
from harness.log import Record, of_type, rank_spans, records

pytestmark = pytest.mark.dist

FACTORY = "ddtrace_pytorch.integrations.torchtitan.register_handler"

TRAINING = """
    import asyncio, threading, time
    import torch
    from torchtitan.observability import structured_logger as sl
    from ddtrace_pytorch import span

    sl.init_structured_logger(source="training", output_dir="out")
    sl.log_trace_instant("training_start")
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in (101, 102):
        sl.set_step(step, relative_step=step - 100)
        with sl.log_trace_span("fwd_bwd"):
            with span("ours"):
                with sl.log_trace_span("inner"):
                    time.sleep(0.002)
            weight.sum().backward()
        if step == 102:
            sl.add_step_tag("eval")
        sl.log_trace_scalar({"loss": 0.5 * step, "bad": "no number"})
        optimizer.step()
    try:
        with sl.log_trace_span("eval"):
            raise ValueError("no: data")
    except ValueError:
        pass

    @sl.log_trace_span("rollout")
    async def rollout():
        await asyncio.sleep(0.001)

    async def main():
        await asyncio.gather(rollout(), rollout())

    asyncio.run(main())
"""


def spans(log: Path) -> dict[str, Record]:
    return {one["name"]: one for one in of_type(log, "user_span")}


def env(log: Path) -> dict[str, str]:
    return environment(
        None,
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(log),
        TITAN_STRUCT_LOGGER_HANDLERS=FACTORY,
    )


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_a_training_with_torchtitan_needs_no_code(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(TRAINING)], env(log)).ok()
    assert not [*tmp_path.rglob("structured_logs")]
    found = of_type(log, "user_span")
    assert [one["name"] for one in found] == ["inner", "ours", "fwd_bwd"] * 2 + ["eval", "rollout", "rollout"]
    for number, (inner, ours, outer) in enumerate((found[:3], found[3:6]), start=1):
        assert [one["step"] for one in (inner, ours, outer)] == [100 + number] * 3
        assert [one["relative_step"] for one in (inner, ours, outer)] == [number] * 3
        assert inner["parent"] == ours["id"]
        assert ours["parent"] == outer["id"]
        assert outer["duration"] >= inner["duration"] >= 2_000_000
        assert outer["start"] <= inner["start"]
        assert inner["at"].rpartition("/")[2].startswith("train.py:")
    failed = found[6]["error"]
    assert (failed["type"], failed["message"]) == ("ValueError", "no: data")
    first, second = found[-2:]
    assert first["task"] != second["task"]
    scalars = of_type(log, "scalar")
    assert [(one["step"], one["metrics"]) for one in scalars] == [(101, {"loss": 50.5}), (102, {"loss": 51.0})]
    assert ["eval" in one.get("step_tags", ()) for one in scalars] == [False, True]
    assert [one["name"] for one in of_type(log, "event")] == ["training_start"]
    assert [one["step"] for one in of_type(log, "step")][:2] == [101, 102]
    assert len(rank_spans(log)) == 1


# What torchtitan's writer thread does in releases after 0.3: records that were made on other threads, a moment ago.
LATER = """
    import collections, logging, threading, time
    import torch
    import ddtrace_pytorch
    from ddtrace_pytorch.integrations.torchtitan import register_handler

    ddtrace_pytorch.patch()
    logger = logging.getLogger("torchtitan.structured_logger")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    register_handler(structured_logger=logger, rank=0, source="training", output_dir="out")
    State = collections.namedtuple("State", "tid step relative_step step_tags")
    began = time.time()

    def say(after, kind, message="", type_="event", tid=7, tags=(), **extra):
        extra = {"log_type": type_, "log_type_name": kind, "event_name": None, "step": None, "value": None,
                 "relative_step": None, "task_name": None} | extra
        record = logger.makeRecord(logger.name, logging.INFO, "/x/train.py", 12, message, (), None, "step", extra=extra)
        record.created = began + after
        record.logging_thread_state = State(tid, 5, 2, tags)
        logger.handle(record)

    def write():
        say(1.0, "outer_start")
        say(1.0, "other_start", tid=8)
        say(1.25, "inner_start", tags=("gc",))
        say(1.4, "metric_value", type_="instant", event_name="loss", value=float("nan"), step=5)
        say(1.5, "inner_error", "[step 5] inner_error: KeyError: 'x'")
        say(1.5, "inner_end", tags=("gc",), value=250.0)
        say(1.6, "moment", type_="instant")
        say(2.0, "outer_end", value=1000.0)
        say(2.0, "never_end")
        say(2.5, "other_end", tid=8, value=1500.0)
        logger.info("plain text")
        say(3.0, "odd", type_="instant", event_name=3)
        say(3.0, "metric_value", type_="instant", event_name=3, value=1.0)
        for _ in range(500):
            say(4.0, "lost_start", tid=9)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    print(int(began * 1e9))
"""


def test_records_that_come_from_another_thread_are_told_as_they_were_made(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = jobs.run([*PYTHON, jobs.script(LATER)], env(log) | {"DD_PATCH_MODULES": ""}).ok()
    began = int(result.stdout)
    found = spans(log)
    assert set(found) == {"outer", "inner", "other"}
    outer, inner, other = found["outer"], found["inner"], found["other"]
    for one, start, took in ((outer, 1.0, 1.0), (inner, 1.25, 0.25), (other, 1.0, 1.5)):
        assert one["start"] - began == pytest.approx(start * 1e9, abs=2e7)
        assert one["duration"] == pytest.approx(took * 1e9, abs=1e3)
        assert (one["step"], one["relative_step"], one["at"]) == (5, 2, "/x/train.py:12:step")
    assert inner["parent"] == outer["id"]
    assert "parent" not in other
    assert (outer["thread"], other["thread"]) == ("thread 7", "thread 8")
    assert inner["step_tags"] == ["gc"]
    assert (inner["error"]["type"], inner["error"]["message"]) == ("KeyError", "'x'")
    (loss,) = of_type(log, "scalar")
    assert (loss["metrics"], loss["step"], loss["parent"]) == ({"loss": "NaN"}, 5, inner["id"])
    assert [one["name"] for one in of_type(log, "event")] == ["moment", "odd"]
    assert result.stderr.count("could not take a record of torchtitan's") == 1


def test_with_nobody_to_take_them_torchtitans_records_cost_one_warning(jobs: Jobs, tmp_path: Path) -> None:
    script = """
        import logging
        import torch
        from ddtrace_pytorch.integrations.torchtitan import register_handler
        logger = logging.getLogger("torchtitan.structured_logger")
        logger.setLevel(logging.INFO)
        register_handler(structured_logger=logger, rank=0, source="training", output_dir="out")
        logger.info("x", extra={"log_type": "instant", "log_type_name": "x"})
    """
    settings = env(tmp_path / "log") | {"DD_PATCH_MODULES": ""}
    result = jobs.run([*PYTHON, jobs.script(script)], settings).ok()
    assert result.stderr.count("tracing is not switched on") == 1
    assert records(tmp_path / "log") == []
