"""Ranks that are threads of one process, as torch's own tests have them: one session at a time, and none forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, alone
from harness.log import rank_spans

pytestmark = pytest.mark.faults

RANKS = 8

SCRIPT = f"""
import threading
import ddtrace_pytorch
ddtrace_pytorch.patch()
import torch, torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

_install_threaded_pg()
torch._C._distributed_c10d._set_thread_isolation_mode(True)
store, errors = dist.HashStore(), []

def rank(number):
    try:
        dist.init_process_group("threaded", rank=number, world_size={RANKS}, store=store)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == {RANKS}
        dist.destroy_process_group()
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=rank, args=(number,)) for number in range({RANKS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("ERRORS", errors)
print("LEFT", [thread.name for thread in threading.enumerate() if thread.name.startswith("ddtrace_pytorch")])
"""


def test_threads_that_open_sessions_at_once_leave_none_behind(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*PYTHON, jobs.script(SCRIPT)], alone(tmp_path / "log")).ok()
    assert "ERRORS []" in result.stdout, result.describe()
    assert "LEFT []" in result.stdout, result.describe()
    assert "Traceback" not in result.stderr, result.describe()
    reasons = [span["tags"]["pytorch.end_reason"] for span in rank_spans(tmp_path / "log")]
    assert len(reasons) == RANKS
    assert set(reasons) <= {"replaced", "destroyed"}
