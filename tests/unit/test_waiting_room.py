"""What is said where `init_process_group` waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ddtrace_pytorch.waiting_room import message, ranks_of_host

pytestmark = pytest.mark.once

TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "rank", "expected"),
    [
        (TORCHRUN, 5, range(4, 8)),
        (TORCHRUN, 1, range(4)),
        (TORCHRUN, 0, None),
        (TORCHRUN, 6, None),
        ({"LOCAL_RANK": "1"}, 5, None),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 6, range(6, 8)),
    ],
)
def test_which_ranks_a_host_has(environ: Mapping[str, str], rank: int, expected: range | None) -> None:
    assert ranks_of_host(rank, 8, environ) == expected


@pytest.mark.parametrize(
    ("here", "expected", "words"),
    [
        ([4, 5, 7], range(4, 8), "with ranks 4-5, 7, without rank 6, as far as they are traced"),
        ([4, 5, 6, 7], range(4, 8), "with ranks 4-7, all of this host; one of the 4 on others is missed"),
        ([0], None, "with rank 0 of 8"),
        ([0, 1, 2, 3, 4, 5, 6, 7], range(8), "with ranks 0-7 of 8"),
    ],
)
def test_what_is_said(here: Sequence[int], expected: range | None, words: str) -> None:
    said = message(here, expected, 8, "node-a", 10.0)
    assert said == f"init_process_group has waited 10 s: here (node-a) {words}"
