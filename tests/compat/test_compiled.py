"""torch.compile and torch.export find the same graphs, breaks, frames and warnings as without the plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compat.side_by_side import Sides, scenes_of, side_by_side
from harness.job import jobs_in

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
SCRIPT = "compiled.py"


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with jobs_in(tmp_path_factory.mktemp("compiled")) as jobs:
        yield side_by_side(jobs, SCRIPT)


@pytest.mark.parametrize("scene", scenes_of(SCRIPT))
def test_same(sides: Sides, scene: str) -> None:
    sides.compare(scene)


def test_nothing_of_ours_is_compiled(sides: Sides) -> None:
    for said in sides.ours.ranks:
        assert "ddtrace_pytorch" not in str({scene: came for scene, came in said.items() if "frames" in str(came)})


def test_ten_runs_are_ten_collectives_on_the_group(sides: Sides) -> None:
    for side in (sides.plain, sides.ours):
        for said in side.ranks:
            assert said["ten_runs"]["came"][1] == 10
    # Compiled code issues them from C++: where no hook of the group tells, they are in the group's count alone.
    assert max(record["metrics"]["collective.group_launched"] for record in sides.ours.summaries(group="world")) >= 10
