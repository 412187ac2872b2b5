"""A rank is killed while another waits for it, or all are ended by hand: `diagnose` names it."""

from __future__ import annotations

import json
import os
import re
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.agent import free_port
from harness.job import DDTRACE_RUN, PYTHON, Job, Jobs, environment, torchrun
from harness.log import of_type
from harness.waiting import until

from ddtrace_pytorch.cli.main import cli

pytestmark = pytest.mark.faults

RELEASE = tuple(int(part) for part in version("torch").split(".")[:2])

TRAIN = """
    import os, time
    import torch, torch.distributed as dist

    def load():
        while True:
            time.sleep(0.05)

    dist.init_process_group("gloo")
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        load()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if "DUMP" in os.environ:
        with open(os.environ["DUMP"], "wb") as file:
            file.write(torch._C._distributed_c10d._dump_fr_trace())
    work.wait()
"""


def diagnosis(env: dict[str, str], log: Path) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["diagnose", "--json", str(log)], env=env)
    assert done.exit_code == 0, done.output
    (attempt,) = json.loads(done.stdout)["attempts"]
    assert isinstance(attempt, dict)
    return attempt


def names_rank_1(attempt: dict[str, Any]) -> None:
    assert (attempt["first_failure"]["cause"], attempt["first_failure"]["ranks"]) == ("killed", [1])
    assert (attempt["verdict"]["kind"], attempt["verdict"]["ranks"], attempt["verdict"]["waiting"]) == (
        "gone",
        [1],
        [0],
    )
    one, zero = attempt["ranks"]
    assert (one["rank"], one["ended"], one["named"]) == (1, "killed", True)
    assert re.fullmatch(r"train\.py:\d+ load", one["where"])
    assert zero["ended"].startswith("raised ")


def by_hand(tmp_path: Path, **settings: str) -> dict[str, str]:
    """The environment of two ranks without a launcher, less RANK; the run log is in `tmp_path`/log."""
    return environment(
        None,
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(tmp_path / "log"),
        DD_PYTORCH_STATE_DIR=str(tmp_path / "state"),
        DD_PYTORCH_JOB_ID="night run",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        WORLD_SIZE="2",
        **settings,
    )


def two_ranks(jobs: Jobs, common: dict[str, str], script: str) -> tuple[Job, Job]:
    zero, one = (jobs.start([*DDTRACE_RUN, *PYTHON, script], {**common, "RANK": str(rank)}) for rank in (0, 1))
    return zero, one


