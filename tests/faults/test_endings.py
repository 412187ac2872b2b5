"""How a rank span ends when training does: by itself, by an exit, by an exception."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness.agent import Agent, Span
from harness.job import DDTRACE_RUN, PYTHON, Jobs, environment, torchrun
from harness.log import of_type, rank_spans

from ddtrace_pytorch.cli.main import cli

pytestmark = pytest.mark.faults

BEGIN = """
import os, sys
import ddtrace_pytorch
ddtrace_pytorch.patch()
import torch.distributed as dist

class OutOfData(Exception):
    pass

def train():
    raise OutOfData("epoch 3 is empty")

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

# How the script goes on -> its exit status, the reason, and whether it is an error.
ENDINGS = {
    "train()": (1, "exception", 1),
    "try:\n        train()\n    finally:\n        dist.destroy_process_group()": (1, "exception", 1),
    "try:\n        train()\n    except OutOfData:\n        pass\n    dist.destroy_process_group()": (0, "destroyed", 0),
    "sys.exit(3)": (3, "exit", 0),
    "pass": (0, "exit", 0),
    "dist.destroy_process_group()\n    os._exit(7)": (7, "destroyed", 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_span_says_how_training_ended(agent: Agent, jobs: Jobs, tmp_path: Path, ending: str) -> None:
    status, reason, error = ENDINGS[ending]
    env = environment(agent.url, DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    result = jobs.run([*PYTHON, jobs.script(f"{BEGIN}    {ending}\n")], env)
    assert result.returncode == status, result.describe()
    (span,) = agent.ranks()
    (on_disk,) = rank_spans(tmp_path / "log")
    assert (span["meta"]["pytorch.end_reason"], span["error"]) == (reason, error)
    assert (on_disk["tags"]["pytorch.end_reason"], on_disk["error"]) == (reason, error)
    states = [one for one in of_type(tmp_path / "log", "state") if one["why"] == "exception"]
    assert len(states) == error
    if error:
        (state,) = states
        assert re.fullmatch(r"/.*/train\.py:\d+ train", state["state"]["frames"][0])
        assert re.fullmatch(r"/.*/train\.py:\d+ <module>", state["state"]["frames"][1])
        (attempt,) = json.loads(CliRunner().invoke(cli, ["diagnose", "--json", str(tmp_path / "log")]).stdout)[
            "attempts"
        ]
        assert attempt["first_failure"]["what"] == "raised OutOfData: epoch 3 is empty"
        assert re.fullmatch(r"train\.py:\d+ train", attempt["first_failure"]["where"])
        assert "OutOfData: epoch 3 is empty" in result.stderr
        assert_is_the_exception(span)
        assert on_disk["tags"]["error.type"] == span["meta"]["error.type"]
    else:
        assert not [tag for tag in span["meta"] if tag.startswith("error.")]


def assert_is_the_exception(span: Span) -> None:
    assert span["meta"]["error.type"].endswith("OutOfData")
    assert span["meta"]["error.message"] == "epoch 3 is empty"
    assert "in train" in span["meta"]["error.stack"]


SPAWN = """
import os, sys
import ddtrace_pytorch
ddtrace_pytorch.patch()
import torch.distributed as dist
import torch.multiprocessing as mp

class OutOfData(Exception):
    pass

def train(rank, path):
    ddtrace_pytorch.patch()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        raise OutOfData("epoch 3 is empty")
    dist.barrier()

if __name__ == "__main__":
    try:
        mp.start_processes(train, args=(sys.argv[1],), nprocs=2, start_method=sys.argv[2])
    except mp.ProcessRaisedException as error:
        print("PARENT SAW", "OutOfData" in str(error) or "RuntimeError" in str(error))
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_exception_in_a_child_of_multiprocessing_is_in_its_span(
    agent: Agent, jobs: Jobs, tmp_path: Path, method: str
) -> None:
    env = environment(agent.url)
    result = jobs.run([*PYTHON, jobs.script(SPAWN), str(tmp_path / "meet"), method], env).ok()
    assert "PARENT SAW True" in result.stdout
    zero, one = agent.ranks()
    assert (zero["meta"]["pytorch.end_reason"], zero["error"]) == ("exception", 1)
    assert_is_the_exception(zero)
    # Its peer was in a collective with it: gloo told it, or the parent ended it first.
    assert one["meta"]["pytorch.end_reason"] in ("exception", "signal:SIGTERM")
    assert one["error"] == 1
    assert zero["meta"]["pytorch.incarnation"] == one["meta"]["pytorch.incarnation"]


ONE_RAISES = """
    import torch, torch.distributed as dist

    class OutOfData(Exception):
        pass

    def train():
        raise OutOfData("epoch 3 is empty")

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        train()
    dist.all_reduce(torch.ones(1))
"""


def test_under_torchrun_the_rank_that_raised_is_told_from_the_one_that_waited(
    agent: Agent, jobs: Jobs, tmp_path: Path
) -> None:
    env = environment(
        agent.url, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(tmp_path / "log")
    )
    result = jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(ONE_RAISES)], env)
    assert result.returncode == 1, result.describe()
    zero, one = agent.ranks()
    assert (zero["meta"]["pytorch.end_reason"], zero["error"]) == ("exception", 1)
    assert_is_the_exception(zero)
    assert one["meta"]["pytorch.end_reason"] in ("exception", "signal:SIGTERM")
    assert one["error"] == 1
    assert "OutOfData" not in one["meta"]["error.type"]
    on_disk = rank_spans(tmp_path / "log")
    assert [span["tags"]["error.type"] for span in on_disk] == [span["meta"]["error.type"] for span in (zero, one)]


# Forks of a process that has torch, so that thirty of them take seconds; each goes through the whole of the
# interpreter's end. Rank 1 leaves while a thread of ours still waits in the store for what rank 0, which is not
# instrumented, will never say; rank 0 lives until rank 1 is gone.
MANY_EXITS = """
    import os, sys
    import torch, torch.distributed as dist
    import ddtrace_pytorch
    if sys.argv[1] == "with":
        ddtrace_pytorch.patch()

    def rank(number, place):
        if number == 0:
            ddtrace_pytorch.unpatch()
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}-{place}", rank=number, world_size=2)
        dist.barrier()

    def pair(place):
        read, write = os.pipe()
        one = os.fork()
        if one == 0:
            os.close(read)
            rank(1, place)
            sys.exit(0)
        zero = os.fork()
        if zero == 0:
            os.close(write)
            rank(0, place)
            os.read(read, 1)
            os._exit(0)
        os.close(read)
        os.close(write)
        return zero, one

    for batch in range(int(sys.argv[3])):
        pairs = [pair(f"{batch}-{number}") for number in range(10)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for pair in pairs for child in pair]
        print("STATUSES", sorted(set(statuses)), flush=True)
    os._exit(0)
"""


def test_thirty_exits_without_destroy_never_abort(jobs: Jobs, tmp_path: Path) -> None:
    # The control tells an abort of torch's or gloo's own from one of ours.
    script = jobs.script(MANY_EXITS)
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    control = jobs.run([*PYTHON, script, "without", str(tmp_path / "a"), "1"], env).ok()
    ours = jobs.run([*PYTHON, script, "with", str(tmp_path / "b"), "3"], env).ok()
    assert control.stdout.splitlines() == ["STATUSES [0]"], control.describe()
    assert ours.stdout.splitlines() == ["STATUSES [0]"] * 3, ours.describe()
    spans = rank_spans(tmp_path / "log")
    assert [span["tags"]["pytorch.end_reason"] for span in spans] == ["exit"] * 30
