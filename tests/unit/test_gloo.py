"""Whether gloo's threads are done: by torch's own flight recorder, of a real group."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddtrace_pytorch.kernels.gloo import is_done

needs_recorder = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch records nothing of gloo"
)


def saying(*retired_and_created: tuple[bool, int]) -> SimpleNamespace:
    entries = ",".join(
        f'{{"input_sizes":[[4]],"op_id":1,"process_group":["0","dp"],"retired":{str(retired).lower()},"state":"scheduled",'
        f'"thread_name":"python","time_created_ns":{created}}}'
        for retired, created in retired_and_created
    )
    answer = f'{{"entries":[{entries}],"pg_status":{{}}}}'
    return SimpleNamespace(
        _C=SimpleNamespace(_distributed_c10d=SimpleNamespace(_dump_fr_trace_json=lambda *asked: answer))
    )


@pytest.mark.parametrize(
    ("entries", "done"),
    [
        ((), True),
        (((True, 20),), True),
        (((False, 20),), False),
        # What never ended before the window began is not its own.
        (((False, 5), (True, 20)), True),
        (((True, 20), (False, 30)), False),
    ],
)
def test_what_was_issued_since_then_is_done_with_or_not(entries: tuple[tuple[bool, int], ...], done: bool) -> None:
    assert is_done(saying(*entries), 10, 0.01) is done


def test_where_nothing_is_recorded_nobody_can_tell() -> None:
    assert is_done(SimpleNamespace(_C=SimpleNamespace()), 0, 0.0)


@needs_recorder
def test_a_collective_that_waits_for_its_peer_is_not_done_with() -> None:
    store, since = dist.HashStore(), time.time_ns()
    with ThreadPoolExecutor(2) as ranks:
        ours, theirs = ranks.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), range(2))
    waits = ours.allreduce([torch.ones(4)])
    assert not is_done(torch, since, 0.05)
    theirs.allreduce([torch.ones(4)]).wait()
    waits.wait()
    assert is_done(torch, since, 30.0)
