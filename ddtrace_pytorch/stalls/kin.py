"""Ranks of other groups that do as the ranks of one do. Pure.

Where all ranks run one program, groups of the same label are used alike: each `tp` group of a mesh makes the same calls
in the same order. The stages of a pipeline run programs of their own, and only ranks of the same stage are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ddtrace_pytorch.stalls.mismatch import Ring, goes_like, ring_of
from ddtrace_pytorch.stalls.roll import GroupState, RankState

Stage = frozenset[tuple[str, int]]

# How a pipeline's groups are called; another one that no collective is made in may be one as well.
_STAGES = re.compile(r"pp|pipe|stage", re.IGNORECASE)


def by_label(state: RankState) -> dict[str, GroupState]:
    """The rank's groups, where it is in one of that label."""
    several: dict[str, list[GroupState]] = {}
    for here in state.groups.values():
        several.setdefault(here.label, []).append(here)
    return {label: found[0] for label, found in several.items() if len(found) == 1}


def stage_of(state: RankState) -> Stage:
    """Where the rank is in groups that are there for what goes from rank to rank, whose members may have work of their
    own."""
    largest = max((len(here.ranks) for here in state.groups.values()), default=0)
    return frozenset(
        (here.label, here.ranks.index(state.rank))
        for here in state.groups.values()
        if state.rank in here.ranks and (_STAGES.search(here.label) or (not here.entered and len(here.ranks) < largest))
    )


def kin(group: GroupState, key: int, rings: Mapping[int, Ring], heard: Mapping[int, RankState]) -> dict[int, Ring]:
    """The rings of ranks in other groups of the same label, of whom each has made the calls that all in `rings` made
    before number `key`."""
    stages = {stage_of(heard[rank]) for rank in rings}
    if len(stages) != 1:
        return {}
    (stage,) = stages
    found: dict[int, Ring] = {}
    for rank, state in heard.items():
        here = by_label(state).get(group.label) if rank not in group.ranks else None
        if here is None or here.name == group.name or stage_of(state) != stage:
            continue
        ring = ring_of(state, here.name)
        if key in ring and all(goes_like(ring, other, key) for other in rings.values()):
            # Who is the root is another rank in each group.
            found[rank] = {at: replace(call, peer=None) for at, call in ring.items()}
    return found
