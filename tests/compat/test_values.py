"""What every operation gives back and how it fails is the same with and without the plugin."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from compat.side_by_side import Sides, scenes_of, side_by_side
from harness.job import jobs_in
from harness.log import of_type, rank_spans

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]
SCRIPT = "values.py"


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with jobs_in(tmp_path_factory.mktemp("values")) as jobs:
        yield side_by_side(jobs, SCRIPT, DD_PYTORCH_COLLECTIVES="all")


@pytest.mark.parametrize("scene", scenes_of(SCRIPT))
def test_same(sides: Sides, scene: str) -> None:
    sides.compare(scene)


def test_neither_job_says_more_than_the_other(sides: Sides) -> None:
    def lines(text: str) -> list[str]:
        # torchrun's, and gloo's own words on the absent peer, with times and process ids; and who was waited for in
        # the two calls that a scene has fail after a second, which is asked when they may just have ended.
        ours = [line for line in text.splitlines() if "ddtrace" in line.lower()]
        return [line for line in ours if not re.search("monitored_barrier of group|of group `absent`", line)]

    assert lines(sides.ours.result.stderr) == lines(sides.plain.result.stderr) == []
    assert sides.ours.result.stdout == sides.plain.result.stdout


def test_a_coalesced_block_is_one_call_whose_bytes_count_once(sides: Sides) -> None:
    for deferred in ("false", "true"):
        here = {"group": "coalesced", "op": "all_reduce_coalesced", "async": deferred}
        assert (sides.ours.total("count", **here), sides.ours.total("bytes", **here)) == (1, 16 + 32)
    assert sides.ours.total("waits", group="coalesced") == 1
    assert sides.ours.total("count", group="coalesced", op="all_reduce") == 0


def test_calls_that_nobody_waited_for_are_told_as_such(sides: Sides) -> None:
    here = {"group": "never waited for", "op": "all_reduce"}
    assert [sides.ours.total("count", rank, **here) for rank in (0, 1)] == [5, 5]
    assert [sides.ours.total("waits", rank, **here) for rank in (0, 1)] == [0, 5]
    assert {record["tags"]["collective.time_source"] for record in sides.ours.summaries(**here)} == {"issue"}


def test_a_call_on_another_thread_is_a_child_of_the_rank_span(sides: Sides) -> None:
    ranks = {span["span_id"] for span in rank_spans(sides.ours.log)}
    calls = [
        span
        for span in of_type(sides.ours.log, "span")
        if span["name"] == "pytorch.collective" and span["tags"]["collective.group"] == "hook"
    ]
    assert len(calls) == 2
    assert {span["parent_id"] for span in calls} <= ranks
    assert sides.ours.total("count", group="hook") == 1


def test_a_failed_call_is_counted_as_one(sides: Sides) -> None:
    here = {"group": "absent", "op": "all_reduce"}
    assert (sides.ours.total("errors", **here), sides.ours.total("count", **here)) == (1, 0)
