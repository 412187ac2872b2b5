"""A checkpoint under way, until it is told of. Loaded with the first of them."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.rank_span import Piece
from ddtrace_pytorch.spans import Fact, describe_error
from ddtrace_pytorch.training.checkpoint_spans import Checkpoint
from ddtrace_pytorch.training.checkpoint_target import File, Size, Storage, size_of_saved

if TYPE_CHECKING:
    from ddtrace_pytorch.session import Session
    from ddtrace_pytorch.training.checkpoint import Operation


@dataclass(eq=False)
class Running:
    """An operation that has begun."""

    operation: Operation
    session: Session
    thread: int
    began: int
    under: Piece
    step: int | None
    target: File | Storage
    # Checkpoint id and storage writer as they were given: `async_save` hands these very objects to `save`.
    ids: tuple[Any, Any]
    # In the group that saves.
    rank: int
    # It is the part of an async_save that another thread does.
    behind: bool
    future: Any = None
    more: dict[str, Fact] = field(default_factory=dict)
    size: Size | None = None

    def goes_on(self, future: Any) -> None:
        """In the background, until `future` is done."""
        self.future = future
        future.add_done_callback(safely("tell of a checkpoint")(self._done))

    def session_ends(self) -> None:
        # Whoever waits for the future may go on, and end the session, before its callbacks are called.
        if self.future is not None and self.future.done():
            self._done(self.future)
        else:
            self.more["checkpoint.unfinished"] = "true"
            self.tell(time.monotonic_ns())

    def _done(self, future: Any) -> None:
        failure = CancelledError() if future.cancelled() else future.exception()
        if failure is None:
            self.size = size_of_saved(future.result(), self.rank)
        self.tell(time.monotonic_ns(), failure)

    def tell(self, ended: int, error: BaseException | None = None) -> None:
        """Of an asynchronous one only the first time."""
        if self.operation.is_async:
            try:
                self.session.checkpoints.in_background.remove(self)
            except ValueError:
                return
        self.session.checkpoints.ended(
            Checkpoint(
                op=self.operation.name,
                kind=self.operation.kind,
                path=self.target.path,
                resource=self.target.resource,
                began=self.began,
                ended=ended,
                under=self.under,
                step=self.step,
                size=self.size if error is None else None,
                failure=describe_error(error) if error is not None else None,
                more=self.more,
            )
        )