def test_who_was_killed_is_named_at_once_and_after_its_recovery(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    recorder = RELEASE >= (2, 8)
    common = by_hand(tmp_path, **({"DUMP": str(log / "nccl_trace_rank_0")} if recorder else {}))
    script = jobs.script(TRAIN)
    zero, one = two_ranks(jobs, common, script)

    def waits() -> bool:
        return any(
            group[2] == "all_reduce" and group[0] == 6
            for beat in of_type(log, "beat")
            for group in beat.get("groups", {}).values()
        )

    until(waits, 60, "rank 0 waits in its sixth all_reduce")
    os.kill(one.process.pid, signal.SIGKILL)
    assert zero.wait().returncode == 1

    before = diagnosis(common, log)
    names_rank_1(before)
    if recorder:
        assert before["flight_recorder"]["agrees"] is True, before["flight_recorder"]
        # The sixth, or one before it: gloo marks what has ended a moment later.
        assert "of group 0 never completed on rank 0" in before["flight_recorder"]["message"]
    assert CliRunner().invoke(cli, ["recover", str(log)], env=common).exit_code == 0
    assert [record["why"] for record in of_type(log, "state") if "seg-00001" in record["_file"]] == ["killed"]
    names_rank_1(diagnosis(common, log))


def test_whom_all_waited_for_is_named_where_a_person_ended_it(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = environment(
        None,
        DD_PATCH_MODULES="pytorch:true",
        DD_PYTORCH_EXPORT="local",
        DD_PYTORCH_LOG_DIR=str(log),
        DD_PYTORCH_STATE_DIR=str(tmp_path / "state"),
        DD_PYTORCH_STALL_SECONDS="2",
    )
    job = jobs.start([*DDTRACE_RUN, *torchrun(), jobs.script(TRAIN)], env)
    until(lambda: any(of_type(log, "verdict")), 60, "rank 1 is named")
    os.kill(job.process.pid, signal.SIGINT)
    job.wait()

    attempt = diagnosis(env, log)
    assert [one["ended"].partition(":")[0] for one in attempt["ranks"]] == ["raised KeyboardInterrupt"] * 2
    assert (attempt["first_failure"]["cause"], attempt["first_failure"]["ranks"]) == ("stall", [1])
    assert (attempt["verdict"]["kind"], attempt["verdict"]["ranks"]) == ("absent", [1])
    assert "That lasted until it was ended from outside" in attempt["what_happened"]
    assert attempt["stalls"] == []


GOES_ON = """
    import os, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    while dist.get_rank() == 1 and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.05)
    dist.all_reduce(torch.ones(1))
"""


def test_a_stall_that_goes_on_right_before_the_end_is_told(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    common = by_hand(tmp_path, DD_PYTORCH_STALL_SECONDS="2", GATE=str(tmp_path / "gate"))
    script = jobs.script(GOES_ON)
    zero, one = two_ranks(jobs, common, script)
    until(lambda: any(of_type(log, "verdict")), 60, "rank 1 is named")
    (tmp_path / "gate").touch()
    said = zero.wait().ok().stderr + one.wait().ok().stderr
    assert re.search(r"all_reduce #\d+ of group `world` went on after \d+ s", said), said
    attempt = diagnosis(common, log)
    assert attempt["ended_well"]
    assert [stall["ranks"] for stall in attempt["stalls"]] == [[1]]
    assert "A stall that went on" in attempt["what_happened"]


DDP = """
    import os, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        while step == 5 and dist.get_rank() == 1:
            time.sleep(0.05)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        try:
            loss.backward()
        except RuntimeError:
            while not os.path.exists(os.environ["GATE"]):
                time.sleep(0.05)
            raise
        optimizer.step()
"""


@pytest.mark.skipif(RELEASE < (2, 8), reason="nothing tells of what torch issues itself")
def test_a_call_of_torchs_own_that_a_rank_died_of_did_not_go_on(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    common = by_hand(tmp_path, DD_PYTORCH_STALL_SECONDS="2", GATE=str(tmp_path / "gate"))
    script = jobs.script(DDP)
    zero, one = two_ranks(jobs, common, script)
    until(lambda: any(of_type(log, "verdict")), 60, "rank 1 is named")
    os.kill(one.process.pid, signal.SIGKILL)
    until(lambda: any(one["name"] == "stall over" for one in of_type(log, "event")), 60, "rank 0 waits no longer")
    (tmp_path / "gate").touch()
    done = zero.wait()

    assert done.returncode == 1
    assert "went on" not in done.stderr
    assert re.search(r"all_reduce #\d+ of group `world` is no longer waited for after \d+ s", done.stderr)
    attempt = diagnosis(common, log)
    assert attempt["stalls"] == []
    assert (attempt["verdict"]["ranks"], attempt["first_failure"]["ranks"]) == ([1], [1])
    assert "went on" not in attempt["what_happened"]


EXITS, LEAVES = "sys.exit(128 + number)", "os._exit(3)"
ENDS_THE_GROUP, RAISES_ITS_OWN = "dist.destroy_process_group(); sys.exit()", "raise Preempted('told to end')"
HEARING = """
    import signal, sys

    class Preempted(Exception):
        pass

    def handler(number, frame):
        {what}

    signal.signal(signal.{name}, handler)
"""


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("SIGINT", EXITS),
        ("SIGINT", ENDS_THE_GROUP),
        ("SIGINT", RAISES_ITS_OWN),
        ("SIGTERM", RAISES_ITS_OWN),
        ("SIGTERM", LEAVES),
    ],
)
def test_whom_all_waited_for_is_named_where_a_handler_of_the_users_ended_it(
    jobs: Jobs, tmp_path: Path, name: str, what: str
) -> None:
    log = tmp_path / "log"
    common = by_hand(tmp_path, DD_PYTORCH_STALL_SECONDS="4")
    script = jobs.script(HEARING.format(what=what, name=name) + TRAIN)
    ranks = [jobs.start([*DDTRACE_RUN, *PYTHON, script], {**common, "RANK": str(rank)}) for rank in (0, 1)]
    until(lambda: any(of_type(log, "verdict")), 60, "rank 1 is named")
    for one in ranks:
        os.kill(one.process.pid, signal.Signals[name])
    for one in ranks:
        one.wait()

    attempt = diagnosis(common, log)
    assert attempt["verdict"] is not None, attempt
    assert (attempt["verdict"]["kind"], attempt["verdict"]["ranks"]) == ("absent", [1])
    assert (attempt["first_failure"]["cause"], attempt["first_failure"]["ranks"]) == ("stall", [1])
    # Of who leaves at once nobody has heard that it was told to.
    assert ("That lasted until it was ended from outside" in attempt["what_happened"]) or what == LEAVES
    assert attempt["stalls"] == []
