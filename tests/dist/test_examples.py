"""The examples that the documents speak of: each computes the same without us, and the run log has what it did."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from harness.job import BIN, DDTRACE_RUN, Jobs, environment, torchrun
from harness.log import Record, of_type, rank_spans, records

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(jobs: Jobs, example: str) -> Path:
    """With us and without, at the same time; gives the run log."""
    log = jobs.directory / "log"
    settings = {"DD_PATCH_MODULES": "pytorch:true", "DD_PYTORCH_EXPORT": "local", "DD_PYTORCH_LOG_DIR": str(log)}
    command = [*torchrun(2), str(EXAMPLES / example)]
    plain = jobs.start(command, environment(None))
    ours = jobs.start([*DDTRACE_RUN, *command], environment(None, **settings)).wait().ok()
    lines = ours.stdout.splitlines()
    assert plain.wait().ok().stdout.splitlines() == lines
    losses = [float(found[1]) for line in lines if (found := re.search(r" loss ([\d.e-]+)", line))]
    assert len(losses) == len(lines) > 2
    assert losses[-1] < losses[0]
    return log


def trained(log: Path, framework: str, parallelism: str, steps: int) -> list[Record]:
    """The two ranks' spans, which say so."""
    spans = [span for span in rank_spans(log) if span["tags"]["pytorch.source"] == "trainer"]
    assert [span["metrics"]["rank"] for span in spans] == [0, 1]
    for span in spans:
        tags = span["tags"]
        assert (tags["framework"], tags["pytorch.parallelism"]) == (framework, parallelism)
        assert (span["metrics"]["pytorch.steps"], tags["pytorch.end_reason"], span["error"]) == (steps, "destroyed", 0)
    return spans


def steps(log: Path) -> list[int]:
    """Of one rank, where both have the same."""
    found = Counter(one["step"] for one in of_type(log, "step"))
    assert {*found.values()} == {2}
    return sorted(found)


def counted(log: Path) -> dict[str, float]:
    """How many calls of each operation there were on the default group, of both ranks."""
    counts: Counter[str] = Counter()
    for total in of_type(log, "summary"):
        if total["name"] == "pytorch.collectives" and total["tags"]["collective.group"] == "world":
            counts[total["resource"]] += total["metrics"]["collective.count"]
    return counts


def test_fsdp2(jobs: Jobs) -> None:
    log = run(jobs, "fsdp2.py")
    for span in trained(log, "fsdp", "fsdp", 20):
        assert span["metrics"]["pytorch.mesh.shard"] == span["metrics"]["rank"]
        assert span["metrics"]["pytorch.mesh.shard.size"] == 2
    assert steps(log) == [*range(1, 21)]
    spans = [span for span in of_type(log, "span") if span["name"] == "pytorch.checkpoint"]
    saved = Counter((span["tags"]["checkpoint.op"], span["resource"]) for span in spans)
    assert saved == {("dcp.save", "fsdp2-checkpoint"): 2, ("dcp.load", "fsdp2-checkpoint"): 2}
    # Four blocks, each of which sends its gradients once a step.
    assert counted(log)["reduce_scatter_tensor"] == 2 * 20 * 4
    assert counted(log)["unseen"] == 0


def test_tensor_parallel(jobs: Jobs) -> None:
    log = run(jobs, "tensor_parallel.py")
    for span in trained(log, "tp", "tp", 20):
        assert span["metrics"]["pytorch.mesh.tp"] == span["metrics"]["rank"]
        assert span["metrics"]["pytorch.mesh.tp.size"] == 2
    assert steps(log) == [*range(1, 21)]
    # Of two blocks, once forward and once backward. DTensor passes by no function of torch.distributed: before torch 2.14
    # it is told that there were so many.
    counts = counted(log)
    assert counts["all_reduce"] + counts["unseen"] == 2 * 20 * 2 * 2


def test_user_records(jobs: Jobs) -> None:
    log = run(jobs, "user_records.py")
    trained(log, "ddp", "ddp", 24)
    assert steps(log) == [*range(1000, 1024)]
    mine = [one for one in records(log) if one["type"] in ("user_span", "scalar", "event")]
    trainers = [one for one in mine if "step" in one]
    assert Counter((one["type"], one.get("name")) for one in trainers) == {
        ("user_span", "forward and backward"): 48,
        ("user_span", "evaluate"): 6,
        ("event", "evaluated"): 6,
        ("scalar", None): 48,
    }
    assert all(one["relative_step"] == one["step"] - 1000 for one in trainers)
    evaluated = {one["step"] for one in trainers if "eval" in one.get("step_tags", ())}
    assert evaluated == {1007, 1015, 1023}
    sources = {span["_file"]: span["tags"]["pytorch.source"] for span in rank_spans(log)}
    rollout = [one for one in mine if sources[one["_file"]] == "rollout"]
    assert [(one["type"], one.get("name"), one.get("metrics")) for one in rollout] == [
        ("scalar", None, {"reward": 0.5}),
        ("user_span", "rollout", None),
    ]
    assert len(mine) == len(trainers) + len(rollout)
    # Of the two, the training is what the report is about.
    shown = jobs.run([str(BIN / "ddtrace-pytorch"), "report", str(log)], environment(None)).ok().stdout
    assert "Ranks        0-1 of 2\n" in shown
    assert re.search(r"^evaluate +6 ", shown, re.MULTILINE)
