"""Torch's ways to parallelise compute the same bits, launch the same collectives and warn of the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

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


# What a rank says of the life that a scene has: framework, `pytorch.parallelism` and steps.
SAID = {
    "ddp_with_a_comm_hook": ("ddp", "ddp", 8),
    "fsdp1": ("fsdp", "fsdp", 2),
    "fsdp2": ("fsdp", "fsdp", 2),
    "tensor_parallel": ("tp", "tp", 2),
    "pipelining": ("pp", "pp", 2),
    "zero": ("ddp", "ddp+zero", 2),
    "distributed_checkpoint": ("fsdp", "fsdp", 2),
}


@pytest.mark.parametrize("scene", SAID)
def test_it_is_told_with_its_steps_and_no_collective_is_left_out(sides: Sides, scene: str) -> None:
    number = scenes_of(SCRIPT).index(scene)
    for rank in (0, 1):
        span = sides.ours.lives(rank)[number]
        tags, life = span["tags"], Path(span["_file"]).parent
        assert (tags["framework"], tags["pytorch.parallelism"], span["metrics"]["pytorch.steps"]) == SAID[scene]
        assert (tags["pytorch.end_reason"], span["error"]) == ("destroyed", 0)
        totals = [one for one in sides.ours.summaries(rank) if Path(one["_file"]).parent == life]
        missed: dict[str, float] = {}
        told: Counter[str] = Counter()
        for one in totals:
            group, metrics = one["tags"]["collective.group"], one["metrics"]
            missed[group] = metrics["collective.group_launched"] - metrics["collective.group_seen"]
            told[group] += metrics["collective.count"] if one["resource"] == "unseen" else 0
        assert totals
        assert missed == told


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
