"""What each rank says of itself when the roll is called. Pure: types, and their way into JSON and back.

All times are wall-clock nanoseconds since the epoch, as in the run log. A rank writes its state once a beat, so what
is read of a rank that died or was stopped is up to a second old.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ddtrace_pytorch.runlog.fields import is_whole


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
    `since`: when it was entered (0: unknown). Where torch issues collectives itself: `seen`, its number among those
    that came through our wrappers, and `recorded`, what is known of it is what torch's flight recorder says."""

    operation: str
    key: int = 0
    bytes: int = 0
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    peer: int | None = None
    since: int = 0
    seen: int | None = None
    recorded: bool | None = None


@dataclass(frozen=True)
class GroupState:
    """A process group as one of its members sees it. `entered`: the number of the last collective that this rank
    entered, `completed` that of the last which came to its end here, by `completed_at` at the latest (0: unknown);
    `current`: what it is in now, `recent`: the last ones that it entered, oldest first, the current one among them.
    `unseen`: how many of those it entered torch issued itself and nobody saw, where there are any; `later`: where so,
    what it entered since its last beat, of which only the number among the seen ones is known. `issued`: what torch
    itself issued since its last beat, the last one; whether that came to its end isn't known."""

    name: str
    label: str
    ranks: tuple[int, ...]
    backend: str
    entered: int = 0
    completed: int = 0
    current: Call | None = None
    recent: tuple[Call, ...] = ()
    completed_at: int = 0
    unseen: int | None = None
    later: Call | None = None
    issued: Call | None = None


@dataclass(frozen=True)
class Raised:
    """A collective that raised: where, and what (`type: message`, one line). `caught`: the rank has caught it, and runs
    on (None: that isn't known)."""

    group: str
    call: Call
    error: str
    at: int = 0
    caught: bool | None = None


@dataclass(frozen=True)
class RankState:
    """One rank. `as_of`: its last beat. `moves`: whether its main thread computed or changed place between two looks
    (None: not looked twice). `doing`: `collective`, `data`, `compile`, `checkpoint`, `optimizer` or `user`; `frames`
    of its main thread, innermost first, each ``file:line function``. `told_at`: when it last said who is waited for.
    Where the rest is newer than the frames, these were seen at `frames_at`, in the step `frames_step`."""

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
    frames_at: int | None = None
    frames_step: int | None = None

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


def _are_whole(value: Any) -> bool:
    # A thousand ranks have groups of a thousand.
    return isinstance(value, list) and {*map(type, value)} <= {int} and (not value or is_whole(max(value, key=abs)))


# Whether a value, as JSON has it, is of a field's type, by how that is written; other types are composed.
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "int": is_whole,
    "int | None": lambda value: value is None or is_whole(value),
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "bool | None": lambda value: value is None or isinstance(value, bool),
    "tuple[int, ...]": _are_whole,
    "tuple[int, ...] | None": lambda value: value is None or _are_whole(value),
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
}
_DECLARED: Mapping[type, Mapping[str, Callable[[Any], bool]]] = {
    kind: {one.name: _FITS[str(one.type)] for one in dataclasses.fields(kind) if str(one.type) in _FITS}
    for kind in (Call, GroupState, Raised, RankState)
}


def parse(said: Mapping[str, Any]) -> RankState:
    """What :meth:`RankState.plain` gave; fields that this version doesn't know are left out.

    Raises:
        ValueError: `said` is none, or parts of it are of another type.
    """
    try:
        groups = {
            name: GroupState(
                **_plain_fields(GroupState, group),
                current=_call(current) if (current := group.get("current")) else None,
                recent=tuple(map(_call, group.get("recent", ()))),
                later=_call(later) if (later := group.get("later")) else None,
                issued=_call(issued) if (issued := group.get("issued")) else None,
            )
            for name, group in said.get("groups", {}).items()
        }
        raised = said.get("raised")
        return RankState(
            **_plain_fields(RankState, said),
            life=Life(said.get("life", "alive")),
            groups=groups,
            raised=Raised(**_plain_fields(Raised, raised), call=_call(raised["call"])) if raised else None,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no state of a rank: {error}") from error


def _plain_fields(kind: type, said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `kind` that are of plain types, lists as tuples."""
    found = {}
    for name, fits in _DECLARED[kind].items():
        if name in said:
            value = said[name]
            if not fits(value):
                raise ValueError(f"{name} of {kind.__name__} is {value!r:.40}")
            found[name] = tuple(value) if isinstance(value, list) else value
    return found


def _call(said: Mapping[str, Any]) -> Call:
    return Call(**_plain_fields(Call, said))
