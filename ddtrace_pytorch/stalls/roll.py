"""What each rank says of itself when the roll is called. Pure: types, and their way into JSON and back.

All times are wall-clock nanoseconds since the epoch, as in the run log. A rank writes its state once a beat, so what
is read of a rank that died or was stopped is up to a second old.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ddtrace_pytorch.runlog.fields import is_integer

T = TypeVar("T")


class Life(Enum):
    """How a rank was found by those who read its state."""

    ALIVE = "alive"  # its process is there and beats
    SILENT = "silent"  # its process is there, its beat is not: stopped, or something holds the interpreter's lock
    DEAD = "dead"  # its process is gone
    ENDED = "ended"  # it said goodbye: the group was destroyed, or the process left of its own accord
    UNREACHABLE = "unreachable"  # nobody on its host answers


@dataclass(frozen=True)
class Call:
    """One collective as this rank makes or made it. `key`: its number on the group (0: it has none, as between two
    ranks); `shape` and `dtype` of its first tensor, where known; `peer`: the other rank's, or the root's, global rank;
    `since`: when it was entered (0: unknown)."""

    operation: str
    key: int = 0
    bytes: int = 0
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    peer: int | None = None
    since: int = 0


@dataclass(frozen=True)
class GroupState:
    """A process group as one of its members sees it. `entered`: the number of the last collective that this rank
    entered, `completed` that of the last which came to its end here, by `completed_at` at the latest (0: unknown);
    `current`: what it is in now, `recent`: the last ones that it entered, oldest first, the current one among them."""

    name: str
    label: str
    ranks: tuple[int, ...]
    backend: str
    entered: int = 0
    completed: int = 0
    current: Call | None = None
    recent: tuple[Call, ...] = ()
    completed_at: int = 0


@dataclass(frozen=True)
class Raised:
    """A collective that raised: where, and what (`type: message`, one line)."""

    group: str
    call: Call
    error: str
    at: int = 0


@dataclass(frozen=True)
class RankState:
    """One rank. `as_of`: its last beat. `moves`: whether its main thread computed or changed place between two looks
    (None: not looked twice). `doing`: `collective`, `data`, `compile`, `checkpoint`, `optimizer` or `user`; `frames`
    of its main thread, innermost first, each ``file:line function``. `told_at`: when it last said who is waited for."""

    rank: int
    host: str = ""
    node: int | None = None
    gpu: str | None = None
    pid: int = 0
    life: Life = Life.ALIVE
    as_of: int = 0
    moves: bool | None = None
    doing: str = "user"
    step: int | None = None
    frames: tuple[str, ...] = ()
    groups: Mapping[str, GroupState] = field(default_factory=dict)
    raised: Raised | None = None
    end_reason: str | None = None
    told_at: int = 0

    def plain(self) -> dict[str, Any]:
        """This state in the types that JSON has; what is unknown is left out."""
        said: dict[str, Any] = _plain(self)
        return said


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return {name: _plain(one) for name, one in named.items() if one is not None}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def parse(said: Mapping[str, Any]) -> RankState:
    """What :meth:`RankState.plain` gave; fields that this version doesn't know are left out.

    Raises:
        ValueError: `said` is none, or parts of it are of another type.
    """
    try:
        groups = {
            name: _made(
                GroupState,
                _known(GroupState, group)
                | {
                    "ranks": tuple(group["ranks"]),
                    "current": _call(group.get("current")),
                    "recent": tuple(_made(Call, _call_fields(call)) for call in group.get("recent", ())),
                },
            )
            for name, group in said.get("groups", {}).items()
        }
        raised = said.get("raised")
        return _made(
            RankState,
            _known(RankState, said)
            | {
                "life": Life(said.get("life", "alive")),
                "frames": tuple(said.get("frames", ())),
                "groups": groups,
                "raised": _made(Raised, _known(Raised, raised) | {"call": _made(Call, _call_fields(raised["call"]))})
                if raised
                else None,
            },
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no state of a rank: {error}") from error


def _known(kind: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in dataclasses.fields(kind)}
    return {name: value for name, value in said.items() if name in names}


def _made(kind: type[T], values: Mapping[str, Any]) -> T:
    """A `kind` with these `values`, each of the type that it says."""
    hints = _hints(kind)  # type: ignore[arg-type]
    for name, value in values.items():
        if not _is_a(hints[name], value):
            raise TypeError(f"{name} of {kind.__name__} is {type(value).__name__}")
    return kind(**values)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_a(hint: Any, value: Any) -> bool:
    of = get_origin(hint)
    if of is UnionType:
        return any(_is_a(one, value) for one in get_args(hint))
    if of is tuple:
        item = get_args(hint)[0]
        # Of a large group these are thousands, on each of its ranks.
        check = is_integer if item is int else functools.partial(_is_a, item)
        return isinstance(value, tuple) and all(map(check, value))
    if hint is int:
        return is_integer(value)
    return isinstance(value, of or hint)


def _call(said: Mapping[str, Any] | None) -> Call | None:
    return _made(Call, _call_fields(said)) if said else None


def _call_fields(said: Mapping[str, Any]) -> dict[str, Any]:
    known = _known(Call, said)
    return known | ({"shape": tuple(known["shape"])} if known.get("shape") is not None else {})
