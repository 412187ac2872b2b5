"""Whether torch's flight recorder says the same as a verdict. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtrace_pytorch.collectives.flight_recorder import Entry
from ddtrace_pytorch.collectives.surface import BY_NATIVE_NAME
from ddtrace_pytorch.runlog.fields import integer, mapping, text
from ddtrace_pytorch.stalls.telling import in_words
from ddtrace_pytorch.stalls.verdict import Kind


@dataclass(frozen=True)
class Agreement:
    """What the recorders of `ranks` say of the call that did not end; `agrees` is None where there is no verdict."""

    agrees: bool | None
    ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True)
class _Unfinished:
    """The first call of a `group` that never ended somewhere: `waits` there, who `lacks` it, and who made an `odd` one
    instead."""

    group: str
    number: int
    operation: str
    waits: frozenset[int]
    lacks: frozenset[int]
    odd: Mapping[int, str]


def compare(dumps: Mapping[int, Sequence[Entry]], verdict: Mapping[str, Any] | None) -> Agreement | None:
    """`dumps` by rank, `verdict` as its record; None if there is no dump."""
    if not dumps:
        return None
    tags = mapping(verdict or {}, "tags")
    group, between_two = text(tags, "stall.group_name"), bool(tags) and not integer(tags, "stall.key")
    ranks = tuple(sorted(dumps))
    who = f"torch's flight recorder of {in_words(ranks)}"
    found = _unfinished(dumps, group, between_two) if verdict else _oldest(dumps)
    if found is None:
        of_group = f" of group {group}" if verdict else ""
        what = f"no collective{of_group} that did not complete"
        return Agreement(
            False if verdict else None, ranks, f"{who} {'does not agree: it ' if verdict else ''}knows of {what}"
        )
    if verdict is None:
        return Agreement(None, ranks, f"{who}: {_told(found)}")
    agrees = _same_call(found, tags) and _same_ranks(found, verdict, frozenset(ranks))
    return Agreement(agrees, ranks, f"{who} {'agrees' if agrees else 'does not agree'}: {_told(found)}")


def _unfinished(dumps: Mapping[int, Sequence[Entry]], group: str, between_two: bool) -> _Unfinished | None:
    calls = {
        rank: {one.number: one for one in entries if one.group == group and one.p2p is between_two}
        for rank, entries in dumps.items()
    }
    pending = {rank: _pending(made) for rank, made in calls.items()}
    number = min((key for key in pending.values() if key is not None), default=None)
    if number is None:
        return None
    there = {rank: made[number] for rank, made in calls.items() if number in made}
    usual, _ = Counter(map(_kind, there.values())).most_common(1)[0]
    return _Unfinished(
        group=group,
        number=number,
        operation=_name(usual[0]),
        waits=frozenset(rank for rank, one in there.items() if not _is_over(one)),
        lacks=frozenset(rank for rank, made in calls.items() if all(one < number for one in made)),
        odd={rank: _spelled(one) for rank, one in there.items() if _kind(one) != usual},
    )


def _oldest(dumps: Mapping[int, Sequence[Entry]]) -> _Unfinished | None:
    pending = [one for entries in dumps.values() for one in entries if not _is_over(one)]
    if not pending:
        return None
    first = min(pending, key=lambda one: one.created)
    return _unfinished(dumps, first.group, first.p2p)


def _pending(made: Mapping[int, Entry]) -> int | None:
    return min((number for number, one in made.items() if not _is_over(one)), default=None)


def _is_over(one: Entry) -> bool:
    return one.retired or bool(one.completed)


def _kind(one: Entry) -> tuple[str, tuple[int, ...] | None]:
    return one.name, one.shape


def _name(native: str) -> str:
    """As it is called in Python."""
    row = BY_NATIVE_NAME.get(native)
    return row.name if row is not None else native


def _spelled(one: Entry) -> str:
    return f"{_name(one.name)} of shape {list(one.shape)}" if one.shape is not None else _name(one.name)


def _same_call(found: _Unfinished, tags: Mapping[str, Any]) -> bool:
    """By its name or its number: gloo names some calls by those it makes of them, and backends count differently."""
    return found.operation == text(tags, "stall.op") or found.number == integer(tags, "stall.key")


def _same_ranks(found: _Unfinished, verdict: Mapping[str, Any], dumped: frozenset[int]) -> bool:
    named = frozenset(verdict["ranks"]) & dumped
    kind = text(verdict, "kind")
    if kind == Kind.STUCK.value:
        return not found.lacks and not found.odd
    if kind == Kind.MISMATCH.value:
        return bool(found.odd or found.lacks) and found.odd.keys() | found.lacks <= named
    return found.lacks == named


def _told(found: _Unfinished) -> str:
    told = [f"{found.operation} {found.number} of group {found.group} never completed on {in_words(found.waits)}"]
    if found.lacks:
        told.append(f"{in_words(found.lacks)} never issued it")
    told += [
        f"{in_words(rank for rank, one in found.odd.items() if one == what)} issued {what} instead"
        for what in sorted(set(found.odd.values()))
    ]
    return "; ".join(told)
