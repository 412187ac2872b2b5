"""What becomes of a lookout whose process was told to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.exporter import KeepingExporter

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives.group_lives import GroupLives
from ddtrace_pytorch.collectives.observer import Collectives
from ddtrace_pytorch.lookout import Lookout
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import load
from ddtrace_pytorch.training.progress import Progress
from ddtrace_pytorch.whereabouts import CLOSER_NS, Whereabouts


@pytest.mark.parametrize("ends", [True, False])
def test_where_a_rank_that_may_end_is_is_looked_at_closely_until_it_goes_on(ends: bool) -> None:
    exporter: Any = KeepingExporter()
    span, clock = RankSpan(service="pytorch", rank=0, start=1, facts={}), Clock()
    settings = load({})
    collectives = Collectives(torch, settings, clock, span, exporter, GroupLives(), wraps=False)
    whereabouts = Whereabouts(0, "node-a", clock, collectives, settings.stall_seconds, Progress())
    lookout = Lookout(settings, clock, span, exporter, collectives, whereabouts, lambda: None, 2)
    lookout.told_to_end(ends=ends)
    assert [(one["type"], one["why"]) for one in exporter.records] == [("state", "signal")]
    assert whereabouts.closer_ns == (0 if ends else CLOSER_NS)
    lookout.resume()
    assert whereabouts.closer_ns == CLOSER_NS
