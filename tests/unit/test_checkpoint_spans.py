"""Which checkpoints have a span of their own, and what a span says that stands for several."""

from __future__ import annotations

from typing import Any

import pytest

from ddtrace_pytorch.rank_span import Piece
from ddtrace_pytorch.training.checkpoint_spans import APART, LONG, Checkpoint, Checkpoints
from ddtrace_pytorch.training.checkpoint_target import Size

PIECE = Piece(index=3, trace_id=1, span_id=2, start=0)
SHORT = 1_000_000
FAILED = {"error.type": "OSError", "error.message": "disk full", "error.stack": ""}


def checkpoint(began: int, duration: int = SHORT, op: str = "torch.save", **more: Any) -> Checkpoint:
    known: dict[str, Any] = {
        "op": op, "kind": "save", "path": "at", "resource": "at", "began": began, "ended": began + duration,
        "under": PIECE, "size": Size(10, "file"), **more,
    }  # fmt: skip
    return Checkpoint(**known)


class Told:
    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.checkpoints = Checkpoints(self._tell)

    def _tell(
        self, name: str, resource: str, start: int, duration: int, facts: dict[str, Any], error: bool, under: Piece
    ) -> None:
        assert name == "pytorch.checkpoint"
        self.spans.append({"resource": resource, "start": start, "duration": duration, "error": error, "under": under})
        self.spans[-1] |= facts

    def counts(self) -> list[int]:
        return [span["checkpoint.count"] for span in self.spans]


def test_what_a_span_says() -> None:
    told = Told()
    told.checkpoints.ended(checkpoint(7, step=12, more={"checkpoint.async": "true"}))
    assert told.spans == [
        {
            "resource": "at", "start": 7, "duration": SHORT, "error": False, "under": PIECE,
            "checkpoint.op": "torch.save", "checkpoint.kind": "save", "checkpoint.path": "at",
            "checkpoint.bytes": 10, "checkpoint.bytes_of": "file", "checkpoint.count": 1, "checkpoint.ms": 1.0,
            "checkpoint.async": "true", "step": 12,
        }
    ]  # fmt: skip


def test_what_is_not_known_is_not_said() -> None:
    told = Told()
    told.checkpoints.ended(checkpoint(7, path=None, size=None, step=None))
    assert not {"checkpoint.path", "checkpoint.bytes", "checkpoint.bytes_of", "step"} & set(told.spans[0])


def test_a_crowd_of_small_ones_is_one_span_a_second_and_nothing_is_lost() -> None:
    told = Told()
    step = APART // 100
    for number in range(1_000):
        told.checkpoints.ended(checkpoint(number * step))
    told.checkpoints.settle()
    told.checkpoints.settle()
    assert len(told.spans) == 11
    assert max(told.counts()) == 100
    assert sum(told.counts()) == 1_000
    assert sum(span["checkpoint.bytes"] for span in told.spans) == 10_000
    assert sum(span["checkpoint.ms"] for span in told.spans) == pytest.approx(1_000)


def test_long_ones_are_told_of_however_close_they_are() -> None:
    told = Told()
    for number in range(5):
        told.checkpoints.ended(checkpoint(number * LONG, LONG))
    assert told.counts() == [1] * 5


def test_operations_and_failures_are_crowds_of_their_own() -> None:
    told = Told()
    told.checkpoints.ended(checkpoint(0))
    told.checkpoints.ended(checkpoint(1, op="torch.load"))
    told.checkpoints.ended(checkpoint(2, failure=FAILED, size=None))
    told.checkpoints.ended(checkpoint(3, failure=FAILED, size=None))
    assert [(span["checkpoint.op"], span["error"]) for span in told.spans] == [
        ("torch.save", False), ("torch.load", False), ("torch.save", True),
    ]  # fmt: skip
    assert told.spans[2]["error.type"] == "OSError"
    told.checkpoints.settle()
    assert told.counts() == [1, 1, 1, 1]
    assert told.spans[3]["error"] is True


def test_a_save_in_a_signal_handler_may_come_in_the_midst_of_another() -> None:
    told = Told()
    plain = told.checkpoints._tell

    def interrupted(*span: Any) -> None:
        told.checkpoints._tell = plain
        told.checkpoints.ended(checkpoint(LONG, LONG, op="torch.load"))
        plain(*span)

    told.checkpoints._tell = interrupted
    told.checkpoints.ended(checkpoint(0))
    assert told.counts() == [1, 1]
