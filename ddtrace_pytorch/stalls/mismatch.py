"""Which ranks of a group made other calls than the rest, from the rings of what each entered. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ddtrace_pytorch.stalls.roll import Call, RankState

Ring = Mapping[int, Call]
"""What a rank entered, by number."""


def ring_of(state: RankState, group: str) -> Ring:
    """What the rank entered in that group, as far as is known; what it raised from as well."""
    here, raised = state.groups.get(group), state.raised
    calls = [*here.recent, here.current] if here is not None else []
    if raised is not None and raised.group == group:
        calls.append(raised.call)
    return {call.key: call for call in calls if call is not None and call.key}


class Detail(Enum):
    """In what ranks differ."""

    OPERATION = "operation"
    ROOT = "root"
    SHAPE = "shape"  # its number of elements: how they are arranged is nobody else's business
    DTYPE = "dtype"
    SIZE = "size"  # its bytes: of a call that is over no more is known
    SKIPPED = "skipped"  # its calls are those of the others, less one
    EXTRA = "extra"  # its calls are those of the others, and one more
    ORDER = "order"  # ranks wait for each other in a circle: in another order, or one was left out


@dataclass(frozen=True)
class Oddity:
    """At number `key`, `odd` ranks made another call than the `usual` one of the strict majority. Without a majority
    `usual` is None and all who entered it are odd."""

    key: int
    usual: Call | None
    odd: Mapping[int, Detail]


# What every rank may well call with a size of its own.
_UNEVEN = frozenset(
    "all_gather all_gather_coalesced reduce_scatter all_to_all all_to_all_single coalesced barrier "
    "all_gather_object gather_object broadcast_object_list scatter_object_list".split()
)


def _elements(call: Call) -> int | None:
    return None if call.shape is None or call.operation in _UNEVEN else math.prod(call.shape)


def _bytes(call: Call) -> int | None:
    return None if not call.bytes or call.operation in _UNEVEN or call.operation.endswith("_coalesced") else call.bytes


_ASPECTS: tuple[tuple[Detail, Callable[[Call], Hashable]], ...] = (
    (Detail.OPERATION, lambda call: call.operation),
    (Detail.ROOT, lambda call: call.peer),
    (Detail.SHAPE, _elements),
    (Detail.DTYPE, lambda call: call.dtype),
    (Detail.SIZE, _bytes),
)


def oddity(rings: Mapping[int, Ring], waited_at: Iterable[int]) -> Oddity | None:
    """Who is odd in a group, if anybody is; `rings` by rank, `waited_at` the numbers that some rank is in.

    Calls that came to their end count only where several differ and a rank's ring is the others' shifted by one: that
    one is a call ahead or behind. A single call that differed and went well is no reason for what happens now.
    """
    differing = sorted(key for key in _keys(rings) if _difference(_calls_at(key, rings)) is not None)
    waited = set(waited_at)
    unfinished = next((key for key in differing if key in waited), None)
    if unfinished is not None:
        return _at(unfinished, differing[0], rings)
    if len(differing) < 2:
        return None
    found = _at(differing[0], differing[0], rings)
    return found if all(detail in (Detail.SKIPPED, Detail.EXTRA) for detail in found.odd.values()) else None


def lasting(rings: Mapping[int, Ring], before: int) -> Oddity | None:
    """Who is odd in the one call of those before number `before` in which ranks differ, though it came to its end.

    NCCL checks nothing: where ranks give it other numbers of elements the call may end, with rubbish in the tensors,
    and a later one never does. What differs more than once goes well, however it comes about.
    """
    differing = [key for key in _keys(rings) if key < before and _difference(_calls_at(key, rings)) is not None]
    return _at(differing[0], differing[0], rings) if len(differing) == 1 else None


def among_more(odd: Oddity, rings: Mapping[int, Ring], more: Mapping[int, Ring]) -> Oddity:
    """Who of `rings` is odd if ranks of other groups are heard as well, or those of whose call only the bytes are
    known, and there is a majority then; else `odd`."""
    both = {**more, **rings}
    first = min(key for key in _keys(rings) if differ(rings, key))
    for heard in (both, _by_bytes(both, odd.key)):
        if not differ(heard, odd.key):
            continue
        found = _at(odd.key, first, heard)
        if found.usual is not None and found.odd.keys() < rings.keys():
            right = next(rank for rank in rings if rank not in found.odd)
            # Of the others' calls less is known.
            details = {rank: odd.odd.get(rank, one) if one is Detail.SIZE else one for rank, one in found.odd.items()}
            return Oddity(odd.key, rings[right].get(odd.key, found.usual), details)
    return odd


def _by_bytes(rings: Mapping[int, Ring], key: int) -> dict[int, Ring]:
    """With no more known of call `key` than of one that is over."""
    return {
        rank: {**ring, key: replace(ring[key], shape=None, dtype=None)} for rank, ring in rings.items() if key in ring
    }


def goes_like(one: Ring, other: Ring, key: int) -> bool:
    """Whether two ranks of different groups made the same calls before number `key`, as far as both are known."""
    both = [at for at in one.keys() & other.keys() if at < key]
    return bool(both) and all(_alike(one[at], other[at], roots=False) for at in both)


def unheard_of(ring: Ring, key: int) -> bool:
    """Whether call `key` is none that ever followed on one like the last before it, though others have, again and
    again; nor one that followed on these, so that one was left out."""
    here, before = ring.get(key), ring.get(key - 1)
    if here is None or before is None:
        return False
    usual = _following(ring, before, key)
    left_out = [later for one in usual for later in _following(ring, one, key)]
    return len(usual) > 1 and not any(_alike(here, one) for one in (*usual, *left_out))


def _following(ring: Ring, one: Call, before: int) -> list[Call]:
    """What followed on calls like this one, before number `before`."""
    return [ring[at + 1] for at, call in ring.items() if at + 1 < before and at + 1 in ring and _alike(call, one)]


def differ(rings: Mapping[int, Ring], key: int) -> bool:
    """Whether ranks made different calls as number `key`."""
    return _difference(_calls_at(key, rings)) is not None


def _keys(rings: Mapping[int, Ring]) -> set[int]:
    return {key for ring in rings.values() for key in ring if key}


def _calls_at(key: int, rings: Mapping[int, Ring]) -> dict[int, Call]:
    return {rank: ring[key] for rank, ring in rings.items() if key in ring}


# What torch's flight recorder calls otherwise than we do, or by one name with others.
_RECORDED_AS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "all_gather_object": "all_gather",
    "gather_object": "all_gather",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "broadcast",
    "reduce_scatter": "all_reduce",
    "reduce_scatter_tensor": "all_reduce",
    "reduce_scatter_coalesced": "all_reduce",
}
# Whose first input the recorder has as we do, unless it is of complex numbers: these are pairs to it.
_MEASURED_ALIKE = ("all_reduce", "broadcast", "reduce")


def _as_recorded(call: Call) -> Call:
    """What torch's flight recorder would know of a call."""
    name = _RECORDED_AS.get(call.operation, call.operation)
    if call.operation not in _MEASURED_ALIKE:
        return replace(call, operation=name, bytes=0, shape=None, dtype=None)
    if (call.dtype or "").startswith("complex"):
        return replace(call, shape=None, dtype=None)
    return call


