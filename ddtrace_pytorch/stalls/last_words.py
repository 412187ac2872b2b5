"""What a rank keeps on disk while it lives, to be told if it can't tell it itself. Pure.

One JSON object: what :meth:`RankState.plain` gives, beside it ``identity`` (whose it is, and its open span as a
snapshot would send it) and ``left_out`` (what there was no room for). Where groups have thousands of ranks, these are
in ``members``, by group, as steps: the first, how many more, and how far apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.stalls import positions, roll
from ddtrace_pytorch.stalls.doing import own_frame, short
from ddtrace_pytorch.stalls.positions import NO_LEGEND, Legend
from ddtrace_pytorch.stalls.roll import Life, RankState

KILLED = "killed"

Step = tuple[int, int, int]
# What a rank's number in a list takes, about, and a step.
RANK_BYTES = 5
STEP_BYTES = 14
# What a call takes at least, and a group without its calls.
CALL_BYTES = 45
GROUP_BYTES = 95
# Enough to tell who made which call, as a rule.
FEW = 8
# Of all groups together. Steps that are damaged, or absurd, must not cost memory.
MOST_RANKS = 1 << 20
# Characters of a tag that stay where there is no room for a long one: a stack, most likely.
TAG_LIMIT = 200
# Of an open span alone: the Agent takes one that has it for a version to be followed by others.
_SNAPSHOT = "_dd.partial_version"


@dataclass(frozen=True)
class Identity:
    """Whose last words these are. `boot` is the kernel's id of the time since it started (empty: it has none);
    `log_root` the directory that its run log is in, if it has one."""

    job: str
    incarnation: str
    attempt: int | None
    rank: int
    world_size: int
    host: str
    boot: str
    log_root: str


@dataclass(frozen=True)
class LastWords:
    """One rank's. `span` is its open span as of its last beat or, where it ended (`state.life`), its finished one;
    `told`: it was sent, and what stays is for the other ranks alone."""

    identity: Identity
    state: RankState
    span: SpanRecord
    legend: Legend = NO_LEGEND
    left_out: tuple[str, ...] = ()
    told: bool = False

    def encode(self, capacity: int) -> bytes:
        """These words in at most `capacity` bytes. What there is no room for goes in this order: recent calls but for
        the last :data:`FEW` of each group, these, the legend, frames, the ranks of the groups, groups that it is in no
        call of, the others, the ends of long tags; identity and span always stay. Only where the ranks of the groups
        would take half the room are they written as steps, and go first if that is as long, or too many to be read.

        Raises:
            ValueError: not even identity and span fit.
        """
        words, parts, members = self, list(_WITHOUT), {}
        ranks = sum(len(group.ranks) for group in self.state.groups.values())
        if RANK_BYTES * ranks > capacity // 2:
            parts.remove("ranks")
            members = {name: steps(group.ranks) for name, group in self.state.groups.items()}
            if ranks > MOST_RANKS or STEP_BYTES * sum(map(len, members.values())) > capacity // 2:
                words, members = words._without("ranks"), {}
        # Writing down hundreds of groups takes long: not for what can't fit.
        while parts and words._least() > capacity:
            words = words._without(parts.pop(0))
        while len(text := words._text(members)) > capacity:
            if not parts:
                raise ValueError(f"identity and span alone take {len(text):,} bytes, with room for {capacity:,}")
            words = words._without(parts.pop(0))
        return text

    def _without(self, part: str) -> LastWords:
        return replace(_WITHOUT[part](self), left_out=(*self.left_out, part))

    def _least(self) -> int:
        return sum(GROUP_BYTES + CALL_BYTES * len(group.recent) for group in self.state.groups.values())

    def _text(self, members: Mapping[str, Sequence[Step]]) -> bytes:
        identity = {**vars(self.identity), "span": self.span.as_log_record()}
        words = _each_group(self, ranks=()) if members else self
        members = {name: stepped for name, stepped in members.items() if name in self.state.groups}
        said = {
            **_named(words.state),
            **({"members": members} if members else {}),
            "identity": identity,
            "legend": self.legend,
            "left_out": self.left_out,
            "told": self.told,
        }
        return json.dumps(said, separators=(",", ":"), default=_named).encode("ascii")

    @property
    def ended(self) -> bool:
        """Whether the rank itself said how it ended."""
        return self.state.life is Life.ENDED

    @property
    def end_reason(self) -> str:
        """As its finished span has it."""
        return self.span.tags.get("pytorch.end_reason", KILLED) if self.ended else KILLED

    def was_in(self) -> str:
        """What it was in when last seen, for a person: its collectives in flight, else the line (``file:line
        function``, without folders) of the user's code, or the innermost where there is none."""
        in_flight = ((here, here.later or here.current) for here in self.state.groups.values())
        calls = [f"{call.operation} on {here.label}" for here, call in in_flight if call is not None]
        return ", ".join(calls) or self._line()

    def _line(self) -> str:
        frames = self.state.frames
        return short(own_frame(frames) or next(iter(frames), ""))

    def finished_span(self) -> SpanRecord:
        """The span as the rank itself would have finished it: at its last beat, as an error."""
        span = replace(self.span, metrics={name: one for name, one in self.span.metrics.items() if name != _SNAPSHOT})
        if self.ended:
            return span
        where = ", at ".join(dict.fromkeys(filter(None, (self.was_in(), self._line()))))
        message = (
            "the process was gone without a word, as after SIGKILL, out of memory, abort() or os._exit(); "
            "the span ends with its last beat" + (f", in {where}" if where else "")
        )
        tags = {"pytorch.end_reason": KILLED, "error.type": KILLED, "error.message": message}
        return replace(span, tags={**span.tags, **tags}, error=True)


