"""The collectives that took too long: which, how long, who was waited for, and whether they went on. Pure.

Each rank that waits says so (`event` records ``stall`` and ``stall over``), and one of each host who is waited for
(`verdict` records), again each time that the wait has doubled. What is said of one collective is one stall here.

The field names of :class:`Stall` are keys of ``report --json`` (adding is free, renaming needs a release note).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from ddtrace_pytorch.runlog.fields import integer, mapping, number, text
from ddtrace_pytorch.stalls.watch import Outcome

TYPES = ("verdict", "event")

# Stalls that are told of apart; what a job has more of is counted.
MOST = 1000


@dataclass
class Stall:
    """One collective that took too long. `kind` and `ranks`: of the last verdict on it; empty where nobody gave one.
    `waited_s`: the longest that any rank waited, as far as told; `over`: how many ranks said that it went on, of
    `waiting` that said that they wait; `unsure`: how many of these couldn't tell whether it went on or raised. `at`:
    when it was first told of."""

    at: str | None
    group: str
    operation: str
    key: int | None
    kind: str
    ranks: list[int]
    waiting: int
    over: int
    unsure: int
    waited_s: float
    message: str


class Key(NamedTuple):
    """Torch's name of the group, the operation, and its number there (0: it has none)."""

    group: str
    operation: str
    key: int


@dataclass
class _Said:
    label: str = ""
    first: int = 0
    kind: str = ""
    ranks: list[int] = field(default_factory=list)
    judged: tuple[float, int] = (-1.0, 0)
    waited: float = 0.0
    message: str = ""
    waiting: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)

    def end(self, rank: int, how: str) -> None:
        if how == Outcome.UNKNOWN.value:
            self.unsure.add(rank)
        elif how != Outcome.RAISED.value:  # older logs say nothing
            self.over.add(rank)

    def join(self, other: _Said) -> None:
        self.label = self.label or other.label
        self.first = min(self.first or other.first, other.first or self.first)
        self.waited = max(self.waited, other.waited)
        self.waiting |= other.waiting
        self.over |= other.over
        self.unsure |= other.unsure
        if other.judged > self.judged:
            self.judged, self.kind, self.ranks, self.message = other.judged, other.kind, other.ranks, other.message


class Stalls:
    """What the ranks of one attempt said. `uncounted`: records of stalls beyond :data:`MOST`."""

    def __init__(self) -> None:
        self._said: dict[Key, _Said] = {}
        self.uncounted = 0

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """One `verdict` or `event` record of `rank`."""
        tags = mapping(record, "tags")
        if record["type"] == "verdict":
            self._verdict(record, tags)
            return
        name = record.get("name")
        # Those of the user's own have no tags, whatever their names.
        if name not in ("stall", "stall over") or not tags:
            return
        key = Key(text(tags, "group_name"), text(tags, "op"), integer(tags, "key") or 0)
        said = self._of(key, text(tags, "group"), record["ts"])
        if said is None:
            return
        took = number(tags, "waited_s" if name == "stall" else "took_s") or 0.0
        said.waited = max(said.waited, took)
        said.waiting.add(rank)
        if name == "stall over":
            said.end(rank, text(tags, "how"))

    def pour(self, other: Stalls) -> None:
        """Add what other ranks said."""
        self.uncounted += other.uncounted
        for key, said in other._said.items():
            mine = self._said.get(key)
            if mine is not None:
                mine.join(said)
            elif len(self._said) < MOST:
                self._said[key] = said
            else:
                self.uncounted += 1

    def told(self) -> list[Stall]:
        """In order of time."""
        in_time = sorted(self._said.items(), key=lambda item: (item[1].first, item[0]))
        return [
            Stall(
                at=_iso(said.first),
                group=said.label or key.group,
                operation=key.operation,
                key=key.key or None,
                kind=said.kind,
                ranks=said.ranks,
                waiting=len(said.waiting),
                over=len(said.over),
                unsure=len(said.unsure),
                waited_s=said.waited,
                message=said.message,
            )
            for key, said in in_time
        ]

    def _verdict(self, record: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        key = Key(text(tags, "stall.group_name"), text(record, "op"), integer(record, "key") or 0)
        said = self._of(key, text(record, "group"), record["ts"])
        if said is None:
            return
        waited = number(tags, "stall.waited_s") or 0.0
        said.waited = max(said.waited, waited)
        if (waited, record["ts"]) > said.judged:
            ranks = record.get("ranks")
            said.judged, said.kind, said.message = (waited, record["ts"]), text(record, "kind"), text(record, "message")
            said.ranks = [rank for rank in ranks if type(rank) is int] if isinstance(ranks, list) else []

    def _of(self, key: Key, label: str, at: int) -> _Said | None:
        said = self._said.get(key)
        if said is None:
            if len(self._said) >= MOST:
                self.uncounted += 1
                return None
            said = self._said[key] = _Said(first=at)
        said.label, said.first = label or said.label, min(at, said.first)
        return said


def _iso(ns: int) -> str | None:
    try:
        return datetime.fromtimestamp(ns / 1e9).astimezone().isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return None
