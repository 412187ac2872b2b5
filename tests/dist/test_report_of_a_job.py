"""What `report` says of jobs that really ran."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone, environment, torchrun
from harness.log import of_type
from harness.waiting import until

from ddtrace_pytorch.cli.main import cli

pytestmark = pytest.mark.dist

UNIT = Path(__file__).parents[1] / "unit"

GROUP = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
"""

# On a machine of eight GPUs, as far as torch's build and NVML tell.
ON_GPUS = (
    """
    import torch
    torch.version.cuda = "13.0"
"""
    + GROUP
)
NVML = """
    import fake_nvml
    nvml = fake_nvml.FakeNvml(mig=False)
    NVMLError = nvml.NVMLError
    def __getattr__(name): return getattr(nvml, name)
"""


def traced(log: Path, **settings: str) -> dict[str, str]:
    where = {"DD_PYTORCH_EXPORT": "local", "DD_PYTORCH_LOG_DIR": str(log)}
    return environment(None, **{"DD_PATCH_MODULES": "pytorch:true", **where, **settings})


def the_attempt(log: Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["report", str(log), "--json"])
    assert result.exit_code == 0, result.output
    attempt: dict[str, Any]
    (attempt,) = json.loads(result.stdout)["attempts"]
    return attempt


def test_a_rank_that_was_to_write_no_log_is_not_missing(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs.run([*DDTRACE_RUN, *torchrun(3), jobs.script(GROUP)], traced(log, DD_PYTORCH_LOG_RANKS="0,2-9")).ok()
    attempt = the_attempt(log)
    assert (attempt["ranks_found"], attempt["ranks_not_logged"], attempt["ranks_missing"]) == ("0, 2", "1", "")
    assert {record["log_ranks"] for record in of_type(log, "identity")} == {"0,2-9"}


STANDING = """
    import time
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    time.sleep(600)
"""


def test_of_a_span_that_a_kill_left_open_the_log_has_who_it_was_and_its_beats(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = alone(log, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_SNAPSHOT_SECONDS="0.1")
    job = jobs.start([*DDTRACE_RUN, *PYTHON, jobs.script(STANDING)], env)
    until(lambda: len(of_type(log, "beat")) >= 3, 60, "three beats, and so some twenty snapshots")
    job.kill()
    assert of_type(log, "span") == []
    known = of_type(log, "identity")[-1]["tags"]
    assert known["pytorch.incarnation"]
    assert known["device.id"]
    (rank,) = the_attempt(log)["ranks"]
    assert rank["end_reason"] is None
    assert rank["last_beat"]


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [({}, [(0, [0]), (1, [1])]), ({"CUDA_VISIBLE_DEVICES": "5"}, [(5, [0, 1])])],
    ids=["a GPU each", "one GPU for both"],
)
def test_a_host_and_uuid_have_exactly_one_device_record(
    jobs: Jobs, tmp_path: Path, visible: dict[str, str], gpus: list[tuple[int, list[int]]]
) -> None:
    log = tmp_path / "log"
    shutil.copy(UNIT / "fake_nvml.py", jobs.directory)
    jobs.script(NVML, "pynvml.py")
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(ON_GPUS)], traced(log, **visible)).ok()
    attempt = the_attempt(log)
    hosts = {record["host"] for record in of_type(log, "identity")}
    assert len(hosts) == 1
    assert {gpu["host"] for gpu in attempt["gpus"]} == hosts
    # The fake's UUIDs begin with the number of the GPU.
    assert sorted((int(gpu["uuid"][4]), sorted(gpu["ranks"])) for gpu in attempt["gpus"]) == gpus


LATE = """
    import time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for _ in range(30):
        if dist.get_rank() == 1:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(1000))  # LATE
    dist.destroy_process_group()
"""


def test_the_rank_that_comes_late_to_each_all_reduce_is_named(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(LATE)], traced(log)).ok()
    attempt = the_attempt(log)
    (world,), (waiting,) = attempt["collectives"], attempt["stragglers"]
    assert (world["group"], world["launched"], world["seen"], world["cross_node"]) == ("world", 30, 30, False)
    (reduced,) = world["operations"]
    assert (reduced["calls"], reduced["calls_least"], reduced["calls_most"]) == (60, 30, 30)
    line = next(number for number, text in enumerate(LATE.splitlines(), 1) if "LATE" in text)
    assert reduced["slowest_at"] == f"{tmp_path}/train.py:{line}"
    assert reduced["slowest_rank"] == 0

    assert waiting["late_rank"] == 1
    innocent, late = waiting["ranks"]
    assert late["late_calls"] == waiting["calls"] > 20
    assert late["made_others_wait_ms"] == innocent["waited_for_others_ms"] > 150 * waiting["calls"]
    assert innocent["made_others_wait_ms"] == late["waited_for_others_ms"] == 0

    shown = CliRunner().invoke(cli, ["report", str(log)]).output
    said = re.fullmatch(
        r"rank 1 is late: it made the others wait \d+ms, typically, in (\d+) of (\d+) sampled calls of world",
        shown.splitlines()[-1],
    )
    assert said is not None, shown
    assert said[1] == said[2] == str(waiting["calls"])