def decode(text: bytes, entered: bytes = b"") -> LastWords:
    """What :meth:`LastWords.encode` gave, brought up to the positions it had `entered`; fields that this version
    doesn't know are left out.

    Raises:
        ValueError: `text` is none.
    """
    try:
        said = json.loads(text)
        for name, ranks in walked(said.get("members", {})).items():
            if name in said["groups"]:
                said["groups"][name]["ranks"] = ranks
        identity = said["identity"]
        legend = positions.legend_of(said["legend"])
        state = roll.parse(said)
        if state.life is Life.ALIVE:
            state = positions.overlay(state, entered, legend)
        return LastWords(
            identity=Identity(**{one.name: identity[one.name] for one in fields(Identity)}),
            state=state,
            span=SpanRecord.from_log_record(identity["span"]),
            legend=legend,
            left_out=tuple(said.get("left_out", ())),
            told=bool(said.get("told", False)),
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no last words: {error!r}") from error


@lru_cache(maxsize=512)
def steps(ranks: tuple[int, ...]) -> tuple[Step, ...]:
    """`ranks` as the first of a row, how many more are in it, and how far apart; of the next row, and so on."""
    found = []
    at = 0
    while at < len(ranks):
        first, end = ranks[at], at + 1
        by = ranks[end] - first if end < len(ranks) else 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == by:
            end += 1
        found.append((first, end - at - 1, by))
        at = end
    return tuple(found)


def walked(members: Mapping[str, Iterable[Sequence[int]]]) -> dict[str, list[int]]:
    """By group, the ranks that :func:`steps` was given.

    Raises:
        ValueError: they are more than :data:`MOST_RANKS`.
    """
    many = sum(max(0, more + 1) for stepped in members.values() for _, more, _ in stepped)
    if many > MOST_RANKS:
        raise ValueError(f"{many:,} ranks in all groups")
    return {
        name: [first + by * number for first, more, by in stepped for number in range(more + 1)]
        for name, stepped in members.items()
    }


def _named(value: Any) -> Any:
    """As :meth:`RankState.plain` has it, one level at a time: the encoder goes through numbers by the thousand."""
    if isinstance(value, Enum):
        return value.value
    return {name: one for name, one in vars(value).items() if one is not None}


def _each_group(words: LastWords, **changed: Any) -> LastWords:
    groups = {name: replace(group, **changed) for name, group in words.state.groups.items()}
    return replace(words, state=replace(words.state, groups=groups))


def _short_tags(words: LastWords) -> LastWords:
    tags = {name: value[:TAG_LIMIT] for name, value in words.span.tags.items()}
    return replace(words, span=replace(words.span, tags=tags))


def _few_recent(words: LastWords) -> LastWords:
    groups = {name: replace(group, recent=group.recent[-FEW:]) for name, group in words.state.groups.items()}
    return replace(words, state=replace(words.state, groups=groups))


def _only_current(words: LastWords) -> LastWords:
    groups = {name: group for name, group in words.state.groups.items() if group.current or group.later}
    return replace(words, state=replace(words.state, groups=groups))


_WITHOUT: dict[str, Callable[[LastWords], LastWords]] = {
    "older calls": _few_recent,
    "recent": lambda words: _each_group(words, recent=()),
    "legend": lambda words: replace(words, legend=replace(NO_LEGEND, clock=words.legend.clock)),
    "frames": lambda words: replace(words, state=replace(words.state, frames=())),
    "ranks": lambda words: _each_group(words, ranks=()),
    "idle groups": _only_current,
    "groups": lambda words: replace(words, state=replace(words.state, groups={})),
    "long tags": _short_tags,
}
