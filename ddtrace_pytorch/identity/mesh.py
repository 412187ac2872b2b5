"""Where this rank is in the meshes that the job laid its ranks out in: ``dp`` 1 of 4, ``tp`` 0 of 2.

Only of dimensions that have names: the first dimension of one mesh has nothing to do with that of another. Where two
meshes have a dimension of the same name, the one that covers more ranks is believed, and the first of those that cover
the same: a part of a mesh, or a mesh laid over some of the ranks, changes nothing.

Nothing here holds on to a mesh: what it says is read once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ddtrace_pytorch.spans import Fact

# More names than any job has need of: one that makes new ones all the time fills no span with them.
MOST_NAMES = 32
LONGEST_NAME = 64

# What torch calls the groups of a mesh without names, or of one that takes the place of the default group.
_NAMELESS = re.compile(r"dim_\d+|default")


class Place(NamedTuple):
    """This rank is number `coordinate` of `size` along the dimension `name` of a mesh of `covered` ranks."""

    name: str
    coordinate: int
    size: int
    covered: int


class Coordinates:
    """All that is known of one life of a process group."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}

    def add(self, places: Iterable[Place]) -> bool:
        """Whether any of `places` is news."""
        changed = False
        for place in places:
            known = self._places.get(place.name)
            if place.covered > known.covered if known is not None else len(self._places) < MOST_NAMES:
                self._places[place.name] = place
                changed = changed or known is None or known[:3] != place[:3]
        return changed

    def facts(self) -> dict[str, Fact]:
        facts: dict[str, Fact] = {}
        for name, coordinate, size, _ in self._places.values():
            facts[f"pytorch.mesh.{name}"] = coordinate
            facts[f"pytorch.mesh.{name}.size"] = size
        return facts


def of_mesh(mesh: Any) -> list[Place]:
    """This rank's places in a ``DeviceMesh``; none where its dimensions have no names or the rank isn't in it."""
    names = mesh.mesh_dim_names
    coordinate = mesh.get_coordinate() if names else None  # a list up to 2.9, then a tuple
    if coordinate is None:
        return []
    covered = int(mesh.size())
    return [_place(name, coordinate[index], mesh.size(index), covered) for index, name in enumerate(names)]


def of_groups(distributed: Any) -> Iterator[Place]:
    """What the groups there are tell of meshes that were made before we came; torch writes that on them since 2.6.

    A dimension that spans all ranks has the default group, which says nothing.
    """
    c10d = distributed.distributed_c10d
    for group in tuple(c10d._world.pg_map):
        described = getattr(group, "group_desc", "") if isinstance(group, c10d.ProcessGroup) else ""
        name = described.removeprefix("mesh_")
        if name != described and not _NAMELESS.fullmatch(name):
            yield _place(name, group.rank(), group.size(), group.size())


def of_megatron(parallel_state: Any) -> Iterator[Place]:
    """What Megatron-LM's ``megatron.core.parallel_state`` says of the groups it has made."""
    dimensions = {
        "dp": "data_parallel",
        "tp": "tensor_model_parallel",
        "cp": "context_parallel",
        "ep": "expert_model_parallel",
        "pp": "pipeline_model_parallel",
    }
    for name, theirs in dimensions.items():
        rank = getattr(parallel_state, f"get_{theirs}_rank", None)
        size = getattr(parallel_state, f"get_{theirs}_world_size", None)
        if rank is not None and size is not None:
            yield _place(name, rank(), size(), parallel_state.torch.distributed.get_world_size())


def _place(name: Any, coordinate: Any, size: Any, covered: int) -> Place:
    # `str.__str__`: of an enum's member that is a string, the string itself.
    return Place(str.__str__(name)[:LONGEST_NAME], int(coordinate), int(size), covered)
