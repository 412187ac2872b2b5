"""Draws the ranks of a job, one after the other, into a sink; holds no more than one rank's places."""

from __future__ import annotations

import os
import shutil
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from tempfile import TemporaryDirectory
from typing import Any

from ddtrace_pytorch.runlog.fields import integer
from ddtrace_pytorch.runlog.reader import RankLog, read
from ddtrace_pytorch.timeline import marks
from ddtrace_pytorch.timeline.arrows import Arrows, OfRank, Point, Where
from ddtrace_pytorch.timeline.clocks import Aligned, Call, Ends, align
from ddtrace_pytorch.timeline.crew import each
from ddtrace_pytorch.timeline.lanes import InTurn, pack
from ddtrace_pytorch.timeline.marks import Count, Mark, Moment, Slice, span_times
from ddtrace_pytorch.timeline.quick import LeftOut, sieve
from ddtrace_pytorch.timeline.selection import ALL_STEPS, Steps, Thinning, Window, call_of, thinning_for
from ddtrace_pytorch.timeline.sink import Format, Line, Out, Sink
from ddtrace_pytorch.timeline.survey import Surveyed, survey

# The picture is thinned beyond so many bytes, before they are compressed.
LIMIT = 200_000_000

DAY = 86_400 * 10**9
YEAR = 366 * DAY

# The first lane of spans that were written after their thread's were packed.
LATER = 50_000

THREAD_ITSELF = -1

# A viewer shows lines in the order of their numbers, which it wants in so many bits. Behind the process' number is that
# of the track's place, and then what tells apart the lines there.
NUMBER_BITS = 31
PLACE_BITS = 4

# So many ends of collectives are taken of one rank to put its clock right.
ENDS_OF_A_RANK = 200

Progress = Callable[[str, int, int], None]


class NoSuchSteps(Exception):
    """No rank has one of the steps that were asked for; the message says which there are."""


@dataclass(frozen=True)
class Asked:
    """`every`: as :class:`Thinning` has it for what is thinned first; None: as much as keeps to `limit`."""

    steps: Steps = ALL_STEPS
    every: int | None = None
    limit: int = LIMIT


@dataclass(kw_only=True)
class _Part:
    """What became of one rank's records, by type: those that were read were drawn, or outside of the steps, or thinned
    out."""

    notes: list[str] = field(default_factory=list)
    read: Counter[str] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)
    thinned: Counter[str] = field(default_factory=Counter)

    def leave_out(self, kind: str, why: str, many: int = 1) -> None:
        self.read[kind] += many
        (self.outside if why == "outside" else self.thinned)[kind] += many


@dataclass
class Told(_Part):
    """The same of all ranks together. `written` are bytes, before they are compressed."""

    ranks: int
    thinning: Thinning
    clocks: Sequence[Aligned]
    arrows: int
    written: int = 0

    def add(self, part: _Part) -> None:
        self.read += part.read
        self.drawn += part.drawn
        self.outside += part.outside
        self.thinned += part.thinned
        self.notes += part.notes

    def check(self) -> None:
        """Nothing got lost."""
        assert self.read == self.drawn + self.outside + self.thinned, self
        assert self.thinning != Thinning() or not self.thinned, self


@dataclass(frozen=True)
class _Rank:
    """One process: its number, of so many, and what to add to its times."""

    number: int
    of: int
    title: str
    surveyed: Surveyed
    offset: int
    window: Window | None
    thinning: Thinning

    def read(self, types: Collection[str] | None, left_out: LeftOut) -> Iterator[dict[str, Any]]:
        """The records of `types` (None: all), without those that needn't be parsed to be left out; they are counted."""
        return read(self.log, types, sieve(self.window, self.thinning, left_out))

    @property
    def log(self) -> RankLog:
        return self.surveyed.log

    def draws(self, record: Mapping[str, Any]) -> bool:
        return (self.window is None or record in self.window) and record in self.thinning


