"""Each setting changes what can be seen: by a look at it here, or by a test that names it."""

from __future__ import annotations

import ast
import gzip
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.exporter import KeepingExporter
from harness.profiled import Job

from ddtrace_pytorch import agent, opening
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.collectives.group_lives import GroupLives
from ddtrace_pytorch.collectives.markers import channels
from ddtrace_pytorch.collectives.observer import Collectives
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.identity import job as jobs
from ddtrace_pytorch.kernels import windows
from ddtrace_pytorch.ledger import Cell, Group, How, Note
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.settings import TABLE, load
from ddtrace_pytorch.training.observer import Training
from ddtrace_pytorch.training.progress import Progress, Step
from ddtrace_pytorch.training.steps import Steps

TESTS = Path(__file__).parents[1]
Environ = Mapping[str, str]


@dataclass(frozen=True)
class Bench:
    """A place of its own for each look, where the temporary directory is, too."""

    directory: Path
    patch: pytest.MonkeyPatch

    def filled(self, environ: Environ) -> dict[str, str]:
        """With the directory where a value speaks of it."""
        return {name: value.format(self.directory) for name, value in environ.items()}


# ---- what can be seen with some settings ----


def id_of_job(bench: Bench, environ: Environ) -> object:
    return jobs.identify({"SLURM_JOB_ID": "7", **environ}).id


def is_on(bench: Bench, environ: Environ) -> object:
    for name, value in environ.items():
        bench.patch.setenv(name, value)
    return opening.wanted_settings() is not None


def run_log(bench: Bench, environ: Environ) -> object:
    """Which files there are of 3 MB that rank 0 wrote, without an Agent, and why something is not in them."""
    bench.patch.setattr(agent, "answers", lambda: False)
    exporter = Exporter(
        load(bench.filled(environ)), 0, Clock(), identity=lambda: {"rank": 0}, run=lambda: ("job", "incarnation")
    )
    exporter.start()
    noise = random.Random(7)
    for _ in range(30):
        for _ in range(10):
            exporter.put({"type": "beat", "ts": 1, "noise": noise.randbytes(5_000).hex()})
        assert exporter.drain(30)
    assert exporter.close(30)
    files = sorted(bench.directory.rglob("rank-*"))
    lines = [line for file in files for line in _text(file).splitlines()]
    drops = {record["reason"] for record in map(json.loads, lines) if record["type"] == "drop"}
    return {file.parent.relative_to(bench.directory) for file in files}, drops


