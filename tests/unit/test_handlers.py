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


class Odd(BaseException):
    """What no `except Exception` catches."""


class Raising:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, record: dict[str, Any]) -> None:
        raise self._error

    @property
    def close(self) -> None:
        raise self._error


@pytest.mark.once
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), Odd("odd")], ids=lambda error: type(error).__name__
)
def test_whatever_one_raises_the_others_go_on_and_are_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    taken: list[dict[str, Any]] = []
    closed: list[bool] = []

    class Keeper:
        def __call__(self, record: dict[str, Any]) -> None:
            taken.append(record)

        def close(self) -> None:
            closed.append(True)

    theirs = SimpleNamespace(
        refuses=lambda identity: Raising(error)({}),
        raises=lambda identity: Raising(error),
        keeper=lambda identity: Keeper(),
    )
    monkeypatch.setitem(sys.modules, "mine", theirs)
    paths = ("mine:refuses", "mine:raises", "mine:keeper")
    handlers = Handlers(paths, Clock(), lambda: {"type": "identity", "ts": 1}, lambda: True)
    handlers.start()
    handlers.put({"type": "first", "ts": 2})
    assert handlers.drain(30)
    handlers.put({"type": "second", "ts": 3})
    handlers.stop()
    handlers.join(Deadline(30))
    assert [one["type"] for one in taken] == ["identity", "first", "second"]
    assert closed == [True]
    for said in (
        "mine:refuses is left out",
        "could not hand a record to mine:raises",
        "could not close the handler mine:raises",
    ):
        assert said in caplog.text