EPOCHS = """
    import time
    import torch
    import torch.distributed as dist
    from ddtrace_pytorch import event, scalar, span
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):
        def __init__(self, seconds):
            self.seconds = seconds

        def __len__(self):
            return 10

        def __getitem__(self, index):
            time.sleep(self.seconds)
            return torch.ones(4)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.save({}, f"{rank}.pt")
    torch.load(f"{rank}.pt")
    net = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    training, evaluation = Images(0.05 if rank == 1 else 0), Images(0.01)
    time.sleep(2)
    event("ready")
    for epoch in range(2):
        for batch in DataLoader(training):
            with span("forward"):
                loss = net(batch).sum()
            loss.backward()
            optimizer.step()
            scalar({"loss": loss})
        for batch in DataLoader(evaluation):
            net.module(batch)
        event("evaluated")
        torch.save(net.state_dict(), f"{rank}.pt")
    dist.destroy_process_group()
"""


def test_a_short_job_names_the_slow_loader_and_tells_start_up_and_evaluation_apart(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(EPOCHS)], traced(log)).ok()
    for rank in (0, 1):
        records = {kind: [one for one in of_type(log, kind) if f"rank-{rank:05d}" in one["_file"]]
                   for kind in ("step", "event", "span")}  # fmt: skip
        steps = {one["step"]: one for one in records["step"]}
        assert list(steps) == list(range(1, 21))
        assert [number for number, one in steps.items() if "first" in one] == [1]
        ready, *evaluated = records["event"]
        assert ready["ts"] <= steps[1]["start"], "to start up is no part of the first step"
        assert [one["step"] for one in evaluated] == [10, 20]
        assert [number for number, one in steps.items() if "checkpoint" in one.get("tags", ())] == [10, 20]
        assert steps[10]["metrics"]["data_ns"] >= 10 * 10_000_000
        loads = [one for one in records["span"] if one["tags"].get("checkpoint.op") == "torch.load"]
        assert [one["metrics"].get("step") for one in loads] == [None]

    attempt = the_attempt(log)
    slow = attempt["steps"]["slow"][0]
    assert (slow["rank"], slow["part"]) == (1, "data")
    assert slow["ms"] == pytest.approx(sum(slow["parts"].values()))
    assert slow["part_ms"] == slow["parts"]["data"]
    recorded = attempt["recorded"]
    assert [(one["name"], one["count"]) for one in recorded["spans"]] == [("forward", 40)]
    assert [(one["name"], one["count"]) for one in recorded["scalars"]] == [("loss", 40)]
    assert recorded["events"] == [{"name": "evaluated", "count": 4}, {"name": "ready", "count": 2}]
    assert [(one["op"], one["count"]) for one in recorded["checkpoints"]] == [("torch.save", 6), ("torch.load", 2)]
    shown = CliRunner().invoke(cli, ["report", str(log)]).output
    slow_loader = r"rank 1 takes \S+ more of each step than the others: data loading \(\+\S+\)"
    assert re.search(slow_loader, shown), shown
    together = attempt["steps"]["all"]
    assert together["steps"] == 20
    assert together["share_data"] > 0.2

    written = CliRunner().invoke(cli, ["report", str(log), "--html", str(tmp_path / "page.html")])
    assert written.exit_code == 0, written.output
    page = (tmp_path / "page.html").read_text()
    assert "All ranks ended well (ranks 0-1 destroyed)." in page
    assert re.search(slow_loader, page)
    drawn = json.loads(page.partition('<script type="application/json" id="pictures">')[2].partition("</script>")[0])
    heat, matrix = drawn["heat-1"], drawn["matrix-1"]
    assert heat["rows"] == matrix["blocks"] == [[0], [1]]
    assert heat["columns"] > 20
    # DistributedDataParallel's own all_reduce goes both ways, as much.
    levels = base64.b64decode(matrix["levels"])
    assert levels[0] == levels[3] == 0
    assert levels[1] == levels[2] > 0
    assert '<figcaption>loss</figcaption>' in page


def test_a_job_with_collectives_off_says_so_and_one_with_all_lists_the_slowest(jobs: Jobs, tmp_path: Path) -> None:
    off, every = tmp_path / "off", tmp_path / "all"
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(GROUP)], traced(off, DD_PYTORCH_COLLECTIVES="off")).ok()
    assert "DD_PYTORCH_COLLECTIVES was off" in CliRunner().invoke(cli, ["report", str(off)]).output
    jobs.run([*DDTRACE_RUN, *torchrun(2), jobs.script(GROUP)], traced(every, DD_PYTORCH_COLLECTIVES="all")).ok()
    attempt = the_attempt(every)
    assert (attempt["collectives_setting"], attempt["single_calls"]) == ("all", 2)
    assert {(call["rank"], call["operation"], call["key"]) for call in attempt["slowest_calls"]} == {
        (0, "barrier", 1), (1, "barrier", 1)
    }  # fmt: skip
    assert all(call["at"].startswith(f"{tmp_path}/train.py:") for call in attempt["slowest_calls"])