def _text(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode()


def calls_told(bench: Bench, environ: Environ) -> object:
    """The single calls that are told of, of three slow ones."""
    exporter: Any = KeepingExporter()
    span = RankSpan(service="pytorch", rank=0, start=1, facts={})
    collectives = Collectives(torch, load(environ), Clock(), span, exporter, GroupLives(), wraps=False)
    cell = Cell(collectives.ledger, "all_reduce", Group("0", "world", "gloo", (0, 1), 0), How.WAITED, True)
    for ms in (1_100, 1_900, 1_300):
        collectives.ledger.remember(Note(cell, 0, ms * 1_000_000, 8, 1, None, 0))
    collectives.beat()
    return [one.metrics["collective.time_ms"] for one in exporter.spans]


def steps_with_spans(bench: Bench, environ: Environ) -> object:
    exporter: Any = KeepingExporter()
    span, steps = RankSpan(service="pytorch", rank=0, start=1, facts={}), Steps(Progress(), int, int)
    training = Training(load(environ), Clock(), span, exporter, steps, None)
    for number in range(1, 6):
        training.ended(Step(number, number), (0, 0, 0, 0, 0), (1_000, 0, 0, 0, 0))
    training.farewell(interrupted=False)
    return [one.resource for one in exporter.spans if one.name == "pytorch.step"]


def marks(bench: Bench, environ: Environ) -> object:
    return channels(load(environ))


def profiled(bench: Bench, environ: Environ) -> object:
    """The windows of a training of ten steps: their steps, where their traces are, and what is in them."""
    job = Job(bench.directory, **{"DD_PYTORCH_PROFILE_DIR": "", **bench.filled(environ)})
    try:
        job.train(10)
        told = job.told()
    finally:
        job.end()
    return [(one["step"], one["steps"], one["state"], one.get("why"), _trace(bench, one.get("path"))) for one in told]


def _trace(bench: Bench, path: str | None) -> object:
    """Where it is, and what kinds of things are in it, with shapes or without."""
    if path is None:
        return None
    events = json.loads(_text(Path(path)))["traceEvents"]
    shapes = any("Input Dims" in one.get("args", ()) for one in events)
    return path.removeprefix(str(bench.directory)), {one.get("cat") for one in events}, shapes


def warmed_up_at(bench: Bench, environ: Environ) -> object:
    """The step in which the profiler is made ready for a window."""
    made: list[int | None] = []
    prepare = windows.Window.prepare
    job = Job(bench.directory, **environ)

    def noted(self: windows.Window) -> None:
        made.append(job.steps.progress.step.number)
        prepare(self)

    bench.patch.setattr(windows.Window, "prepare", noted)
    try:
        job.train(10)
    finally:
        job.end()
    return made


def asked_of_the_profiler(bench: Bench, environ: Environ) -> object:
    """What a window asks the profiler for where there is a GPU; here is none, and so no window comes of it."""
    asked: list[windows.Options] = []

    def window(torch: Any, options: windows.Options) -> None:
        asked.append(options)
        raise RuntimeError("there is no GPU")

    bench.patch.setattr(windows, "gpu_is_there", lambda torch: True)
    bench.patch.setattr(windows, "in_the_way", lambda torch, gpu, environ: None)
    bench.patch.setattr(windows, "warn_first", lambda message, about=None: None)
    bench.patch.setattr(windows, "Window", window)
    profiled(bench, environ)
    return [(options.gpu, options.cpu) for options in asked]


# ---- the proofs ----


@dataclass(frozen=True)
class Seen:
    """With the setting at `value`, and what is `beside` it in any case, `look` sees something else than without it."""

    look: Callable[[Bench, Environ], object]
    value: str
    beside: Environ = field(default_factory=dict)


@dataclass(frozen=True)
class Elsewhere:
    """A `test`, most often of whole processes, is about it."""

    test: str


EVERY_4 = {"DD_PYTORCH_PROFILE_EVERY": "4"}
THEIRS = {"TORCH_DISTRIBUTED_TRACING": "ALL"}

PROOFS: dict[str, Seen | Elsewhere] = {
    "DD_PYTORCH_JOB_ID": Seen(id_of_job, "night run"),
    "DD_PYTORCH_SERVICE": Elsewhere("dist/test_native_parent.py::test_its_parent_is_the_piece_that_is_open"),
    "DD_SERVICE": Elsewhere("dist/test_lifecycle.py::test_every_tag_of_the_built_in_integration_is_there"),
    "DD_TRACE_ENABLED": Seen(is_on, "false"),
    "DD_PYTORCH_EXPORT": Seen(run_log, "agent"),
    "DD_PYTORCH_ROTATION_SECONDS": Elsewhere(
        "dist/test_rotation.py::test_pieces_are_contiguous_and_every_childs_parent_arrives"
    ),
    "DD_PYTORCH_SNAPSHOT_SECONDS": Elsewhere(
        "dist/test_rotation.py::test_an_open_span_is_sent_as_a_snapshot_and_survives_sigkill"
    ),
    "DD_PYTORCH_COLLECTIVES": Seen(calls_told, "all"),
    "DD_PYTORCH_SUMMARY_SECONDS": Elsewhere("dist/test_collectives.py::test_totals_are_told_while_the_job_runs"),
    "DD_PYTORCH_SLOW_MS": Elsewhere("dist/test_collectives.py::test_totals_and_slow_calls_of_each_rank"),
    "DD_PYTORCH_INSTRUMENT": Elsewhere("dist/test_instruments.py::test_functions_alone_count_what_goes_through_them"),
    "DD_PYTORCH_STEP_SAMPLE": Seen(steps_with_spans, "2"),
    "DD_TRAINING_STEP_PROFILING": Elsewhere("dist/test_steps.py::test_the_native_tracer_is_told_of_each_step"),
    "DD_PYTORCH_STALL_SECONDS": Elsewhere(
        "dist/test_whereabouts.py::test_of_what_took_too_long_it_is_told_how_it_ended"
    ),
    "DD_PYTORCH_NVTX": Seen(marks, "true"),
    "DD_PYTORCH_PRINT": Seen(marks, "crossnode"),
    "TORCH_DISTRIBUTED_TRACING": Seen(marks, "ALL"),
    "TORCH_DISTRIBUTED_TRACING_PRINT": Seen(marks, "true", THEIRS),
    "GPU_SERIAL": Elsewhere("dist/test_markers.py::test_marks_on_two_ranks"),
    "VM_ID": Elsewhere("dist/test_markers.py::test_marks_on_two_ranks"),
    "DD_PYTORCH_LOG_DIR": Seen(run_log, "{}/elsewhere"),
    "DD_PYTORCH_LOG_MAX_MB": Seen(run_log, "1"),
    "DD_PYTORCH_LOG_RANKS": Seen(run_log, "1-7"),
    "DD_PYTORCH_LOG_HANDLERS": Elsewhere("dist/test_log_handlers.py::test_a_handler_gets_every_record_of_the_run_log"),
    "DD_PYTORCH_LOG_METADATA": Elsewhere(
        "dist/test_records.py::test_the_first_record_of_a_process_by_itself_opens_a_session"
    ),
    "DD_PYTORCH_RECORDS": Elsewhere("dist/test_records.py::test_records_can_be_switched_off"),
    "DD_PYTORCH_SOURCE": Elsewhere("dist/test_records.py::test_a_process_that_makes_no_group_tells_its_records_too"),
    "DD_PYTORCH_KERNEL_EVERY": Elsewhere("unit/test_sampler.py::test_one_step_in_so_many_is_counted_kernel_by_kernel"),
    "DD_PYTORCH_KERNEL_BUDGET": Elsewhere("unit/test_sampler.py::test_what_a_step_costs_decides_how_often"),
    "DD_PYTORCH_PROFILE_EVERY": Seen(profiled, "4"),
    "DD_PYTORCH_PROFILE_WARMUP": Seen(warmed_up_at, "0", EVERY_4),
    "DD_PYTORCH_PROFILE_ACTIVE": Seen(profiled, "1", EVERY_4),
    "DD_PYTORCH_PROFILE_SLOW": Elsewhere(
        "unit/test_windows.py::test_the_first_very_slow_step_that_is_not_profiled_has_a_window_soon"
    ),
    "DD_PYTORCH_PROFILE_RANKS": Seen(profiled, "1-7", EVERY_4),
    "DD_PYTORCH_PROFILE_MAX_MB": Seen(profiled, "0.001", EVERY_4),
    "DD_PYTORCH_PROFILE_WITH": Elsewhere(
        "unit/test_own_windows.py::test_it_has_what_the_gpu_ran_in_its_steps_and_no_more"
    ),
    "DD_PYTORCH_PROFILE_CPU": Seen(asked_of_the_profiler, "true", EVERY_4),
    "DD_PYTORCH_PROFILE_SHAPES": Seen(profiled, "true", EVERY_4),
    "DD_PYTORCH_PROFILE_STACKS": Seen(profiled, "true", EVERY_4),
    "DD_PYTORCH_PROFILE_MEMORY": Seen(profiled, "true", EVERY_4),
    "DD_PYTORCH_PROFILE_DIR": Seen(profiled, "{}/elsewhere", EVERY_4),
    "DD_PYTORCH_STATE_DIR": Elsewhere(
        "faults/test_last_words.py::test_the_next_attempt_tells_of_the_one_before_by_itself_once_that_is_dead"
    ),
}


def test_there_is_a_proof_of_each_setting() -> None:
    assert list(PROOFS) == [row.variable for row in TABLE]


@pytest.mark.parametrize("variable", [name for name, proof in PROOFS.items() if isinstance(proof, Seen)])
def test_what_is_seen_is_something_else_with_it(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = PROOFS[variable]
    assert isinstance(proof, Seen)
    default = next(row.default for row in TABLE if row.variable == variable)

    def seen(name: str, environ: Environ) -> object:
        directory = tmp_path / name
        directory.mkdir()
        with monkeypatch.context() as patch:
            patch.delenv(variable, raising=False)
            patch.setattr(tempfile, "tempdir", str(directory))
            return proof.look(Bench(directory, patch), {**proof.beside, **environ})

    without = seen("without", {})
    assert seen("default", {variable: default}) == without, "what is seen differs anyhow"
    assert seen("with", {variable: proof.value}) != without


@pytest.mark.parametrize("variable", [name for name, proof in PROOFS.items() if isinstance(proof, Elsewhere)])
def test_the_test_that_is_about_it_names_it(variable: str) -> None:
    proof = PROOFS[variable]
    assert isinstance(proof, Elsewhere)
    path, _, name = proof.test.partition("::")
    texts = _used_by(name, ast.parse((TESTS / path).read_text(encoding="utf-8")))
    assert any(variable in text for text in texts), f"{proof.test} doesn't speak of {variable}"


def _used_by(test: str, module: ast.Module) -> set[str]:
    """Texts and names of arguments in the test of that name, and in what it uses of its module, fixtures too."""
    defined: dict[str, ast.AST] = {}
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    assert test in defined, f"there is no {test}"
    texts: set[str] = set()
    wanted, looked_at = [test], set()
    while wanted:
        name = wanted.pop()
        if name in looked_at or name not in defined:
            continue
        looked_at.add(name)
        for node in ast.walk(defined[name]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                texts.add(node.arg)
            elif isinstance(node, ast.Name):
                wanted.append(node.id)
            elif isinstance(node, ast.arg):
                wanted.append(node.arg)
    return texts
