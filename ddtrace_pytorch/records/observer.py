"""The user's records of one session: what is told of them and when. Runs on the Pulse, and while the session closes."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from types import CodeType
from typing import NamedTuple

from ddtrace_pytorch.border import complain, safely
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.deadline import Deadline
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.rank_span import Piece, RankSpan
from ddtrace_pytorch.records import telling
from ddtrace_pytorch.records.recorder import SCALAR, SPAN, Recorder, Row
from ddtrace_pytorch.records.totals import Said, SpanTotals, named
from ddtrace_pytorch.records.user_span import Open
from ddtrace_pytorch.runlog.schema import encode
from ddtrace_pytorch.source_lines import place_and_function
from ddtrace_pytorch.spans import Fact
from ddtrace_pytorch.training.progress import Step

# A span shorter than that, in ns, is not sent by itself.
SHORTEST = 100_000
# Spans that wait until it is known whether their step is sampled: of one step, and of all.
HELD_OF_STEP = 1_000
HELD = 10_000
# Steps whose scalars and events are kept until their span is made.
STEPS_KEPT = 256
PLACES_KEPT = 10_000
# Pieces of the rank span whose spans may still come.
PIECES = 64
UNTOLD = "record that can't be told"
# At the end, for numbers that are still on their way from a GPU.
GPU_SECONDS = 0.2
TURN_SECONDS = 0.5


class _Held(NamedTuple):
    row: Row
    at: str


class Records:
    """Takes what is recorded from :meth:`open` to :meth:`close`."""

    def __init__(self, recorder: Recorder, clock: Clock, span: RankSpan, exporter: Exporter) -> None:
        self._recorder = recorder
        self._clock = clock
        self._span = span
        self._exporter = exporter
        self._offset = clock.from_monotonic(0)
        self._totals: dict[str, SpanTotals] = {}
        self._since = Said()
        self._told_at = clock.now()
        self._of_steps: dict[Step, Said] = {}
        self._held: dict[Step, list[_Held]] = {}
        self._held_in_all = 0
        self._places: dict[tuple[CodeType, int], str] = {}
        self._pieces: deque[Piece] = deque([span.piece], maxlen=PIECES)
        self._lock = threading.RLock()

    def open(self) -> None:
        self._recorder.begin()

    @safely("tell of the user's records")
    def beat(self) -> None:
        """Tell what was recorded since the last time."""
        if not self._lock.acquire(timeout=TURN_SECONDS):
            return
        try:
            self._take()
            self._decide()
        finally:
            self._lock.release()

    @safely("sum up the user's records")
    def summarise(self) -> None:
        """Tell the totals by name since the last time."""
        self.beat()
        began, self._told_at = self._told_at, self._clock.now()
        for name, totals in tuple(self._totals.items()):
            if totals.count:
                buckets = totals.buckets
                self._summary(name, began, totals.take(), buckets)

    def facts_of_step(self, step: Step) -> dict[str, Fact]:
        """What was recorded in `step`, for its span: each scalar's last number, and how many events; once only."""
        self.beat()
        said = self._of_steps.pop(step, None)
        return {} if said is None else said.facts(summary=False)

    def facts_of_summary(self) -> dict[str, Fact]:
        """The same since the last time, for a summary of steps: of scalars also the least and the most."""
        self.beat()
        said, self._since = self._since, Said()
        return said.facts(summary=True)

    @safely("read the last numbers on the GPU")
    def gather(self, deadline: Deadline) -> None:
        """At the end, when nobody captures a CUDA graph any more: take the numbers that arrive until then."""
        self._recorder.on_gpu.finish(self._recorder, deadline.left(GPU_SECONDS))

    @safely("tell the last of the user's records")
    def close(self) -> None:
        """Tell what is left; what is recorded from now on waits for the next session."""
        self.summarise()
        self._decide(last=True)
        self._recorder.rest()

    def _take(self) -> None:
        piece = self._span.piece
        if piece is not self._pieces[-1]:
            self._pieces.append(piece)
        rows, refused = self._recorder.take()
        untold, why = 0, None
        for row in rows:
            logged = False
            # They are nowhere else any more: one that can't be told must not take the others along.
            try:
                at = self._place(row.code, row.instruction)
                self._exporter.put(encode(telling.log_record(row, self._offset, at)))
                logged = True
                if row.kind == SPAN:
                    self._span_ended(row, at)
                else:
                    self._said(row)
            except Exception as error:
                why = error
                untold += not logged
        if why is not None:
            complain("tell of one of the user's records", why)
        for reason, many in {"user records": refused, UNTOLD: untold, **self._recorder.on_gpu.lost()}.items():
            self._exporter.count_lost(reason, many)

    def _place(self, code: CodeType | str, instruction: int) -> str:
        if isinstance(code, str):
            return code
        found = self._places.get((code, instruction))
        if found is None:
            if len(self._places) >= PLACES_KEPT:
                self._places.clear()
            found = self._places[code, instruction] = place_and_function(code, instruction)
        return found

    def _said(self, row: Row) -> None:
        whose = [self._since]
        if row.of_step is None and row.step.sampled is not False:
            whose.append(self._of_step(row.step))
        for said in whose:
            if row.kind == SCALAR:
                for name, number in row.values.items():
                    said.scalar(name, number)
            else:
                said.event(row.name)

    def _of_step(self, step: Step) -> Said:
        found = self._of_steps.get(step)
        if found is None:
            for old in [old for old in self._of_steps if old.sampled is False]:
                del self._of_steps[old]
            if len(self._of_steps) >= STEPS_KEPT:
                del self._of_steps[next(iter(self._of_steps))]
            found = self._of_steps[step] = Said()
        return found

    def _span_ended(self, row: Row, at: str) -> None:
        totals = named(self._totals, row.name, SpanTotals)
        took, failed = row.at - row.started, row.failed is not None
        totals.add(took, failed, at)
        if took < SHORTEST and not failed:
            return
        if row.chosen is None and row.within:
            held = self._held.setdefault(row.step, [])
            if len(held) < HELD_OF_STEP and self._held_in_all < HELD:
                held.append(_Held(row, at))
                self._held_in_all += 1
            else:
                totals.not_sent += 1
            return
        # Outside of steps, or around some.
        chosen = self._recorder.chooses(row.name) if row.chosen is None else row.chosen
        if chosen or failed or totals.is_slow(took):
            self._send(row, at)

    def _decide(self, last: bool = False) -> None:
        """Send the spans of steps that are sampled, and of the others those that failed. A step that has not come to
        its end at the `last` time has no span."""
        for step in [step for step in self._held if last or step.sampled is not None]:
            held = self._held.pop(step)
            self._held_in_all -= len(held)
            for row, at in held:
                if step.sampled or row.failed is not None:
                    self._send_safely(row, at)

    @safely("send a span of the user's")
    def _send_safely(self, row: Row, at: str) -> None:
        self._send(row, at)

    def _send(self, row: Row, at: str) -> None:
        piece = self._piece(row.started)
        parent = self._parent(row, piece)
        start, took = row.started + self._offset, row.at - row.started
        facts = telling.span_facts(row, at)
        made = self._span.child(telling.NAME, row.name, start, took, facts, error=row.failed is not None)
        self._exporter.put_span(replace(made, trace_id=piece.trace_id, span_id=row.id, parent_id=parent), logged=False)

    def _parent(self, row: Row, piece: Piece) -> int:
        """The id of the nearest span around it that is sent too."""
        in_step = row.chosen is None and row.within
        outer = row.parent
        while outer is not None:
            if self._is_sent(outer, row.step if in_step else None) and self._piece(outer.started) is piece:
                return outer.id
            outer = outer.parent
        return row.step.span_id if in_step and row.step.sampled else piece.span_id

    def _is_sent(self, outer: Open, step: Step | None) -> bool:
        """Whether a span of `outer` is sent, or was, which is around one in `step` (None: outside of steps)."""
        if step is None:
            return bool(outer.chosen) or outer.failed
        if outer.step is not step or outer.took < 0 or not outer.within:
            return False  # it is around the step
        return outer.failed or (bool(step.sampled) and outer.took >= SHORTEST)

    def _piece(self, started: int) -> Piece:
        """The piece of the rank span in which something started, in ns on the monotonic clock."""
        when = started + self._offset
        for piece in reversed(self._pieces):
            if piece.start <= when:
                return piece
        return self._pieces[0]

    def _summary(self, name: str, began: int, facts: dict[str, Fact], buckets: list[int]) -> None:
        record = self._span.child(telling.SUMMARY, name, began, self._told_at - began, facts)
        self._exporter.put_span(record, logged=False)
        counted = {str(bucket): many for bucket, many in enumerate(buckets) if many}
        self._exporter.put(record.as_summary(buckets=counted))
