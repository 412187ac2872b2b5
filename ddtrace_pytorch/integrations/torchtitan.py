"""torchtitan's structured log among our records: its spans, scalars and events, with its steps and their tags.

    TITAN_STRUCT_LOGGER_HANDLERS=ddtrace_pytorch.integrations.torchtitan.register_handler

torchtitan then writes no file of its own; name its own handler beside ours, with a comma, to have both.

Up to torchtitan 0.3 its records come on the thread that makes them, and a span of ours in one of theirs lies in it.
Later releases hand them on from a thread of their own, with what was so where they were made; the steps that we count
ourselves don't get torchtitan's numbers then, its own records do.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddtrace_pytorch.border import safely, warn_once
from ddtrace_pytorch.records import switch
from ddtrace_pytorch.records.attributes import NAME_LIMIT, NOTHING, as_number, short_name, text
from ddtrace_pytorch.records.here import Here, running_loop
from ddtrace_pytorch.records.notes import row
from ddtrace_pytorch.records.recorder import EVENT, SCALAR, SPAN, Failure, Recorder, Row
from ddtrace_pytorch.records.tags import tag
from ddtrace_pytorch.records.user_span import Open, Span, begin, current, end
from ddtrace_pytorch.spans import MESSAGE_LIMIT

_STEP_STATE = "torchtitan.observability.structured_logger.step_state"

# The thread of a span that was made elsewhere.
_SOMEWHERE = Here("", foreign=False)

# Spans that are never ended: of how many threads and tasks, and how many of each, are kept.
LINES = 1_000
DEPTH = 100
# A span that is said to have taken longer, in ms, has not.
LONGEST_MS = 1e12


def register_handler(*, structured_logger: logging.Logger, **place: Any) -> None:
    """The factory that torchtitan calls when it sets its log up; `place` (rank, source, output_dir) is known to us."""
    structured_logger.addHandler(Handler())
    switch.wake()
    if switch.recorder is None:
        warn_once(
            "torchtitan's records go nowhere: tracing is not switched on in this process, or records are not; "
            "set DD_PATCH_MODULES=pytorch:true and start with ddtrace-run"
        )


@dataclass(frozen=True)
class _Made:
    """Where and when a record was made: `at` in ns on the monotonic clock; `elsewhere`: not on this thread."""

    at: int
    place: str
    step: int | None
    relative: int | None
    tags: tuple[str, ...]
    thread: int
    elsewhere: bool


@dataclass
class _Line:
    """The spans that a thread or task of torchtitan's is in, the innermost last, and what the last failed with.
    `refused`: how many more there are in the innermost, by name."""

    open: list[Open] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    failed: Failure | None = None


class Handler(logging.Handler):
    """Takes torchtitan's records; what goes wrong with one is said once and never reaches torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[int, str | None], _Line] = {}
        self._step: int | None = None
        self._leader: weakref.ref[asyncio.Task[Any]] | None = None
        self._guarded = safely("take a record of torchtitan's")(self._take)

    def emit(self, record: logging.LogRecord) -> None:
        recorder = switch.recorder
        if recorder is not None:
            self._guarded(recorder, record)

    def _take(self, recorder: Recorder, record: logging.LogRecord) -> None:
        kind = getattr(record, "log_type_name", None)
        if not isinstance(kind, str):
            return  # plain text
        made = _made(record)
        if not made.elsewhere:
            _leave_ended()
            self._follow(recorder, made)
        line = made.thread, getattr(record, "task_name", None)
        if kind == "metric_value":
            self._scalar(recorder, record, made, line)
        elif getattr(record, "log_type", None) != "event":
            self._note(recorder, EVENT, short_name(kind), NOTHING, made, line)
        elif kind.endswith("_start"):
            self._start(recorder, short_name(kind.removesuffix("_start")), made, line)
        elif kind.endswith("_error"):
            self._error(record, kind, line)
        elif kind.endswith("_end"):
            self._end(recorder, short_name(kind.removesuffix("_end")), record, made, line)

    def _follow(self, recorder: Recorder, made: _Made) -> None:
        """Have our step be torchtitan's, also where that goes back."""
        step = made.step
        if step is not None and (step != self._step or recorder.progress.step.number is None):
            task = asyncio.current_task() if running_loop() is not None else None
            if self._step is None or step > self._step or self._may_go_back(task):
                self._step = step
                self._leader = None if task is None else weakref.ref(task)
                recorder.set_step(step, made.relative)
        for word in made.tags:
            tag(recorder.progress, word)

    def _may_go_back(self, task: asyncio.Task[Any] | None) -> bool:
        """Tasks may be in different steps at once, and the latest is that of the process: back go those alone that
        brought it there, while they run."""
        leader = None if self._leader is None else self._leader()
        return task is None or leader is None or leader is task or leader.done()

    def _scalar(self, recorder: Recorder, record: logging.LogRecord, made: _Made, line: Any) -> None:
        number = as_number(getattr(record, "value", None))
        if number is not None:
            name = short_name(text(getattr(record, "event_name", None), "torchtitan", "the name of a scalar"))
            self._note(recorder, SCALAR, "", {name: number}, made, line)

    def _note(self, recorder: Recorder, kind: str, name: str, values: dict[str, Any], made: _Made, line: Any) -> None:
        found = row(recorder, kind, name, values, made.place, 0, of_step=_of_step(recorder, made))
        if found is None:
            return
        if made.elsewhere:
            around = self._lines.get(line)
            found = _as_made(found, made, around.open[-1] if around is not None and around.open else None)
        recorder.add(found)

    def _start(self, recorder: Recorder, name: str, made: _Made, line: Any) -> None:
        mine = self._lines.get(line)
        if mine is None:
            if len(self._lines) >= LINES:
                for lost in self._lines.pop(next(iter(self._lines))).open:
                    _drop(lost)
            mine = self._lines[line] = _Line()
        if len(mine.open) >= DEPTH:
            if name in mine.refused or len(mine.refused) < DEPTH:
                mine.refused[name] = mine.refused.get(name, 0) + 1
            return
        if made.elsewhere:
            opened: Open | None = _begun(recorder, name, made, mine.open[-1] if mine.open else None)
        else:
            opened = begin(recorder, Span(name, NOTHING), made.place, 0)
        if opened is not None:
            mine.open.append(opened)

    def _error(self, record: logging.LogRecord, kind: str, line: Any) -> None:
        mine = self._lines.get(line)
        if mine is not None:
            said = record.getMessage().partition(f"{kind}: ")[2]
            name, _, message = said.partition(": ")
            mine.failed = Failure(name[:NAME_LIMIT] or "Exception", message[:MESSAGE_LIMIT], ())

    def _end(self, recorder: Recorder, name: str, record: logging.LogRecord, made: _Made, line: Any) -> None:
        mine = self._lines.get(line)
        if mine is None:
            return
        failed, mine.failed = mine.failed, None
        if mine.refused.get(name):
            mine.refused[name] -= 1
            return
        if all(one.name != name for one in mine.open):
            return  # that it began was not seen
        mine.refused.clear()
        # Those in it that were never ended are left behind.
        while (opened := mine.open.pop()).name != name:
            _drop(opened)
        if not mine.open:
            del self._lines[line]
        took = as_number(getattr(record, "value", None))
        if took is not None and 0 <= took < LONGEST_MS:
            opened.started = made.at - round(took * 1e6)
        if not made.elsewhere:
            end(opened, None, failed)
            return
        opened.took, opened.failed = max(made.at - opened.started, 0), failed is not None
        found = row(recorder, SPAN, name, NOTHING, made.place, 0, of_step=_of_step(recorder, made))
        if found is not None:
            told = (opened.started, opened.id, opened.chosen, True, failed)
            recorder.add((*_as_made(found, made, opened.parent)[: -len(told)], *told))


