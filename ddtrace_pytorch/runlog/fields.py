"""Fields of a record as a reader takes them: somebody else's data, in which a wrong type is the same as nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

# More than any count, size or time that is recorded: a number that large is as good as none.
TOO_LARGE = 1 << 63


def mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) else ""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, of some size that can be."""
    return type(value) is int and -TOO_LARGE < value < TOO_LARGE


def integer(record: Mapping[str, Any], key: str) -> int | None:
    value = record.get(key)
    # is_whole(), without the call: readers of large logs ask for millions of these.
    return value if type(value) is int and -TOO_LARGE < value < TOO_LARGE else None


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A number of some size that can be: sums of these are finite."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < TOO_LARGE else None
