"""Torch's ways to parallelise compute the same bits, launch the same collectives and warn of the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compat.side_by_side import Sides, scenes_of, side_by_side
from harness.job import jobs_in

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]
SCRIPT = "parallel.py"


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with jobs_in(tmp_path_factory.mktemp("parallel")) as jobs:
        yield side_by_side(jobs, SCRIPT)


@pytest.mark.parametrize("scene", scenes_of(SCRIPT))
def test_same(sides: Sides, scene: str) -> None:
    sides.compare(scene)


@pytest.mark.parametrize("operation", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_fsdp2_calls_are_counted_once_each_with_their_bytes(sides: Sides, operation: str) -> None:
    # A layer of 8 x 8 and 8 float32 parameters, for two steps.
    here = {"group": "fsdp2", "op": operation}
    for rank in (0, 1):
        assert sides.ours.total("count", rank, **here) == 2
        assert sides.ours.total("bytes", rank, **here) == 2 * (8 * 8 + 8) * 4
    assert {record["tags"]["collective.op"] for record in sides.ours.summaries(group="fsdp2")} == {
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    }
