"""Which calls are recorded one by one: the same ones on every rank, though the ranks never talk about it. Pure.

Calls are numbered from 1. At `level` L one call of every 2**L is chosen, at a place in its block that looks random, so
that a step of 2**n calls doesn't always show the same one. The choice at one level is part of the choice at each lower
level: ranks that have settled on different levels still share all calls of the higher one.
"""

from __future__ import annotations

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def chosen(block: int, level: int) -> int:
    """The number of the call that is chosen of block `block`, the calls from ``block << level`` on."""
    for depth in range(level, 0, -1):
        block = 2 * block + _coin(block, depth)
    return block


def following(number: int, level: int) -> int:
    """The first call after `number` that is chosen."""
    block = number >> level
    here = chosen(block, level)
    return here if here > number else chosen(block + 1, level)


def level_for(calls: int, share: int) -> int:
    """The least level at which no more than `share` of `calls` calls are chosen."""
    return ((calls - 1) // share).bit_length() if calls > 0 else 0


def _coin(block: int, depth: int) -> int:
    mixed = ((block + 1) * _MIX ^ depth * 0xBF58476D1CE4E5B9) & _MASK
    return (mixed ^ mixed >> 29) >> 13 & 1
