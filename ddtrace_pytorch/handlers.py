"""The users' own handlers of the run log's records, on a thread that is there only where there are some.

`DD_PYTORCH_LOG_HANDLERS` names factories. Each is called once for a session, ``factory(identity)``, with the run log's
first record, and gives what is called with every record, that one included: ``handler(record)``. A handler with a
``close()`` is closed at the session's end. What they get is their own, to keep or to change.
"""

from __future__ import annotations

import importlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from ddtrace_pytorch.border import in_words, run_theirs, safely, warn, warn_once
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.records.here import be_deaf
from ddtrace_pytorch.runlog.schema import decode, encode
from ddtrace_pytorch.runlog.writer import Record, RunLogQueue
from ddtrace_pytorch.threads import join, leave_signals_to_others

Handle = Callable[[dict[str, Any]], object]

# One that fails so often in a row is called no more.
FAILURES = 10
DROPPED = "handlers too slow"


class Handlers:
    """Those of one session."""

    def __init__(
        self, paths: tuple[str, ...], clock: Clock, identity: Callable[[], dict[str, Any]], agreed: Callable[[], bool]
    ) -> None:
        """`identity` gives the run log's first record, once the ranks have `agreed` who they are."""
        self._paths = paths
        self._clock = clock
        self._identity = identity
        self._agreed = agreed
        self._queue = RunLogQueue()
        self._wake = threading.Event()
        self._handlers: list[_Handler] | None = None
        # What was taken from the queue and not yet handed over.
        self._batch: deque[Record] = deque()
        self._drains: deque[threading.Event] = deque()
        self._closing = self._given_up = self._ended = False
        self._thread: threading.Thread | None = None

    def start(self, whose: object = None) -> None:
        """Start the thread; after :meth:`close`, for what comes late, with new handlers. It keeps `whose`, to whom
        `identity` and `agreed` belong, to its end."""
        self._closing = self._given_up = self._ended = False
        self._handlers = None
        self._thread = threading.Thread(target=self._run, args=(whose,), name="ddtrace_pytorch.handlers", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Have `record` handed to all of them; never waits. What there is no room for is counted, and told them."""
        self._queue.put(record)

    def count_lost(self, reason: str, records: int) -> None:
        """Have them told that `records` were dropped; never waits."""
        self._queue.count_lost(reason, records)

    def wake(self) -> None:
        self._wake.set()

    def drain(self, timeout: float) -> bool:
        """Hand over all that waits; whether they had taken it within `timeout` seconds."""
        done = threading.Event()
        self._drains.append(done)
        if self._ended:
            done.set()
        self.wake()
        return done.wait(timeout)

    def stop(self) -> None:
        """End the thread once all that waits has been handed over."""
        self._closing = True
        self.wake()

    def join(self, deadline: Deadline) -> None:
        """Wait for the end of the thread, and of the handlers; what they haven't taken until then is lost."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        join(thread, deadline.left())
        self._given_up = True
        if thread.is_alive():
            left, refused = self._queue.take()
            lost = len(self._batch) + len(left) + refused
            if lost:
                warn(f"{lost:,} records came too late for the handlers in DD_PYTORCH_LOG_HANDLERS")

    def _run(self, _whose: object) -> None:
        leave_signals_to_others()
        # What they record in turn would come back to them, for ever.
        be_deaf()
        last = False
        while not last:
            self._wake.wait()
            self._wake.clear()
            last = self._closing
            waiting = len(self._drains)
            self._work(last)
            self._release(waiting)
        for handler in self._handlers or ():
            handler.close()
        # Before the last are released: a drain that comes after that finds it set.
        self._ended = True
        self._release(len(self._drains))

    def _release(self, drains: int) -> None:
        for _ in range(drains):
            self._drains.popleft().set()

    @safely("hand records to the handlers")
    def _work(self, last: bool) -> None:
        if self._handlers is None:
            if not (last or self._agreed()):
                return
            first = self._identity()
            self._handlers = [
                _Handler(path, handle) for path in self._paths if (handle := _made(path, first)) is not None
            ]
            self._hand(first)
        records, refused = self._queue.take()
        for reason, many in {DROPPED: refused, **self._queue.take_drops()}.items():
            if many:
                self._hand({"type": "drop", "ts": self._clock.now(), "reason": reason, "count": many, "bytes": 0})
        self._batch.extend(records)
        while self._batch and not self._given_up:
            self._hand(self._batch.popleft())

    def _hand(self, record: Record) -> None:
        line = record if isinstance(record, bytes) else encode(record)
        for handler in tuple(self._handlers or ()):
            # As a reader of the log has it, and for each its own.
            found = decode(line)
            if found is not None and not handler.take(found):
                assert self._handlers is not None
                self._handlers.remove(handler)


class _Handler:
    """One handler, and how often it has failed in a row."""

    def __init__(self, path: str, handle: Handle) -> None:
        self._path = path
        self._handle = handle
        self._guarded = safely(f"hand a record to {path}")(self._call)
        self._failures = 0

    def take(self, record: dict[str, Any]) -> bool:
        """Whether it is to be called again."""
        if self._guarded(record):
            self._failures = 0
            return True
        self._failures += 1
        if self._failures < FAILURES:
            return True
        warn_once(f"the handler {self._path} failed {FAILURES} times in a row and is called no more")
        return False

    def close(self) -> None:
        safely(f"close the handler {self._path}")(run_theirs)(self._close)

    def _close(self) -> None:
        close = getattr(self._handle, "close", None)
        if callable(close):
            close()

    def _call(self, record: dict[str, Any]) -> bool:
        run_theirs(self._handle, record)
        return True


def factory_at(path: str) -> Callable[..., Any]:
    """The factory at `path`, ``package.module:factory`` or ``package.module.factory``; raises what importing raises.

    Raises:
        ValueError: it is no such path.
        TypeError: what is there can't be called.
    """
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ValueError("it has not the form package.module:factory")
    factory: Any = importlib.import_module(module)
    for part in name.split("."):
        factory = getattr(factory, part)
    if not callable(factory):
        raise TypeError(f"it is {type(factory).__name__}, which can't be called")
    return cast("Callable[..., Any]", factory)


def _made(path: str, identity: dict[str, Any]) -> Handle | None:
    """What the factory at `path` gives."""
    try:
        handle = run_theirs(lambda: factory_at(path)(decode(encode(identity))))
        if not callable(handle):
            raise TypeError(f"it gave {type(handle).__name__}, which can't be called")
    except Exception as error:
        warn_once(f"DD_PYTORCH_LOG_HANDLERS: {path} is left out: {in_words(error)}")
        return None
    return cast("Handle", handle)
