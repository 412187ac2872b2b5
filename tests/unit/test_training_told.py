"""What a session tells of steps, where one of them can't be told."""

from __future__ import annotations

import threading
from typing import Any

from harness.exporter import KeepingExporter

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import load
from ddtrace_pytorch.training.observer import Training
from ddtrace_pytorch.training.progress import Progress, Step
from ddtrace_pytorch.training.steps import Steps


def made(exporter: Any) -> Training:
    span = RankSpan(service="pytorch", rank=0, start=1, facts={})
    steps = Steps(Progress(), lambda: None, lambda: None)
    training = Training(load({"DD_PYTORCH_STEP_SAMPLE": "1"}), Clock(), span, exporter, steps, None)
    training.open()
    return training


def test_the_first_step_is_told_apart() -> None:
    exporter: Any = KeepingExporter()
    training = made(exporter)
    for number, (wall, data) in enumerate(((9_000_000, 0), (1_000_000, 500_000), (3_000_000, 500_000)), 1):
        training.ended(Step(number, number), (0, 0, 0, 0, 0), (wall, data, 0, 0, 0))
        training.beat()
    training.summarise()
    training.ended(Step(4, 4), (0, 0, 0, 0, 0), (1_000_000, 0, 0, 0, 0))
    training.farewell(interrupted=False)
    steps = [record for record in exporter.records if record["type"] == "step"]
    assert [(one["step"], one.get("first", False)) for one in steps] == [(1, True), (2, False), (3, False), (4, False)]
    assert [one.tags.get("step.first") for one in exporter.spans if one.name == "pytorch.step"] == ["true"] + [None] * 3
    facts, later = (one.metrics for one in exporter.spans if one.name == "pytorch.steps")
    assert (facts["pytorch.steps"], facts["step.first_ms"]) == (3, 9.0)
    assert (facts["step.time_ms.max"], facts["step.per_second"]) == (3.0, 500.0)
    assert (facts["step.share.data"], facts["step.share.compute"]) == (0.25, 0.75)
    assert later["pytorch.steps"] == 1
    assert "step.first_ms" not in later


def test_a_step_that_cannot_be_told_costs_only_itself() -> None:
    exporter: Any = KeepingExporter()
    training = made(exporter)
    steps = [Step(number, 1) for number in (1, 10**5000, 10**5000, 2)]
    for step in steps:
        training.ended(step, (0, 0, 0, 0, 0), (1_000, 0, 0, 0, 0))
    training.farewell(interrupted=False)
    assert [one.resource for one in exporter.spans if one.name == "pytorch.step"] == ["step 1", "step 2"]
    assert [record["step"] for record in exporter.records if record["type"] == "step"] == [1, 2]
    assert [step.sampled for step in steps] == [True, False, False, True]
    drops = [record for record in exporter.records if record["type"] == "drop"]
    assert sum(record["count"] for record in drops) == 2
    assert {record["reason"] for record in drops} == {"step that can't be told"}
    assert [one.name for one in exporter.spans][-1] == "pytorch.steps"


def test_steps_that_another_thread_tells_meanwhile_are_told_once() -> None:
    """The end doesn't wait for ever for the Pulse, which may be telling of many."""

    class Overtaken(KeepingExporter):
        def put(self, record: Any) -> None:
            super().put(record)
            if len(self.records) == 1:
                end = threading.Thread(target=training.farewell, args=(False,))
                end.start()
                end.join()

    exporter: Any = Overtaken()
    training = made(exporter)
    for number in (1, 2, 3, 4):
        training.ended(Step(number, number), (0, 0, 0, 0, 0), (1_000, 0, 0, 0, 0))
    training.beat()
    assert sorted(record["step"] for record in exporter.records if record["type"] == "step") == [1, 2, 3, 4]
