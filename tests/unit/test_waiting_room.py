"""What is said where `init_process_group` waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

import pytest
from harness.waiting import until

from ddtrace_pytorch import border
from ddtrace_pytorch.waiting_room import message, ranks_of_host, watch

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
        ([4, 5, 6, 7], range(4, 8), "with ranks 4-7, all of this host; of the other 4 nothing is known here"),
        ([0], None, "with rank 0 of 8"),
        ([0, 1, 2, 3, 4, 5, 6, 7], range(8), "with ranks 0-7 of 8"),
    ],
)
def test_what_is_said(here: Sequence[int], expected: range | None, words: str) -> None:
    said = message(here, expected, 8, "node-a", 10.0)
    assert said == f"init_process_group has waited 10 s: here (node-a) {words}"


@pytest.mark.parametrize(("rank", "said"), [(1, 1), (7, 0)])
def test_who_does_not_find_itself_says_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, said: int
) -> None:
    """Rank 7 of 2 is none that torch takes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"waiting-{os.getpid()}-{rank}")
    monkeypatch.setattr(border, "_said", set())
    over = threading.Event()
    before = {*threading.enumerate()}
    watch(rank, 2, 0.01, over)
    (waiting,) = {*threading.enumerate()} - before
    if said:
        until(lambda: caplog.messages, 30, "it is said")
        over.set()
    waiting.join(30)
    over.set()
    assert not waiting.is_alive()
    assert len(caplog.messages) == said