def _comparable(calls: Iterable[Call]) -> list[Call]:
    several = list(calls)
    return [*map(_as_recorded, several)] if any(call.recorded for call in several) else several


def _difference(calls: Mapping[int, Call]) -> tuple[Detail, dict[int, Hashable]] | None:
    """The first aspect in which calls differ, with that of each rank where it is known."""
    alike = dict(zip(calls, _comparable(calls.values()), strict=True))
    for detail, aspect in _ASPECTS:
        values = {rank: value for rank, call in alike.items() if (value := aspect(call)) is not None}
        if len(set(values.values())) > 1:
            return detail, values
    return None


def _at(key: int, first: int, rings: Mapping[int, Ring]) -> Oddity:
    calls = _calls_at(key, rings)
    difference = _difference(calls)
    assert difference is not None
    detail, values = difference
    value, votes = Counter(values.values()).most_common(1)[0]
    if 2 * votes <= len(values):
        return Oddity(key, None, dict.fromkeys(values, detail))
    majority = [rank for rank, one in values.items() if one == value]
    usual: dict[int, Call] = {}
    for rank in majority:
        usual |= rings[rank]
    odd = {rank: _shift(rings[rank], usual, first, key) or detail for rank in values if rank not in majority}
    return Oddity(key, usual[key], odd)


def _shift(ring: Ring, usual: Ring, first: int, key: int) -> Detail | None:
    """Whether the rank left one call out or made one more, if its ring can't be explained the other way."""
    skipped = _same({at: ring[at] for at in ring if at >= first}, usual, 1)
    extra = _same({at: usual[at] for at in usual if at >= first}, ring, 1)
    if skipped != extra:
        return Detail.SKIPPED if skipped else Detail.EXTRA
    # Nobody went on from there. What the others would have done next is what they did after the same two calls before.
    here, before = usual[key], usual.get(key - 1)
    if skipped or before is None or key != first:
        return None
    if _alike(ring[key], before):
        return Detail.EXTRA if unheard_of(ring, key) else None
    nexts = [
        usual[at + 1]
        for at in usual.keys() & {at - 1 for at in usual} & {at + 1 for at in usual}
        if at < key and _alike(usual[at], here) and _alike(usual[at - 1], before)
    ]
    return Detail.SKIPPED if nexts and all(_alike(ring[key], one) for one in nexts) else None


def _same(calls: Ring, others: Ring, shift: int) -> bool:
    """Whether `calls` are the `others` of numbers higher by `shift`, as far as both are known."""
    pairs = [(call, others[key + shift]) for key, call in calls.items() if key + shift in others]
    return bool(pairs) and all(_alike(one, other) for one, other in pairs)


def _alike(one: Call, other: Call, roots: bool = True) -> bool:
    """Whether they are the same, as far as both are known; `roots`: also in who is the root."""
    one, other = _comparable((one, other))
    for detail, aspect in _ASPECTS:
        if roots or detail is not Detail.ROOT:
            here, there = aspect(one), aspect(other)
            if here != there and here is not None and there is not None:
                return False
    return True
