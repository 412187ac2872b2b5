"""`ddtrace-pytorch doctor`: what it says of facts, and what it finds out when really run."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.agent import Agent
from harness.facts import ANSWERS, facts
from harness.job import DDTRACE_RUN, environment
from harness.kernel_sampler import build_sampler
from rich.console import Console

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli import doctor, probes
from ddtrace_pytorch.cli.command_line import look_at
from ddtrace_pytorch.cli.doctor import BAD, GOOD, NOTE, Check, Facts, examine, todo
from ddtrace_pytorch.kernels import sampler_library
from ddtrace_pytorch.plain_numbers import Part

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _where_the_scripts_are(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("scripts")
    for name in ("train.py", "x.py", "my train.py"):
        (folder / name).touch()
    monkeypatch.chdir(folder)


def about(topic: str, facts: Facts) -> list[Check]:
    return [check for check in examine(facts) if check.topic == topic]


def only_fault(facts: Facts) -> Check:
    (fault,) = [check for check in examine(facts) if check.state == BAD]
    return fault


def test_nothing_is_to_do_where_all_is_well() -> None:
    assert todo(examine(facts())) == []


def test_every_fault_comes_with_what_to_do() -> None:
    broken = {name: {"error": "it fell over"} for name in ANSWERS}
    worst = replace(
        facts({"DD_PYTORCH_EXPORT": "noone"}, **broken),
        packages=dict.fromkeys(doctor.NEEDED),
        pth=None,
        entry_point=False,
    )
    faults = [check for check in examine(worst) if check.state == BAD]
    assert len(faults) >= 6
    assert all(check.todo for check in faults)
    assert not any(check.todo for check in examine(worst) if check.state != BAD)


def test_the_declared_needs_are_those_of_the_wheel() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    for name, wanted in doctor.NEEDED.items():
        assert f'"{name}{wanted}"' in pyproject


@pytest.mark.parametrize(
    ("name", "version", "fine"),
    [
        ("ddtrace", "4.14.0", True),
        ("ddtrace", "5.0.0rc1", True),
        ("ddtrace", "4.13.9", False),
        ("ddtrace", None, False),
        ("wrapt", "3.0.0", False),
        ("nvidia-ml-py", None, False),
    ],
)
def test_a_package_out_of_range_is_a_fault(name: str, version: str | None, fine: bool) -> None:
    found = facts()
    found = replace(found, packages=found.packages | {name: version})
    assert (todo(examine(found)) == []) is fine
    if not fine:
        assert only_fault(found).todo == f"pip install '{name}{doctor.NEEDED[name]}'"


@pytest.mark.parametrize(
    ("version", "fine"),
    [("2.0.0", True), ("2.9.0a0+145a3a7bda.nv25.10", True), ("1.13.1", False), ("3.0.0", False), ("mine", False)],
)
def test_torch_must_be_in_the_supported_range(version: str, fine: bool) -> None:
    assert (todo(examine(facts(torch={"version": version}))) == []) is fine


def test_the_build_of_torch_is_told() -> None:
    def build(**torch: Any) -> str:
        return " ".join(check.text for check in about("Versions", facts(torch=torch)))

    assert "torch 2.13.0 (CUDA 13.0)" in build()
    assert "torch 2.13.0 (ROCm 7.0)" in build(cuda=None, hip="7.0")
    assert "torch 2.13.0 (CPU only)" in build(cuda=None)


def test_a_torch_that_does_not_import_is_told_once() -> None:
    missing = {"error": "ModuleNotFoundError: No module named 'torch'"}
    fault = only_fault(facts(torch=missing, instrumentation=missing))
    assert "No module named 'torch'" in fault.text


def test_without_torch_it_still_says_that_nobody_asked() -> None:
    missing = {"error": "ModuleNotFoundError: No module named 'torch'"}
    todos = todo(examine(facts({"DD_PATCH_MODULES": ""}, torch=missing, instrumentation=missing)))
    assert todos == ["install a torch that imports with this Python", doctor.SWITCH_ON]


def test_one_door_is_enough() -> None:
    assert todo(examine(replace(facts(torch={"door": "torch.backends"}), pth=None))) == []
    assert todo(examine(replace(facts(), entry_point=False))) == []


def test_a_shut_door_is_told_and_no_door_is_a_fault() -> None:
    shut = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    lines = about("Loading", facts(shut))
    assert [check.state for check in lines] == [GOOD, NOTE, GOOD]
    none = replace(facts(shut, torch={"door": None, "finder": False}), pth=None)
    assert "unset TORCH_DEVICE_BACKEND_AUTOLOAD" in (only_fault(none).todo or "")


def test_an_old_torch_does_not_use_the_entry_point() -> None:
    lines = about("Loading", facts(torch={"version": "2.4.1"}))
    assert [check.state for check in lines] == [GOOD, NOTE, GOOD]


@pytest.mark.parametrize(
    ("environ", "switched_on_by"),
    [
        ({"DD_PATCH_MODULES": ""}, doctor.SWITCH_ON),
        ({"DD_PATCH_MODULES": "requests:true"}, doctor.SWITCH_ON),
        ({"DD_PATCH_MODULES": "pytorch:false", "DD_TRACE_PYTORCH_ENABLED": "true"}, doctor.SWITCH_ON),
        ({"DD_PATCH_MODULES": "requests:true", "DD_TRACE_PYTORCH_ENABLED": "true"}, "DD_TRACE_DEBUG=true"),
        ({"DD_PATCH_MODULES": "redis:true,pytorch:1"}, "DD_TRACE_DEBUG=true"),
        ({"DD_TRACE_ENABLED": "false"}, "unset DD_TRACE_ENABLED"),
        ({"DD_TRACE_ENABLED": "yes"}, "unset DD_TRACE_ENABLED"),
        ({"DD_TRACE_ENABLED": ""}, "unset DD_TRACE_ENABLED"),
    ],
)
def test_off_is_a_fault_that_says_what_switches_it_on(environ: dict[str, str], switched_on_by: str) -> None:
    fault = only_fault(facts(environ, instrumentation={"on": False}))
    assert fault.topic == "Instrumentation"
    assert switched_on_by in (fault.todo or "")


def test_a_switch_that_does_not_ask_is_shown_as_such() -> None:
    fault = only_fault(facts({"DD_PATCH_MODULES": "pytorch:yes"}, instrumentation={"on": False}))
    assert fault.text == "off under ddtrace-run: DD_PATCH_MODULES=pytorch:yes does not ask for pytorch"


@pytest.mark.parametrize(
    ("error", "do"),
    [
        ("ValueError: Unsupported protocol 'x' in intake URL 'x://y'", "correct or unset DD_TRACE_AGENT_URL"),
        ("ImportError: broken", "pip install --force-reinstall ddtrace"),
    ],
)
def test_a_ddtrace_that_fails_is_told_from_an_address_it_refuses(error: str, do: str) -> None:
    broken = {"error": error}
    found = facts({"DD_TRACE_AGENT_URL": "x://y"}, instrumentation=broken, agent=broken)
    assert todo(examine(found)) == [do]


def test_without_a_command_line_it_says_that_the_variable_alone_does_nothing() -> None:
    on, alone = about("Instrumentation", facts())
    assert (on.state, alone.state) == (GOOD, NOTE)
    assert alone.text.startswith("off without it: DD_PATCH_MODULES=pytorch:true is set, but ")
    assert alone.text.endswith("start with ddtrace-run or import ddtrace.auto")
    assert "`torchrun train.py` alone would not" in doctor.verdict(facts())


def test_where_ddtrace_is_in_every_python_nothing_is_said_of_ddtrace_run() -> None:
    lines = about("Instrumentation", facts(torch={"on": True}))
    assert [line.state for line in lines] == [GOOD, GOOD]
    # Perhaps only because doctor itself was started with ddtrace-run, which the job then has to be too.
    verdict = "Started as doctor was, under ddtrace-run or from a shell that is, `{}` would be traced."
    assert doctor.verdict(facts(torch={"on": True})) == verdict.format("torchrun train.py")
    assert doctor.verdict(facts(command=look_at(("python", "x.py")), torch={"on": True})) == verdict.format(
        "python x.py"
    )
    given = facts(command=look_at(("ddtrace-run", "python", "x.py")), torch={"on": True})
    assert doctor.verdict(given) == "`ddtrace-run python x.py` would be traced from here."


def test_a_command_line_without_ddtrace_run_is_a_fault() -> None:
    plain = facts(command=look_at(("torchrun", "my train.py")))
    fault = only_fault(plain)
    assert fault.topic == "Instrumentation"
    assert "`torchrun 'my train.py'` would not be traced: DD_PATCH_MODULES=pytorch:true is set, but" in fault.text
    assert "`ddtrace-run torchrun 'my train.py'`" in (fault.todo or "")
    assert todo(examine(replace(plain, answers=plain.answers | {"torch": ANSWERS["torch"] | {"on": True}}))) == []


@pytest.mark.parametrize(
    "words",
    [
        ("ddtrace-run", "torchrun", "train.py"),
        ("nsys", "profile", "/venv/bin/ddtrace-run", "torchrun", "train.py"),
        ("python", "-m", "ddtrace.commands.ddtrace_run", "torchrun", "train.py"),
    ],
)
def test_a_command_line_with_ddtrace_run_would_be_traced(words: tuple[str, ...]) -> None:
    found = facts(command=look_at(words))
    assert todo(examine(found)) == []
    assert doctor.verdict(found) == f"`{' '.join(words)}` would be traced from here."


@pytest.mark.parametrize(
    ("text", "opened", "patched"),
    [
        ("import torch\nimport ddtrace.auto\n", 2, None),
        ("from ddtrace import auto", 1, None),
        ("#!/bin/sh\nexec ddtrace-run torchrun train.py", 2, None),
        ("import ddtrace_pytorch\n\nddtrace_pytorch.patch()", None, 3),
        ("ddtrace.patch(redis=True, pytorch=True)", None, 1),
        ("# import ddtrace.auto\n  # ddtrace_pytorch.patch()", None, None),
        ("import ddtrace.automatic, my_ddtrace.auto\nddtrace.patch(redis=True)", None, None),
        ("\x00\udcff", None, None),
    ],
)
def test_a_script_that_lets_ddtrace_in_is_seen(
    tmp_path: Path, text: str, opened: int | None, patched: int | None
) -> None:
    script = tmp_path / "start"
    script.write_text(text, errors="surrogateescape")
    found = look_at(("torchrun", "--nproc-per-node", "2", str(script)))
    assert found.opened_by == (opened and f"{script}:{opened}")
    assert found.patched_by == (patched and f"{script}:{patched}")


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("ddtrace-run torchrun nosuch.py", "nosuch.py"),
        ("ddtrace-run bash run.sh", "run.sh"),
        ("bash -x run.sh train.py", "run.sh"),
        ("ddtrace-run torchrun train.py --plot out.py", None),
        ("ddtrace-run torchrun --log-dir=nosuch.py train.py", None),
        ("ddtrace-run python -m trainer nosuch.py", None),
        ("ddtrace-run python -c pass nosuch.py", None),
        ("ddtrace-run ./trainer", None),
        ("ddtrace-run python -m torch.distributed.run nosuch.py", "nosuch.py"),
    ],
)
def test_a_script_that_is_missing_is_told(command: str, missing: str | None) -> None:
    found = facts(command=look_at(command.split()))
    faults = [check for check in about("Instrumentation", found) if check.state == BAD and "no such file" in check.text]
    assert [missing in check.text for check in faults if missing] == ([True] if missing else [])
    assert bool(faults) is bool(missing)


def test_a_start_up_file_where_python_does_not_look_is_told_as_that() -> None:
    (line, *_) = about("Loading", replace(facts(), pth=None, pth_beside="/there/ddtrace_pytorch.pth"))
    assert line.state == NOTE
    assert line.text.startswith("start-up file /there/ddtrace_pytorch.pth, which Python does not read there")
    (line, *_) = about("Loading", replace(facts(), pth=None))
    assert line.text.startswith("no start-up file")


def test_a_script_that_patches_needs_neither_variable_nor_ddtrace_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import ddtrace_pytorch; ddtrace_pytorch.patch()")
    found = facts({"DD_PATCH_MODULES": ""}, look_at(("torchrun", str(script))), instrumentation={"on": False})
    assert todo(examine(found)) == []
    assert "would be traced" in doctor.verdict(found)


def test_where_nobody_asked_nothing_of_stderr_is_shown() -> None:
    off = facts({"DD_PATCH_MODULES": ""}, instrumentation={"on": False, "stderr": ["ddtrace is bored"]})
    assert [line.state for line in about("Instrumentation", off)] == [BAD]


def test_what_the_failed_try_said_is_shown() -> None:
    lines = about("Instrumentation", facts(instrumentation={"on": False, "stderr": ["torch is too old"]}))
    assert (lines[-1].state, lines[-1].text) == (NOTE, "on stderr: torch is too old")


def test_the_built_in_integration_is_told_from_ours() -> None:
    assert "built-in" in only_fault(facts(instrumentation={"on": False, "built_in": True})).text


@pytest.mark.parametrize(
    ("export", "state", "says"),
    [
        ("auto", NOTE, "the run log goes to /logs"),
        ("both", NOTE, "the run log goes to /logs"),
        ("local", NOTE, "not used"),
        ("agent", BAD, "keeps nothing else"),
    ],
)
def test_without_an_agent_it_says_what_happens_instead(export: str, state: str, says: str) -> None:
    environ = {"DD_PYTORCH_EXPORT": export, "DD_PYTORCH_LOG_DIR": "/logs"}
    (line,) = about("Agent", facts(environ, agent={"answers": False}))
    assert line.state == state
    assert says in line.text


@pytest.mark.parametrize("log", [{"why": "read-only"}, {"error": "hung"}])
def test_records_are_not_said_to_go_where_none_can_be_written(log: dict[str, str]) -> None:
    (line,) = about("Agent", facts(agent={"answers": False}, log=log))
    assert line.text == "none answers at http://agent:8126 (1.5 ms)"


@pytest.mark.parametrize(
    ("environ", "agent", "state"),
    [
        ({}, True, NOTE),
        ({}, False, BAD),
        ({"DD_PYTORCH_LOG_DIR": "/logs"}, True, BAD),
        ({"DD_PYTORCH_EXPORT": "both"}, True, BAD),
        ({"DD_PYTORCH_EXPORT": "agent"}, True, NOTE),
    ],
)
def test_an_unusable_log_is_a_fault_only_where_it_is_needed(environ: dict[str, str], agent: bool, state: str) -> None:
    (line,) = about("Run log", facts(environ, agent={"answers": agent}, log={"why": "read-only"}))
    assert line.state == state


def test_a_log_that_may_fill_the_disk_is_noted() -> None:
    (line,) = about("Run log", facts({"DD_PYTORCH_EXPORT": "local"}, log={"free_bytes": 10 << 20}))
    assert line.state == NOTE
    assert "256 MiB" in line.text


def test_a_missing_gpu_is_no_fault() -> None:
    for answer in ({"count": 0, "why_none": "no driver"}, {"device": None}, {"error": "hung"}):
        (line,) = about("GPU", facts(gpu=answer))
        assert line.state == NOTE


def test_a_setting_that_cannot_be_read_is_a_fault_and_others_are_shown() -> None:
    found = facts({"DD_PYTORCH_LOG_MAX_MB": "lots", "DD_PYTORCH_SERVICE": "trainer"})
    assert only_fault(found).todo == "correct or unset DD_PYTORCH_LOG_MAX_MB"
    assert "DD_PYTORCH_SERVICE=trainer" in [check.text for check in about("Settings", found)]


def test_a_variable_that_we_do_not_know_is_a_fault_with_the_nearest_that_we_do() -> None:
    fault = only_fault(facts({"DD_PYTORCH_LOGDIR": "/data/logs"}))
    assert fault.topic == "Settings"
    assert fault.text == "DD_PYTORCH_LOGDIR is no setting of ddtrace-pytorch; did you mean DD_PYTORCH_LOG_DIR?"
    assert fault.todo == "correct or unset DD_PYTORCH_LOGDIR"


def test_the_job_is_told_with_where_its_id_is_from() -> None:
    (line,) = about("Job", facts({"SLURM_JOB_ID": "42", "SLURM_PROCID": "0"}))
    assert "job 42 (from SLURM_JOB_ID), launched by slurm" in line.text
    (line,) = about("Job", facts())
    assert line.state == NOTE
    assert "unless the launcher gives one (torchrun does)" in line.text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_marks_read_without_colour_and_without_unicode(encoding: str) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    checks = [Check("A", GOOD, "fine"), Check("A", BAD, "broken\x1b[2J", "mend it"), Check("B", NOTE, "by the way")]
    doctor.render(checks, "all is well", Console(file=out))
    out.seek(0)
    good, bad, note = ("✓", "✗", "–") if encoding == "utf-8" else ("+", "x", "-")
    assert out.read() == (f"A\n  {good} fine\n  {bad} broken\\x1b[2J\nB\n  {note} by the way\n\nWhat to do: mend it\n")


def test_a_probe_that_hangs_or_dies_costs_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probes.PROBES, "gpu", ("sh", "-c", "sleep 600"))
    monkeypatch.setitem(probes.PROBES, "agent", ("sh", "-c", "kill -SEGV $$"))
    monkeypatch.setitem(probes.PROBES, "torch", ("sh", "-c", "echo it is broken >&2; exit 1"))
    answers = probes.ask(("gpu", "agent", "torch", "log"), timeout=5.0)
    assert answers["gpu"] == {"error": "no answer in 5 s"}
    assert answers["agent"] == {"error": "the interpreter died of SIGSEGV"}
    assert answers["torch"] == {"error": "it is broken"}
    assert "directory" in answers["log"]


NOISY = (
    "sh",
    "-c",
    'echo of others >&2; echo "ddtrace of $PYTHONWARNINGS" >&2; "$0" "$@"; echo bye >&2',
    sys.executable,
)


@pytest.mark.parametrize(("users", "said"), [(None, "ignore"), ("error", "error")])
def test_of_what_a_probe_wrote_on_stderr_only_what_names_ddtrace_is_kept(
    monkeypatch: pytest.MonkeyPatch, users: str | None, said: str
) -> None:
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    if users:
        monkeypatch.setenv("PYTHONWARNINGS", users)
    monkeypatch.setitem(probes.PROBES, "log", NOISY)
    assert probes.ask(("log",), timeout=30.0)["log"]["stderr"] == [f"ddtrace of {said}"]


def test_a_probe_that_fails_says_why_whatever_else_is_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probes.PROBES, "no such probe", NOISY)
    answer = probes.ask(("no such probe",), timeout=30.0)["no such probe"]
    assert answer["error"] == "KeyError: 'no such probe'"


def test_looking_at_the_log_directory_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for directory in (there, tmp_path / "not" / "yet"):
        monkeypatch.setenv("DD_PYTORCH_LOG_DIR", str(directory))
        answer = probes.log()
        assert answer["why"] is None
        assert answer["free_bytes"] > 0
    (tmp_path / "file").touch()
    monkeypatch.setenv("DD_PYTORCH_LOG_DIR", str(tmp_path / "file" / "log"))
    assert probes.log()["why"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_the_usual_log_directory_must_be_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DD_PYTORCH_LOG_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert probes.log()["why"] is None
    assert list(tmp_path.iterdir()) == []
    os.symlink("/", settings.default_log_root())
    assert "symbolic link" in probes.log()["why"]


def _doctor(env: dict[str, str], *options: str, under: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*under, sys.executable, "-m", "ddtrace_pytorch.cli.main", "doctor", *options],
        env=env, capture_output=True, text=True, timeout=90,
    )  # fmt: skip


def test_really_run_where_a_job_would_be_traced(agent: Agent) -> None:
    done = _doctor(environment(agent.url, DD_PATCH_MODULES="pytorch:true"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert (said["would_trace"], said["what_to_do"]) == (True, [])
    answers = said["answers"]
    assert answers["instrumentation"]["on"] is True
    assert (answers["agent"]["url"], answers["agent"]["answers"]) == (agent.url, True)
    assert answers["torch"]["door"] == ("pth" if doctor._pth() else "torch.backends")
    assert answers["torch"]["finder"] is True
    assert answers["torch"]["on"] is False
    assert agent.received() == []


def test_really_run_on_a_command_line_that_ddtrace_run_is_missing_from(agent: Agent) -> None:
    env = environment(agent.url, DD_PATCH_MODULES="pytorch:true")
    done = _doctor(env, "torchrun", "--nproc-per-node", "2", "train.py")
    assert (done.returncode, done.stderr) == (1, "")
    assert "`torchrun --nproc-per-node 2 train.py` would not be traced" in done.stdout
    assert _doctor(env, "--", "ddtrace-run", "torchrun", "train.py").returncode == 0


def test_really_run_in_an_environment_of_ddtrace_run(agent: Agent) -> None:
    env = environment(agent.url, DD_PATCH_MODULES="pytorch:true", DD_TRACE_ENABLED="true")
    done = _doctor(env, "--json", "--", "torchrun", "train.py", under=DDTRACE_RUN)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["answers"]["torch"]["on"] is True


def test_really_run_where_nobody_asked_and_no_agent_is(tmp_path: Path) -> None:
    done = _doctor(environment(None, DD_PYTORCH_LOG_DIR=str(tmp_path / "log")))
    assert (done.returncode, done.stderr) == (1, "")
    assert "✗ off under ddtrace-run: neither DD_PATCH_MODULES nor DD_TRACE_PYTORCH_ENABLED is set" in done.stdout
    assert re.search(r"– none answers at http://127.0.0.1:9 \(.* ms\); the run log goes to .*/log ", done.stdout)
    assert done.stdout.splitlines()[-1] == f"What to do: {doctor.SWITCH_ON}"
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("part", "asked", "state", "said"),
    [
        (Part.BUILT, "", GOOD, "counted by the part in C"),
        (Part.BUILT, "python", NOTE, "in Python, at twice the cost: DD_PYTORCH_INSTRUMENT=python"),
        (Part.MISSING, "", NOTE, "in Python, at twice the cost: the part in C was not built"),
        (Part.OTHER, "", BAD, "in Python, at twice the cost: the part in C was built for another version"),
    ],
)
def test_it_says_whether_the_part_in_c_is_in_use(part: Part, asked: str, state: str, said: str) -> None:
    found = replace(facts({"DD_PYTORCH_INSTRUMENT": asked}), c_part=part)
    (check,) = [check for check in about("Versions", found) if "collectives" in check.text]
    assert check.state == state
    assert said in check.text
    assert ("build it anew" in str(check.todo)) is (state == BAD)


@pytest.mark.parametrize(("there", "state", "said"), [(True, GOOD, "built"), (False, NOTE, "not built")])
def test_it_says_whether_the_kernel_sampler_is_built(there: bool, state: str, said: str) -> None:
    (check,) = [one for one in about("Versions", replace(facts(), sampler=there)) if "kernel" in one.text]
    assert (check.state, check.text) == (state, f"kernel sampler: {said}")


def test_the_kernel_sampler_is_looked_for_where_the_package_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ask", lambda names, timeout: ANSWERS)
    monkeypatch.setattr(sampler_library, "_FILE", build_sampler(tmp_path))
    assert doctor.gather().sampler is True
    monkeypatch.setattr(sampler_library, "_FILE", tmp_path / "nothing.so")
    assert doctor.gather().sampler is False


def test_of_each_handler_it_is_said_whether_it_is_to_be_had() -> None:
    found = [{"path": "mine:Sink", "why": None}, {"path": "yours:Sink", "why": "ModuleNotFoundError: no yours"}]
    good, bad = about("Handlers", facts(handlers={"handlers": found}))
    assert (good.state, good.text) == (GOOD, "mine:Sink is there")
    assert (bad.state, bad.text) == (BAD, "yours:Sink is not to be had from here: ModuleNotFoundError: no yours")
    assert "PYTHONPATH" in str(bad.todo)
    assert about("Handlers", facts()) == []


def test_the_handlers_are_looked_for_without_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ("collections:Counter", "os.path:curdir", "nowhere:Sink", "justaword", "os.path:", ":x", "os:p.join")
    monkeypatch.setenv("DD_PYTORCH_LOG_HANDLERS", ",".join(paths))
    found = {one["path"]: one["why"] for one in probes.handlers()["handlers"]}
    no_form = "ValueError: it has not the form package.module:factory"
    assert found == {
        "collections:Counter": None,
        "os.path:curdir": "TypeError: it is str, which can't be called",
        "nowhere:Sink": "ModuleNotFoundError: No module named 'nowhere'",
        "justaword": no_form,
        "os.path:": no_form,
        ":x": no_form,
        "os:p.join": "AttributeError: module 'os' has no attribute 'p'",
    }
