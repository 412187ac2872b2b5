"""What ranks said to each other without anybody taking the time: it is part of what they seem to compute. Pure.

The field names of :class:`Untimed` are keys of ``report --json`` (adding is free, renaming needs a release note).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddtrace_pytorch.cli.collectives import Group

# Of as many a step nobody asks what they took: those of the start, and of the end.
OFTEN = 0.5


@dataclass
class Untimed:
    """Of `of` collectives of all ranks nobody timed `calls` (null, both: none was counted)."""

    calls: int | None
    of: int | None


NOT_COUNTED = Untimed(None, None)


def untimed_among(groups: Iterable[Group], steps: int) -> Untimed | None:
    """Those of `groups`, if there are about as many as `steps`, both of all ranks; None if they hardly matter."""
    several = [group for group in groups if group.size != 1]
    timed = sum(one.calls for group in several for one in group.operations if one.time_source != "none")
    untimed = sum(one.calls for group in several for one in group.operations if one.time_source == "none")
    untimed += sum(one.calls for group in several for one in group.unseen)
    return Untimed(untimed, untimed + timed) if untimed and untimed >= OFTEN * steps else None
