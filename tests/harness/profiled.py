"""A training in this process that has profiler windows, with torch's own profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.kernels.profilers import Profilers
from ddtrace_pytorch.kernels.windows import Windows
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import load
from ddtrace_pytorch.training.observer import Training
from ddtrace_pytorch.training.progress import Progress
from ddtrace_pytorch.training.steps import Steps
from harness.exporter import KeepingExporter


class Job:
    """One rank, whose optimizer steps when it is told to."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.exporter: Any = KeepingExporter()
        chosen = load({"DD_PYTORCH_PROFILE_DIR": str(directory)} | settings)
        self.span, self.steps = RankSpan(service="pytorch", rank=0, start=1, facts={}), Steps(Progress(), int, int)
        self.profilers = Profilers()
        self.windows = Windows(
            chosen, Clock(), self.span, self.exporter, self.steps, self.profilers, (0, 1, None), lambda: ("job", "run")
        )
        self.training = Training(chosen, Clock(), self.span, self.exporter, self.steps, None)
        self.training.chosen = self.windows.takes
        self.windows.follow = lambda: self.training.at_turns(self.windows.turned)
        self._undo = self.steps.watch()
        self.steps.begin_anew(1)
        self.training.open()
        self.windows.open()
        self._net = torch.nn.Linear(4, 4)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.1)

    @property
    def number(self) -> int:
        """Of the step under way."""
        return self.steps.progress.step.number or 0

    def train(self, until: int, then: Callable[[], object] = lambda: None) -> None:
        """Until the step of that number is the one under way; what was recorded is read after each."""
        while self.number < until:
            self._net(torch.ones(1, 4)).sum().backward()
            self._optimizer.step()
            then()
            self.tell()

    def tell(self) -> None:
        self.training.beat()
        self.windows.beat()
        reader = self.windows._reader
        if reader is not None:
            reader.join(30)
        self.windows.beat()

    def told(self) -> list[dict[str, Any]]:
        return [one for one in self.exporter.records if one["type"] == "profile"]

    def end(self) -> None:
        self.windows.cut("the session ended")
        self.training.close(interrupted=False, over=True)
        self.windows.close(Deadline(30))
        self._undo()
