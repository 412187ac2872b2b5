"""What a beat tells of the calls that were noted, for which modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.exporter import KeepingExporter

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives.group_lives import GroupLives
from ddtrace_pytorch.collectives.observer import Collectives
from ddtrace_pytorch.ledger import Cell, Group, How, Note
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import load

# On two groups: operation, group, and how many ms each call took.
SLOW = (("all_reduce", "0", (1_100, 1_900, 1_300)), ("barrier", "0", (2_000,)), ("all_reduce", "1", (1_500,)))


def told(exporter: KeepingExporter) -> list[tuple[str, float, float | None]]:
    return [
        (one.resource, one.metrics["collective.time_ms"], one.metrics.get("collective.slow_calls"))
        for one in exporter.spans
    ]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("summary", [("all_reduce", 1_900.0, 4), ("barrier", 2_000.0, 1)]),
        ("all", [(name, float(ms), None) for name, _, took in SLOW for ms in took]),
        ("crossnode", [(name, float(ms), None) for name, _, took in SLOW for ms in took]),
    ],
)
def test_of_slow_calls_one_is_told_for_each_operation_and_the_others_are_counted(
    mode: str, expected: list[tuple[str, float, float | None]]
) -> None:
    exporter: Any = KeepingExporter()
    span = RankSpan(service="pytorch", rank=0, start=1, facts={})
    settings = load({"DD_PYTORCH_COLLECTIVES": mode})
    collectives = Collectives(torch, settings, Clock(), span, exporter, GroupLives(), wraps=False)
    groups = {name: Group(name, name, "gloo", (0, 1), 0) for name in "01"}
    for _ in range(2):
        for operation, group, took in SLOW:
            cell = Cell(collectives.ledger, operation, groups[group], How.WAITED, True)
            for ms in took:
                collectives.ledger.remember(Note(cell, 0, ms * 1_000_000, 8, 1, None, 0))
        collectives.beat()
        assert told(exporter) == expected
        assert exporter.records == []
        exporter.spans.clear()
    collectives.beat()
    assert told(exporter) == []
