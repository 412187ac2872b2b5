"""Parallelised models compile to the same graphs, and what parallelises them is the same to whoever looks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compat.side_by_side import Sides, scenes_of, side_by_side
from harness.job import jobs_in
from harness.log import rank_spans

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
SCRIPT = "sharded.py"


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with jobs_in(tmp_path_factory.mktemp("sharded")) as jobs:
        yield side_by_side(jobs, SCRIPT)


@pytest.mark.parametrize("scene", scenes_of(SCRIPT))
def test_same(sides: Sides, scene: str) -> None:
    sides.compare(scene)


def test_all_of_it_was_told(sides: Sides) -> None:
    for span in rank_spans(sides.ours.log):
        assert (span["tags"]["framework"], span["tags"]["pytorch.parallelism"]) == ("fsdp", "ddp+fsdp+tp")
        assert span["metrics"]["pytorch.mesh.tp"] == span["metrics"]["rank"]
        assert span["metrics"]["pytorch.mesh.tp.size"] == 2
