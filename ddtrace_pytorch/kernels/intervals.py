"""Arithmetic with stretches of time. Pure; all times are whole numbers of any one unit.

What it calls *merged* is sorted, and its stretches neither overlap nor touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What any of `intervals` covers, merged. One that ends before it begins, or at once, covers nothing."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged


def length(merged: Iterable[Interval]) -> int:
    """How long it covers in all."""
    return sum(end - start for start, end in merged)


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What both of two merged ones cover, merged."""
    found: list[Interval] = []
    at, there = 0, 0
    while at < len(one) and there < len(other):
        start, end = max(one[at][0], other[there][0]), min(one[at][1], other[there][1])
        if start < end:
            found.append((start, end))
        if one[at][1] < other[there][1]:
            at += 1
        else:
            there += 1
    return found


def gaps(merged: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """What a merged one leaves uncovered between `start` and `end`, merged."""
    found: list[Interval] = []
    for begun, ended in merged:
        if begun >= end:
            break
        if begun > start:
            found.append((start, begun))
        start = max(start, ended)
    if start < end:
        found.append((start, end))
    return found