def _drop(opened: Open) -> None:
    """It was never ended, and is around nothing any more."""
    if opened.took < 0:
        opened.took = 0
    if opened.thread.innermost is opened:
        opened.thread.innermost = opened.parent
    _leave_ended()


def _leave_ended() -> None:
    """This thread or task is in no span that is over: it may have ended, or been dropped, in another."""
    opened = current.get()
    if opened is not None and opened.took >= 0:
        while opened is not None and opened.took >= 0:
            opened = opened.parent
        current.set(opened)


def _begun(recorder: Recorder, name: str, made: _Made, outer: Open | None) -> Open:
    """What :func:`begin` would have given where the record was made."""
    opened = Open()
    opened.name, opened.attributes, opened.id, opened.owner = name, NOTHING, next(recorder.ids), None
    opened.parent, opened.depth = outer, 0 if outer is None else outer.depth + 1
    opened.step, opened.thread, opened.code, opened.instruction = recorder.progress.step, _SOMEWHERE, made.place, 0
    opened.chosen = None if opened.step.number is not None else recorder.chooses(name)
    opened.started, opened.took, opened.within = made.at, -1, True
    opened.failed = opened.stray = False
    return opened


def _made(record: logging.LogRecord) -> _Made:
    # Of releases whose records come on another thread.
    state = getattr(record, "logging_thread_state", None)
    age = time.time_ns() - int(record.created * 1e9)
    place = f"{record.pathname}:{record.lineno}:{record.funcName}"
    said = getattr(record, "step", None)
    if state is not None:
        step = state.step if said is None else said
        return _Made(
            time.monotonic_ns() - age, place, step, state.relative_step, _words(state.step_tags), state.tid, True
        )
    return _Made(
        time.monotonic_ns() - age,
        place,
        _asked("get_step") if said is None else said,
        _asked("get_relative_step"),
        _words(_asked("get_step_tags")),
        threading.get_ident(),
        False,
    )


def _words(tags: Any) -> tuple[str, ...]:
    return tuple([short_name(word) for word in tags]) if tags else ()


def _asked(name: str) -> Any:
    """What torchtitan says of the step under way, as it is seen from here."""
    ask: Callable[[], Any] | None = getattr(sys.modules.get(_STEP_STATE), name, None)
    return ask() if ask is not None else None


def _of_step(recorder: Recorder, made: _Made) -> tuple[int | None, int | None] | None:
    """The number that a record has which isn't of our step under way."""
    if made.step is None or made.step == recorder.progress.step.number:
        return None
    return made.step, made.relative


def _as_made(found: tuple[Any, ...], made: _Made, parent: Open | None) -> tuple[Any, ...]:
    """A row made here as it would have been where the record was."""
    return Row(*found)._replace(at=made.at, tags=made.tags, thread=f"thread {made.thread}", task=None, parent=parent)
