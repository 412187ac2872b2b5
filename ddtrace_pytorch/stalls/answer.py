"""What one node answers when the roll is called: the states of its ranks in few bytes. Pure.

An answer that would be too long says less of each rank, in this order: only the last 8 of the recent calls of each
group and the innermost 4 frames; no recent calls; only groups that the rank is in a call of; at last no groups, no
frames, and of an error its first 200 characters.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from ddtrace_pytorch.stalls.roll import GroupState, RankState, parse

LIMIT_BYTES = 64 * 1024


def _groups(state: RankState, change: Callable[[GroupState], GroupState]) -> dict[str, GroupState]:
    return {name: change(group) for name, group in state.groups.items()}


def _shorter(state: RankState) -> RankState:
    groups = _groups(state, lambda group: replace(group, recent=group.recent[-8:]))
    return replace(state, groups=groups, frames=state.frames[:4])


def _no_recent(state: RankState) -> RankState:
    return replace(_shorter(state), groups=_groups(state, lambda group: replace(group, recent=())))


def _only_current(state: RankState) -> RankState:
    state = _no_recent(state)
    return replace(state, groups={name: group for name, group in state.groups.items() if group.current})


def _bare(state: RankState) -> RankState:
    raised = state.raised and replace(state.raised, error=state.raised.error[:200])
    return replace(state, groups={}, frames=(), raised=raised)


_LESS: tuple[Callable[[RankState], RankState], ...] = (lambda state: state, _shorter, _no_recent, _only_current, _bare)


def pack(states: Mapping[int, RankState], limit: int = LIMIT_BYTES) -> bytes:
    """`states` by rank, in at most `limit` bytes (bare states of more than some 1,000 ranks may be longer)."""
    packed = b""
    for less in _LESS:
        plain = [less(state).plain() for state in states.values()]
        packed = zlib.compress(json.dumps(plain, separators=(",", ":")).encode())
        if len(packed) <= limit:
            break
    return packed


def unpack(packed: bytes) -> dict[int, RankState]:
    """What :func:`pack` was given, or what it left of it.

    Raises:
        ValueError: this is no answer.
    """
    try:
        return {state.rank: state for state in map(parse, json.loads(zlib.decompress(packed)))}
    except (TypeError, zlib.error) as error:
        raise ValueError(f"no answer of a node: {error}") from error
