"""What one rank's run log tells of its end. Pure: records in, in the order of the log, the last of each kind kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ddtrace_pytorch.runlog.fields import integer, is_whole, mapping, text
from ddtrace_pytorch.stalls import roll
from ddtrace_pytorch.stalls.pace import Pace
from ddtrace_pytorch.stalls.roll import Call, GroupState, Life, RankState
from ddtrace_pytorch.stalls.waits import sends
from ddtrace_pytorch.stalls.watch import Outcome

TYPES = ("identity", "span", "beat", "state", "verdict", "event")

# How a rank ended, and why it said where it is.
EXCEPTION = "exception"
SIGNAL = "signal"

# What is kept of each rank, however long its log.
VERDICTS = 64
MOMENTS = 64
# Of each group so many changes are kept of how many calls have ended: what an interruption ends comes last.
CHANGES = 8
# ns. A beat that much later than an end: the process outlived it.
OUTLIVED = 2 * 10**9
# ns. Who lives so long after a call that ended one way or another didn't die of it.
LIVED_ON = 10 * 10**9


class Ending(NamedTuple):
    """How a rank itself, or who found it dead, said that it ended: `reason` is ``pytorch.end_reason``, `at` in ns since
    the epoch, `error` (``type: message``) that of an exception."""

    reason: str
    at: int
    error: str = ""


class Moment(NamedTuple):
    """`at` ns since the epoch; `what` in words, without the rank."""

    at: int
    what: str


class Spent(NamedTuple):
    """A call that took too long and is over."""

    group: str
    operation: str
    key: int


@dataclass
class History:
    """One rank's. `last`: its last sign of life, ns; `life`: as its host tells, if it was asked; `thrown`: where the
    exception was raised that it ended by, innermost frame first; `heard`: when a signal told it to end, ns, if it did
    not go on training after that."""

    rank: int
    identity: Mapping[str, Any]
    last: int = 0
    beat: int = 0
    ending: Ending | None = None
    life: Life | None = None
    thrown: tuple[str, ...] = ()
    heard: int | None = None
    verdicts: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=VERDICTS))
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=MOMENTS))
    # When, and how, as far as the rank knew.
    _spent: dict[Spent, tuple[int, str]] = field(default_factory=dict)
    # As of the first beat after it was told to end.
    _pace: Pace | None = None
    _groups: Mapping[str, Any] = field(default_factory=dict)
    _ended: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)
    _said: Mapping[str, Any] = field(default_factory=dict)
    _looked: RankState | None = None
    _base: RankState | None = None

    @property
    def host(self) -> str:
        return text(self.identity, "host")

    def add(self, record: Mapping[str, Any]) -> None:
        """The next record of the log; one that makes no sense is passed over."""
        kind, at = record["type"], record["ts"]
        self.last = max(self.last, at)
        if kind == "beat":
            self._beat(at, mapping(record, "groups"))
            self._go_on(Pace(integer(record, "steps") or 0, integer(record, "calls") or 0))
        elif kind == "identity":
            self.identity = {**self.identity, **record}
        elif kind == "span":
            self._span(at, record)
        elif kind == "state":
            self._state(at, record)
        elif kind == "verdict":
            self.verdicts.append(record)
        elif kind == "event":
            self._event(at, text(record, "name"), mapping(record, "tags"))

    def look(self, state: RankState, ending: Ending | None) -> None:
        """What the state file on the rank's host says: `state`, with the life it was found in, and how it ended."""
        self._looked, self.life = state, state.life
        self._base = None
        self.last = max(self.last, state.as_of)
        if state.life is Life.DEAD:
            ending = Ending("killed", state.as_of)
        if self.ending is None and ending is not None:
            self.ending = ending
        if not self.thrown and state.life is Life.ENDED and self.ending is not None and self.ending.reason == EXCEPTION:
            self.thrown = state.frames

    def _beat(self, at: int, groups: Mapping[str, Any]) -> None:
        self.beat, self._groups = at, groups
        for name in groups:
            self._count(name, at, self._position(name)[1])
        if self.ending is not None and at > self.ending.at + OUTLIVED:
            self.ending = None

    def _go_on(self, pace: Pace) -> None:
        if self.heard is None:
            return
        self._pace = self._pace or pace
        if pace.went_on_since(self._pace):
            self.heard = self._pace = None

    def _count(self, group: str, at: int, completed: int) -> None:
        ended = self._ended.setdefault(group, deque(maxlen=CHANGES))
        if not ended or ended[-1][1] != completed:
            ended.append((at, completed))

    def _span(self, at: int, record: Mapping[str, Any]) -> None:
        tags = mapping(record, "tags")
        reason = text(tags, "pytorch.end_reason")
        if record.get("name") != "pytorch.rank" or not reason:
            return
        kind = text(tags, "error.type").rpartition(".")[2]
        first_line = next(iter(text(tags, "error.message").splitlines()), "")
        error = ": ".join(part for part in (kind, first_line) if part) if reason == EXCEPTION else ""
        self.ending = Ending(reason, at, error)

    def _state(self, at: int, record: Mapping[str, Any]) -> None:
        self._said, self._base = mapping(record, "state"), None
        if record.get("why") == EXCEPTION:
            self.thrown = frames_of(self._said)
        elif record.get("why") == SIGNAL:
            self.heard = self.heard or at
        said = mapping(self._said, "raised")
        if record.get("why") == "raised" and said:
            group = text(said, "group")
            label = text(mapping(mapping(self._said, "groups"), group), "label")
            where = call_in_words(mapping(said, "call"), label or group)
            self.moments.append(Moment(at, f"{where} raised {text(said, 'error')}"))

    def _event(self, at: int, name: str, tags: Mapping[str, Any]) -> None:
        # Those of the user's own have no tags, whatever their names.
        if not tags or name not in ("stall", "stall over"):
            return
        where = call_in_words(tags, text(tags, "group"))
        if name == "stall":
            self.moments.append(Moment(at, f"{where} takes too long"))
            return
        how = text(tags, "how")
        doubtful = how == Outcome.UNKNOWN.value
        self.moments.append(Moment(at, f"{where} is {'no longer waited for' if doubtful else 'over at last'}"))
        self._spent[Spent(text(tags, "group_name"), text(tags, "op"), integer(tags, "key") or 0)] = at, how

    def said(self) -> RankState:
        """The last state that was written down, by the rank or on its behalf; an empty one where there is none."""
        if self._base is None:
            self._base = self._newest()
        return self._base

    def _newest(self) -> RankState:
        device = mapping(self.identity, "device")
        gpu = (text(device, "device.id") or None) if text(device, "device.kind") != "cpu" else None
        found = RankState(self.rank, self.host, gpu=gpu, pid=integer(self.identity, "pid") or 0)
        try:
            written = roll.parse(self._said) if self._said else found
        except ValueError:
            written = found
        if self._looked is not None and self._looked.as_of >= written.as_of:
            written = self._looked
        return replace(written, rank=self.rank, host=self.host or written.host, gpu=written.gpu or gpu)

    def state(self, known: Mapping[str, Sequence[GroupState]]) -> RankState:
        """The last state, brought up to the last beat. `known`: groups as others described them, by name."""
        said = self.said()
        if self.beat <= said.as_of:
            return said
        groups = dict(said.groups)
        for name in self._groups:
            here = groups.get(name) or next((one for one in known.get(name, ()) if self.rank in one.ranks), None)
            if here is not None:
                groups[name] = self._brought_up(here)
        # A beat says neither.
        seen = (said.as_of, said.step) if said.frames_at is None else (said.frames_at, said.frames_step)
        return replace(said, as_of=self.beat, groups=groups, step=None, frames_at=seen[0], frames_step=seen[1])

    def _brought_up(self, here: GroupState) -> GroupState:
        entered, completed, operation, since = self._position(here.name)
        if operation is None:
            return replace(here, entered=entered, completed=completed, current=None)
        call = Call(operation, key=entered if completed < entered else 0, since=since)
        now = here.current
        if now is not None and (now.operation, now.key, now.since) == (call.operation, call.key, call.since):
            call = now
        elif not call.key and (sends(call) or "recv" in operation):
            # A beat doesn't say with whom.
            return replace(here, entered=entered, completed=completed, current=None)
        recent = here.recent if call.key in {one.key for one in here.recent} or not call.key else (*here.recent, call)
        return replace(here, entered=entered, completed=completed, current=call, recent=recent)

    def _position(self, group: str) -> tuple[int, int, str | None, int]:
        """Of the last beat, as :mod:`~ddtrace_pytorch.runlog.schema` has it."""
        said = self._groups.get(group)
        if not isinstance(said, list) or len(said) != 4 or not all(map(is_whole, (*said[:2], said[3]))):
            return 0, 0, None, 0
        entered, completed, operation, since = said
        return entered, completed, operation if isinstance(operation, str) else None, since

    def names(self) -> Sequence[str]:
        """Of the groups that the last beat tells of."""
        return list(self._groups)

    def went_on(self, group: str, operation: str, key: int, before: int) -> int | None:
        """When that call came to its end here, other than by an exception (0: some time `before`, and it isn't known
        when); None if not."""
        said = self.said()
        if said.raised is not None and (said.raised.group, said.raised.call.key) == (group, key):
            return None
        over, how = self._spent.get(Spent(group, operation, key), (None, ""))
        if over is not None:
            died = how == Outcome.UNKNOWN.value and not self._lived_on(group, over, before)
            return None if died or how == Outcome.RAISED.value else over
        return 0 if key and self._completed(group, before) >= key else None

    def _lived_on(self, group: str, over: int, before: int) -> bool:
        """Whether the rank did not die of how a call ended."""
        further = any(over < at < before for at, _ in self._ended.get(group, ()))
        otherwise = self.ending is not None and self.ending.reason not in (EXCEPTION, "killed")
        return further or otherwise or self.last > over + LIVED_ON

    def _completed(self, group: str, before: int) -> int:
        """How many calls had ended by then, as far as it was told by then."""
        said = self.said()
        here = said.groups.get(group) if said.as_of < before else None
        told = [completed for at, completed in self._ended.get(group, ()) if at < before]
        return max(told[-1] if told else 0, here.completed if here is not None else 0)


def frames_of(said: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a rank's state or of a culprit, as written down: innermost first."""
    frames = said.get("frames")
    return tuple(one for one in frames if isinstance(one, str)) if isinstance(frames, list) else ()


def call_in_words(call: Mapping[str, Any], group: str) -> str:
    """As in ``all_reduce #42 of group world``; `call` names its operation ``operation`` or ``op``."""
    key = integer(call, "key")
    number = f" #{key}" if key else ""
    return f"{text(call, 'operation') or text(call, 'op')}{number} of group `{group}`"
