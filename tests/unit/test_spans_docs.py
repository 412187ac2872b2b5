"""docs/spans.md has each tag and metric that a span of ours can have, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.documented import DOCUMENT, TAG, documented, entry, undocumented
from harness.exporter import KeepingExporter
from torch.utils.data import DataLoader

import ddtrace_pytorch
from ddtrace_pytorch import opening, rank_span
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives import telling as collectives
from ddtrace_pytorch.collectives.coverage import Completions, Coverage
from ddtrace_pytorch.collectives.outlet import Outlet
from ddtrace_pytorch.histogram import Times
from ddtrace_pytorch.identity import describe, runtime
from ddtrace_pytorch.identity import job as jobs
from ddtrace_pytorch.identity.device import Device
from ddtrace_pytorch.identity.introduction import Introduced
from ddtrace_pytorch.identity.mesh import Place
from ddtrace_pytorch.kernels import sampled, window_telling
from ddtrace_pytorch.kernels.aggregates import Event, aggregate
from ddtrace_pytorch.kernels.schedule import Plan
from ddtrace_pytorch.ledger import Cell, Group, How, Ledger, Note
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.records import telling as records
from ddtrace_pytorch.records.recorder import SPAN, Failure, Row
from ddtrace_pytorch.records.totals import Said, SpanTotals
from ddtrace_pytorch.spans import End, Fact, split
from ddtrace_pytorch.stalls import telling as stalls
from ddtrace_pytorch.stalls.mismatch import Detail
from ddtrace_pytorch.stalls.roll import RankState
from ddtrace_pytorch.stalls.verdict import Culprit, Kind, Verdict, Where
from ddtrace_pytorch.training import checkpoint_spans
from ddtrace_pytorch.training import telling as steps
from ddtrace_pytorch.training.checkpoint_spans import Checkpoint, Checkpoints
from ddtrace_pytorch.training.checkpoint_target import Size
from ddtrace_pytorch.training.dataloader import Loaders
from ddtrace_pytorch.training.frameworks import Makeup, Use
from ddtrace_pytorch.training.progress import Step

PACKAGE = Path(ddtrace_pytorch.__file__).parent
DOCUMENTED = documented()
Facts = dict[str, Fact]


# ---- what each span can have, by the very functions that make it ----


def everything_of_launchers() -> dict[str, str]:
    """An environment in which each row of the table finds all that it looks for."""
    environ: dict[str, str] = {}
    for row in jobs.LAUNCHERS:
        counted = [row.attempt.variable] if row.attempt else []
        environ |= dict.fromkeys([*(one.variable for one in row.ids), *counted, *row.signs], "7")
        environ |= {variable: "7" for variable, _ in (*row.parts, *row.facts)}
        environ |= {one.variable: f'{{"{one.key}": "7"}}' for one in row.ids if one.key}
        if row.given:
            environ[row.given[0]] = row.given[1] or "7"
    return environ | {"_DD_RAY_RUN_METADATA": '{"team": "vision"}'}


def of_rank() -> Facts:
    environ = everything_of_launchers()
    environ |= {variables[0]: "7" for _, variables, _ in runtime.ENVIRONMENT_FACTS}
    member = describe.Member(rank=1, world_size=2, backend="gloo")
    facts = describe.opening_facts(member, jobs.identify(environ), "host", "in_place", environ, torch)
    facts |= dict.fromkeys((tag for tag, _ in runtime.TORCH_FACTS), "some builds have it")
    with_cudnn = SimpleNamespace(_C=SimpleNamespace(_cudnn=SimpleNamespace(getVersionInt=lambda: 91002)))
    facts |= runtime.cudnn_version(with_cudnn)
    facts |= describe.purpose_facts("trainer", [("team", "vision")])
    facts |= describe.introduced_facts(Introduced("job", "generated", "incarnation"))
    facts |= opening.rendezvous_facts({"init_method": "tcp://host:1234"})
    facts |= Device("cuda", 0, "GPU-1", "GPU-0", "H100", "9.0", 132, 80 << 30, "580.1").tags("host")
    makeup, loaders = Makeup(), Loaders()
    makeup.add(Use("ddp", ("ddp",), "lightning", (Place("dp", 0, 2, 2),)))
    loaders.iterates(DataLoader([1], num_workers=2))
    span = RankSpan(service="pytorch", rank=1, start=1, facts=facts | makeup.facts() | loaders.facts)
    span.rotate(2)
    ends = [span.snapshot(3), span.finish(4, End("exception", ValueError("no")))]
    return {name: value for one in ends for name, value in {**one.tags, **one.metrics}.items()}


def of_collectives() -> tuple[Facts, Facts]:
    group = Group("0", "world", "gloo", (0, 1), 0)
    group.crosses_nodes = True
    ledger = Ledger(SimpleNamespace())
    summary: Facts = Coverage(10, 5).facts() | Coverage(None, 5).facts() | Completions(1, 1, 1).facts()
    told = collectives.Totals(1, 8, 1_000, 1, 1, 1, 1_000, [0] * 10 + [1] + [0] * 54)
    for how in How:
        summary |= collectives.summary_facts(Cell(ledger, "all_reduce", group, how, True), told, 9, "train.py:1")
    exporter: Any = KeepingExporter()
    waited = Cell(ledger, "all_reduce", group, How.WAITED, True)
    note = Note(waited, 0, 1_000, 8, 1, of_collectives.__code__, 0, 3)
    Outlet(Clock(), RankSpan(service="pytorch", rank=0, start=1, facts={}), exporter).call(note, slow_calls=2)
    [call] = exporter.spans
    return summary, {**call.tags, **call.metrics}


def of_steps() -> tuple[Facts, Facts]:
    times, took, memory, said = steps.Spent(10, 1, 1, 1, 1), Times(), steps.Memory(1, 2), Said()
    took.add(10)
    said.scalar("loss", 1.0)
    said.event("new best")
    step = Step(3, 2)
    step.tags["gc"] = None
    one = steps.step_facts(step, times, memory, unfinished=True, first=True) | said.facts(summary=False)
    return steps.summary_facts(took, times, 9, memory, said.facts(summary=True)), one


def of_checkpoint() -> Facts:
    told: list[Facts] = []
    spans = Checkpoints(lambda name, resource, began, took, facts, error, under: told.append(facts))
    failure = End("exception", ValueError("no")).tags()
    del failure["pytorch.end_reason"]
    under = rank_span.Piece(0, 1, 2, 0)
    spans.ended(
        Checkpoint("dcp.save", "save", "at", "at", 0, 10**10, under, step=3, size=Size(1, "rank"), failure=failure)
    )
    return told[0]


def of_profile() -> Facts:
    events = [Event("nccl", 0, 5, 1, True), Event("gemm", 3, 8, 2, True)]
    told = window_telling.Told("asked", "complete", Plan(1, 2), 0, 9, "gpu", "why", "path", 7, "snapshot")
    return replace(told, results=aggregate(events, 0, 10)).facts()


def of_kernels() -> Facts:
    totals = sampled.Totals()
    events = [Event("nccl", 0, 5, 1, True), Event("gemm", 7, 8, 2, True)]
    totals.add(sampled.Run(1, 1, 0, 9, {"gemm": sampled.Sum(1, 5, 5)}, 0, False, sampled.detail(events)))
    return totals.facts(50, 0.0)


def of_stall() -> Facts:
    where = Where("0", "world", "all_reduce", 5, (0, 1))
    state = RankState(1, "host", doing="data", step=3, frames=("/job/train.py:8 load",))
    culprit = Culprit(1, Kind.MISMATCH, where, "host", state, Detail.SHAPE, error="ValueError: no")
    return stalls.facts(Verdict(where, 10**9, (culprit,), (0,), store_host="host"))


def of_own_spans() -> tuple[Facts, Facts]:
    step = Step(3, 2)
    failed = Failure("ValueError", "no", (("train.py", 1, "main"),))
    row = Row(SPAN, 0, 9, "work", {"env": 1}, step, ("eval",), "train.py:1:main", 0, "MainThread", None, None,
              failed=failed)  # fmt: skip
    totals = SpanTotals(not_sent=1)
    totals.add(5, True, "train.py:1:main")
    return records.span_facts(row, "train.py:1:main"), totals.take()


# What is put on a span where it is made: modules in which to look for it, and how such names begin.
WHERE_MADE = {
    "pytorch.rank": (("session.py", "lookout.py", "kernels/windows.py"), "pytorch."),
    "pytorch.collectives": (("collectives/summaries.py",), "collective."),
    "pytorch.checkpoint": (("training/checkpoint.py", "training/checkpoint_running.py"), "checkpoint."),
}


def put_in(modules: tuple[str, ...], prefix: str) -> Iterator[str]:
    """Names that are keys in the source of `modules`; a part that is known at run time only reads ``<name>``."""
    for module in modules:
        for node in ast.walk(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))):
            keys: list[Any] = []
            if isinstance(node, ast.Dict):
                keys = node.keys
            elif isinstance(node, ast.DictComp):
                keys = [node.key]
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                keys = [node.slice]
            yield from (name for key in keys if (name := _spelled(key)).startswith(prefix))


def _spelled(key: ast.AST | None) -> str:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    if isinstance(key, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "<name>" for part in key.values)
    return ""


def produced() -> dict[str, Facts]:
    summary, call = of_collectives()
    totals, step = of_steps()
    mine, mine_in_all = of_own_spans()
    return {
        rank_span.NAME: of_rank(),
        collectives.SUMMARY: summary,
        collectives.CALL: call,
        steps.SUMMARY: totals,
        steps.STEP: step,
        checkpoint_spans.NAME: of_checkpoint(),
        window_telling.NAME: of_profile(),
        sampled.NAME: of_kernels(),
        window_telling.KERNEL: {},
        stalls.STALL: of_stall(),
        records.NAME: mine,
        records.SUMMARY: mine_in_all,
    }


PRODUCED = produced()


def test_each_span_has_a_section_and_a_row_and_nothing_else_has() -> None:
    spelled = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                spelled.update(re.findall(r"^pytorch\.[a-z]+$", str(node.value.value)))
    assert spelled == set(PRODUCED) == set(DOCUMENTED) - {""}
    rows = re.findall(r"^\| \[`([a-z.]+)`\]\(#([a-z]+)\) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, _ in rows} == spelled
    assert all(name.replace(".", "") == anchor for name, anchor in rows)


@pytest.mark.parametrize("span", PRODUCED)
def test_what_a_span_can_have_is_documented_as_what_it_is(span: str) -> None:
    tags, metrics = split(PRODUCED[span])
    assert undocumented({**DOCUMENTED[span], **DOCUMENTED[""]}, tags, metrics) == []


@pytest.mark.parametrize("span", PRODUCED)
def test_what_is_documented_can_be_had(span: str) -> None:
    names = DOCUMENTED[span]
    found = {entry(names, name) for name in PRODUCED[span]}
    modules, prefix = WHERE_MADE.get(span, ((), ""))
    made = set(put_in(modules, prefix))
    made_by_pattern = [name for name in names if entry(made, name) is not None]
    assert set(names) - found - set(made_by_pattern) == set()


# Begin like a tag, and are none.
OTHERS = {"pytorch.patch"}
NAMES = {name for section in DOCUMENTED.values() for name in section} | DOCUMENTED.keys() | OTHERS


def is_known(spelled: str, names: Iterable[str]) -> bool:
    """Whether a name as it is in the source is one of `names`, may be one, or is the beginning of one."""
    if spelled.endswith("."):
        return any(name.startswith(spelled) for name in names)
    return entry(names, spelled) is not None or any(entry([spelled], name) for name in names)


@pytest.mark.parametrize("span", WHERE_MADE)
def test_what_is_put_on_a_span_where_it_is_made_is_documented(span: str) -> None:
    made = set(put_in(*WHERE_MADE[span]))
    assert made
    assert [name for name in made if not is_known(name, DOCUMENTED[span])] == []


def test_no_name_is_spelled_anywhere_that_is_not_documented() -> None:
    begin = "pytorch|collective|step|checkpoint|profile|kernels|stall|span|scalar|event|device|nccl|training_job"
    unknown = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            name = _spelled(node) if id(node) not in parts else ""
            if re.fullmatch(rf"({begin})\.[a-z_0-9.<>]+", name) and not is_known(name, NAMES):
                unknown.add(f"{name} in {path.name}")
    assert unknown == set()


def test_the_launchers_have_their_own_rows() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition("### Ids of launchers")[2].partition("\n## ")[0]
    rows = {words[0]: words[1:] for words in (re.findall(r"`([^`]+)`|– ", line) for line in text.splitlines()) if words}
    wanted: dict[str, list[str]] = {}
    for row in jobs.LAUNCHERS:
        ids = [one.tag for one in row.ids] + [tag for _, tag in row.parts]
        more = ([row.attempt.tag] if row.attempt else []) + [tag for _, tag in row.facts]
        told = wanted.setdefault(row.word or "", [])
        told += ids + more
    wanted["ray"].append("ray.metadata.<key>")
    assert {word: sorted(tags) for word, tags in rows.items()} == {
        word: sorted(set(tags)) for word, tags in wanted.items()
    }
    assert all(TAG in DOCUMENTED["pytorch.rank"][name] for tags in rows.values() for name in tags)