def draw(
    logs: Sequence[tuple[int | None, RankLog]],
    asked: Asked,
    form: Format,
    file: Out,
    workers: int = 1,
    progress: Progress = lambda what, done, of: None,
) -> Told:
    """Draw `logs`, each with the number of its attempt if that is to be said, in their order.

    Raises:
        NoSuchSteps: before anything is written.
        OSError: it can't be written.
    """
    several = len({log.host for _, log in logs}) > 1
    ends = Ends() if several else None
    surveyed = []
    for one, mine in each(lambda at: _survey(logs[at][1], asked.steps, several), len(logs), workers):
        surveyed.append(one)
        if ends is not None:
            ends.add(one.log.host, mine)
        progress("looking", len(surveyed), len(logs))
    clocks = align(ends.of_host) if ends is not None else []
    offsets = {one.host: one.offset for one in clocks}
    windows = _windows(surveyed, asked.steps, offsets)
    thinning = Thinning(asked.every) if asked.every is not None else _thinning(surveyed, asked)
    # Some viewers sort by name.
    digits = max(len(str(log.rank)) for _, log in logs)
    ranks = [
        _Rank(at, len(logs), one.title(attempt, digits), one, offsets.get(one.log.host, 0), window, thinning)
        for at, ((attempt, _), one, window) in enumerate(zip(logs, surveyed, windows, strict=True), 1)
    ]

    arrows = Arrows()
    if len(ranks) > 1:
        for at, starts in enumerate(each(lambda at: [*_starts(ranks[at])], len(ranks), workers), 1):
            arrows.add(at, starts)
            progress("joining", at, len(ranks))
    told = Told(len(ranks), thinning, clocks, arrows.settle())

    zero = _zero([one.began for one in surveyed])
    written = _Written(file)
    written.write(form.begin(zero))
    with TemporaryDirectory(prefix="ddtrace-pytorch-timeline-") as spool:

        def part(at: int) -> _Part:
            if workers < 2:
                written.write(form.between if at else b"")
                return _draw_rank(ranks[at], arrows.of_rank(at + 1), form.sink(written, zero))
            with open(os.path.join(spool, str(at)), "wb") as mine:
                return _draw_rank(ranks[at], arrows.of_rank(at + 1), form.sink(mine, zero))

        for at, counted in enumerate(each(part, len(ranks), workers)):
            if workers > 1:
                path = os.path.join(spool, str(at))
                written.write(form.between if at else b"")
                with open(path, "rb") as theirs:
                    shutil.copyfileobj(theirs, written)
                os.unlink(path)
            told.add(counted)
            progress("drawing", at + 1, len(ranks))
    told.check()
    written.write(form.end({"records": dict(told.read), "drawn": dict(told.drawn)}))
    told.written = written.size
    told.notes += [note for one in surveyed for note in one.log.notes]
    return told


class _Written:
    """Passes on, and counts."""

    def __init__(self, file: Out) -> None:
        self._file = file
        self.size = 0

    def write(self, data: bytes, /) -> int:
        self._file.write(data)
        self.size += len(data)
        return len(data)


def _survey(log: RankLog, steps: Steps, with_ends: bool) -> tuple[Surveyed, list[tuple[Call, int]]]:
    ends = Ends(ENDS_OF_A_RANK) if with_ends else None
    one = survey(log, steps, ends)
    return one, [] if ends is None else [*ends.of_host[log.host].items()]


def _zero(began: Sequence[int]) -> int:
    """A day before the first log began: what is before that is drawn there. One that is years off doesn't count."""
    usual = median_low(began)
    return min(one for one in began if abs(one - usual) < YEAR) - DAY


def _thinning(surveyed: Sequence[Surveyed], asked: Asked) -> Thinning:
    seen = chosen = 0
    fine = coarse = fixed = 0.0
    for one in surveyed:
        seen, chosen = seen + one.steps.seen, chosen + one.steps.chosen
        sizes = one.weight()
        fine, coarse, fixed = fine + sizes[0], coarse + sizes[1], fixed + sizes[2]
    share = chosen / seen if seen and not asked.steps.all else 1.0
    return thinning_for(fine * share, coarse * share, fixed * share, asked.limit)


def _windows(surveyed: Sequence[Surveyed], wanted: Steps, offsets: Mapping[str, int]) -> Sequence[Window | None]:
    if wanted.all:
        return [None] * len(surveyed)
    highest = max((one.steps.highest for one in surveyed if one.steps.highest is not None), default=None)
    steps = wanted
    if wanted.latest is not None:
        steps = Steps(first=None if highest is None else highest - wanted.latest + 1)
    began, ended = [], []
    for one in surveyed:
        one.steps.settle(steps)
        if one.steps.begin is not None and one.steps.end is not None:
            offset = offsets.get(one.log.host, 0)
            began.append(one.steps.begin + offset)
            ended.append(one.steps.end + offset)
    if not began:
        raise NoSuchSteps("no rank recorded a step" if highest is None else f"the last step that is there is {highest}")
    windows = []
    for one in surveyed:
        offset = offsets.get(one.log.host, 0)
        begin = min(began) - offset if one.steps.begin is None else one.steps.begin
        end = max(ended) - offset if one.steps.end is None else one.steps.end
        windows.append(Window(steps, begin, end))
    return windows


def _starts(rank: _Rank) -> Iterator[tuple[Where, int, int]]:
    for record in rank.read(("call", "span"), Counter()):
        called, times = call_of(record), span_times(record)
        if called is not None and times is not None and rank.draws(record):
            group, number = called
            yield (rank.log.incarnation, group), number, _in_64_bits(times[0] + rank.offset)


