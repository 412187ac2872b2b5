"""The users' handlers of the run log's records, without a session."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.handlers import Handlers


def test_after_its_end_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(factory=lambda identity: taken.append))
    handlers = Handlers(("mine:factory",), Clock(), lambda: {"type": "identity", "ts": 1}, lambda: True)
    for kind in ("early", "late"):
        handlers.start()
        handlers.put({"type": kind, "ts": 2})
        assert handlers.drain(30)
        handlers.stop()
        handlers.join(Deadline(30))
        # What waits for a thread that is gone would not be answered at all.
        assert handlers.drain(0)
    assert [one["type"] for one in taken] == ["identity", "early", "identity", "late"]
