"""What a session tells of steps, where one of them can't be told."""

from __future__ import annotations

from typing import Any

from harness.exporter import KeepingExporter

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import load
from ddtrace_pytorch.training.observer import Training
from ddtrace_pytorch.training.progress import Progress, Step
from ddtrace_pytorch.training.steps import Steps


def test_a_step_that_cannot_be_told_costs_only_itself() -> None:
    exporter: Any = KeepingExporter()
    span = RankSpan(service="pytorch", rank=0, start=1, facts={})
    steps = Steps(Progress(), lambda: None, lambda: None)
    training = Training(load({"DD_PYTORCH_STEP_SAMPLE": "1"}), Clock(), span, exporter, steps, None)
    training.open()
    made = [Step(number, 1) for number in (1, 10**5000, 10**5000, 2)]
    for step in made:
        training.ended(step, (0, 0, 0, 0, 0), (1_000, 0, 0, 0, 0))
    training.farewell(interrupted=False)
    assert [one.resource for one in exporter.spans if one.name == "pytorch.step"] == ["step 1", "step 2"]
    assert [record["step"] for record in exporter.records if record["type"] == "step"] == [1, 2]
    assert [step.sampled for step in made] == [True, False, False, True]
    drops = [record for record in exporter.records if record["type"] == "drop"]
    assert sum(record["count"] for record in drops) == 2
    assert {record["reason"] for record in drops} == {"step that can't be told"}
    assert [one.name for one in exporter.spans][-1] == "pytorch.steps"