def _in_64_bits(ns: int) -> int:
    return min(max(ns, -marks.LATEST), marks.LATEST)


class _Lines:
    """The lines of one process, each made when something is to be drawn on it. No number is of two processes."""

    def __init__(self, sink: Sink, process: int, of: int) -> None:
        self.sink = sink
        self._process = process
        self._bits = NUMBER_BITS - of.bit_length() - PLACE_BITS
        self._lines: dict[tuple[str, bool, int], Line] = {}
        self._many: Counter[int] = Counter()

    def get(self, track: str, thread: bool, lane: int) -> Line:
        key = track, thread, lane
        line = self._lines.get(key)
        if line is None:
            place = _place(track, thread)
            number = (((self._process << PLACE_BITS) + place) << self._bits) + self._many[place]
            self._many[place] += 1
            line = self._lines[key] = Line(self._process, number)
            self.sink.line(line, track if not lane else f"{track} ({lane + 1})")
        return line


def _place(track: str, thread: bool) -> int:
    if thread:
        return marks.ORDER.index("")
    return marks.ORDER.index(track) if track in marks.ORDER else len(marks.ORDER)


def _draw_rank(rank: _Rank, arrows: OfRank, sink: Sink) -> _Part:
    told = _Part(notes=rank.log.notes)
    sink.process(rank.number, rank.title)
    lines = _Lines(sink, rank.number, rank.of)
    threads = _packed(rank) if b"user_span" in rank.surveyed.tallies else {}
    for thread, lanes in threads.items():
        for lane in range(max(lanes) + 1):
            lines.get(thread, True, lane)
    # A job that still runs writes while this reads.
    later = InTurn(LATER)
    in_turn: dict[str, InTurn] = {}
    left_out: LeftOut = Counter()
    for record in rank.read(None, left_out):
        kind = record["type"]
        if rank.window is not None and record not in rank.window:
            told.leave_out(kind, "outside")
            continue
        if record not in rank.thinning:
            told.leave_out(kind, "thinned")
            continue
        told.read[kind] += 1
        point = _point(record, rank, arrows)
        for mark in marks.marks(record):
            lane = 0
            if isinstance(mark, Slice):
                if mark.thread:
                    lane = (
                        threads[mark.track].popleft() if threads.get(mark.track) else later.lane(mark.start, mark.end)
                    )
                else:
                    mark = _clipped(mark, rank.window)
                    lane = in_turn.setdefault(mark.track, InTurn()).lane(mark.start, mark.end)
            _put(mark, lane, point, rank, lines)
            point = None
        told.drawn[kind] += 1
    for (kind, why), many in left_out.items():
        told.leave_out(kind, why, many)
    sink.close()
    return told


def _point(record: Mapping[str, Any], rank: _Rank, arrows: OfRank) -> Point | None:
    called = call_of(record)
    if called is None or span_times(record) is None:
        return None
    return arrows.point((rank.log.incarnation, called[0]), called[1])


def _clipped(mark: Slice, window: Window | None) -> Slice:
    """The rank's span is as long as its log: of a part it would be nearly all there is to see."""
    if window is None or mark.track != marks.RANK:
        return mark
    return mark._replace(start=max(mark.start, window.begin), end=min(mark.end, window.end))


def _put(mark: Mark, lane: int, point: Point | None, rank: _Rank, lines: _Lines) -> None:
    sink, offset = lines.sink, rank.offset
    if isinstance(mark, Slice):
        line = lines.get(mark.track, mark.thread, lane)
        sink.slice(line, mark.name, mark.start + offset, mark.end + offset, mark.facts, point)
    elif isinstance(mark, Moment):
        sink.moment(lines.get(mark.track, False, 0), mark.name, mark.ts + offset, mark.facts, mark.wide)
    elif isinstance(mark, Count):
        sink.count(rank.number, mark.name, mark.ts + offset, mark.values)


def _packed(rank: _Rank) -> dict[str, deque[int]]:
    """By thread, the lanes of its spans in the order in which they are in the log."""
    starts: dict[str, array[int]] = {}
    ends: dict[str, array[int]] = {}
    owners: dict[str, array[int]] = {}
    for record in rank.read(("user_span",), Counter()):
        times = span_times(record)
        if record["type"] != "user_span" or times is None or not rank.draws(record):
            continue
        thread, task = marks.thread_of(record), integer(record, "task")
        owner = task if task is not None and 0 <= task < marks.LATEST else THREAD_ITSELF
        for column, value in ((starts, times[0]), (ends, times[1]), (owners, owner)):
            column.setdefault(thread, array("q")).append(value)
    return {thread: deque(pack(starts[thread], ends[thread], owners[thread])) for thread in starts}
