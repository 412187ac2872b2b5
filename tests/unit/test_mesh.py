"""Where a rank is in its meshes: which of several is believed, and what is never claimed."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from ddtrace_pytorch.identity.mesh import MOST_NAMES, Coordinates, Place, of_groups, of_megatron, of_mesh


def facts(*places: Place) -> dict[str, Any]:
    coordinates = Coordinates()
    coordinates.add(places)
    return coordinates.facts()


def test_each_dimension_gives_a_coordinate_and_a_size() -> None:
    assert facts(Place("dp", 1, 4, 8), Place("tp", 0, 2, 8)) == {
        "pytorch.mesh.dp": 1,
        "pytorch.mesh.dp.size": 4,
        "pytorch.mesh.tp": 0,
        "pytorch.mesh.tp.size": 2,
    }


def test_the_mesh_that_covers_most_ranks_is_believed_in_any_order_and_the_first_of_equals() -> None:
    whole, part, other = Place("dp", 3, 4, 8), Place("dp", 1, 2, 4), Place("dp", 2, 4, 8)
    for order in itertools.permutations([whole, part]):
        assert facts(*order)["pytorch.mesh.dp"] == 3
    assert facts(whole, part, other)["pytorch.mesh.dp"] == 3
    assert facts(part, other, whole)["pytorch.mesh.dp"] == 2


def test_what_changes_nothing_is_no_news() -> None:
    coordinates = Coordinates()
    assert coordinates.add([Place("dp", 1, 2, 4)])
    assert not coordinates.add([Place("dp", 1, 2, 4)])
    assert not coordinates.add([Place("dp", 0, 2, 2)])
    assert not coordinates.add([Place("dp", 1, 2, 8)])  # more ranks, the same place
    assert not coordinates.add([Place("dp", 0, 2, 8)])
    assert coordinates.add([Place("dp", 0, 2, 16)])


def test_names_without_end_fill_no_span() -> None:
    coordinates = Coordinates()
    for number in range(1000):
        coordinates.add([Place(f"dim{number}", 0, 1, 1)])
    assert len(coordinates.facts()) == 2 * MOST_NAMES
    assert not coordinates.add([Place("dim999", 0, 1, 1)])
    assert coordinates.add([Place("dim0", 1, 2, 2)])  # known ones are still corrected


@pytest.fixture
def torch_world() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield torch
    distributed.destroy_process_group()


def test_a_mesh_is_read_with_this_releases_coordinates(torch_world: Any) -> None:
    class Axis(str, enum.Enum):
        TP = "tp"

    mesh = torch_world.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", Axis.TP))
    assert of_mesh(mesh) == [Place("dp", 0, 1, 1), Place("tp", 0, 1, 1)]
    assert [type(place.name) for place in of_mesh(mesh)] == [str, str]


def test_a_mesh_without_names_claims_nothing(torch_world: Any) -> None:
    assert of_mesh(torch_world.distributed.init_device_mesh("cpu", (1, 1))) == []
    assert list(of_groups(torch_world.distributed)) == []


def test_a_rank_outside_of_a_mesh_is_nowhere_in_it(torch_world: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [5], mesh_dim_names=("dp",), _init_backend=False)
    assert of_mesh(mesh) == []


def test_groups_tell_of_named_meshes_made_before(torch_world: Any) -> None:
    distributed = torch_world.distributed
    for description in ("mesh_dp", "mesh_dim_0", "mesh_default", "mine", None):
        distributed.new_group([0], backend="gloo", group_desc=description)
    assert list(of_groups(distributed)) == [Place("dp", 0, 1, 1)]


def test_a_megatron_that_lacks_a_dimension_tells_of_the_others(torch_world: Any) -> None:
    class Early:
        torch = torch_world

        @staticmethod
        def get_tensor_model_parallel_rank() -> int:
            return 0

        @staticmethod
        def get_tensor_model_parallel_world_size() -> int:
            return 1

    assert list(of_megatron(Early)) == [Place("tp", 0, 1, 1)]
