"""Every environment variable: what it accepts, what it becomes, and that no text of any kind stops a job."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import ddtrace
import pytest
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone, torchrun
from harness.log import rank_spans
from hypothesis import given
from hypothesis import strategies as st

from ddtrace_pytorch.settings import TABLE, Setting, Settings, default_log_root, load

ROWS = {row.variable: row for row in TABLE}


def test_an_interval_that_is_shorter_than_a_window_is_complained_of() -> None:
    assert load({"DD_PYTORCH_PROFILE_EVERY": "3"}).complaints == ()
    [complaint] = load({"DD_PYTORCH_PROFILE_EVERY": "2"}).complaints
    assert complaint == (
        "DD_PYTORCH_PROFILE_EVERY=2 is less than a window takes (1 + 2 steps); there are no profiler windows"
    )


def test_an_empty_environment_gives_the_defaults_and_no_complaint() -> None:
    settings = load({})
    assert settings.export == "auto"
    assert settings.service == "pytorch"
    assert settings.rotation_seconds == 600
    assert settings.snapshot_seconds == 60
    assert settings.log_max_mb == 256
    assert settings.trace_enabled
    assert settings.log_dir is None
    assert settings.complaints == ()


def test_every_row_fills_a_field_of_its_own_and_says_what_it_means() -> None:
    filled = sorted(row.field for row in TABLE if row.field is not None)
    assert filled == sorted({f.name for f in fields(Settings)} - {"complaints"})
    assert [row.variable for row in TABLE if row.field is None] == ["DD_PYTORCH_JOB_ID"]
    assert len(ROWS) == len(TABLE)
    theirs = {"TORCH_DISTRIBUTED_TRACING", "TORCH_DISTRIBUTED_TRACING_PRINT", "GPU_SERIAL", "VM_ID"}
    for row in TABLE:
        assert row.variable.startswith("DD_") or row.variable in theirs
        assert row.meaning.endswith(".")


@pytest.mark.parametrize(
    ("variable", "raw", "field", "value"),
    [
        ("DD_PYTORCH_SERVICE", "trainer", "service", "trainer"),
        ("DD_SERVICE", "shop", "service", "shop"),
        ("DD_TRACE_ENABLED", "0", "trace_enabled", False),
        ("DD_TRACE_ENABLED", "False", "trace_enabled", False),
        ("DD_TRACE_ENABLED", " TRUE ", "trace_enabled", True),
        ("DD_TRACE_ENABLED", "yes", "trace_enabled", False),  # ddtrace's reading, not ours
        ("DD_PYTORCH_EXPORT", "Both", "export", "both"),
        ("DD_PYTORCH_ROTATION_SECONDS", "0.05", "rotation_seconds", 0.05),
        ("DD_PYTORCH_ROTATION_SECONDS", "1e2", "rotation_seconds", 100.0),
        ("DD_PYTORCH_SNAPSHOT_SECONDS", " 5 ", "snapshot_seconds", 5.0),
        ("DD_PYTORCH_NVTX", " True ", "nvtx", "true"),
        ("DD_PYTORCH_NVTX", "0", "nvtx", "false"),
        ("DD_PYTORCH_PRINT", "CROSSNODE", "print_calls", "crossnode"),
        ("TORCH_DISTRIBUTED_TRACING", "ALL", "tracing", "true"),
        ("TORCH_DISTRIBUTED_TRACING", "1", "tracing", "true"),
        ("TORCH_DISTRIBUTED_TRACING", "CrossNode", "tracing", "crossnode"),
        ("TORCH_DISTRIBUTED_TRACING", "NONE", "tracing", "false"),
        ("TORCH_DISTRIBUTED_TRACING_PRINT", "Y", "tracing_print", True),
        ("TORCH_DISTRIBUTED_TRACING_PRINT", "on", "tracing_print", False),  # that script's reading
        ("GPU_SERIAL", "1324", "gpu_serial", "1324"),
        ("VM_ID", " vm-7 ", "vm_id", "vm-7"),
        ("DD_PYTORCH_LOG_DIR", "/data/logs", "log_root", "/data/logs"),
        ("DD_PYTORCH_LOG_MAX_MB", "1", "log_max_mb", 1.0),
        ("DD_PYTORCH_STALL_SECONDS", "0", "stall_seconds", 0.0),
        ("DD_PYTORCH_STALL_SECONDS", "1", "stall_seconds", 1.0),
        ("DD_PYTORCH_LOG_HANDLERS", "a.b:c, d.e ,", "log_handlers", ("a.b:c", "d.e")),
        ("DD_PYTORCH_LOG_METADATA", "team:vision, run : a:b", "log_metadata", (("team", "vision"), ("run", "a:b"))),
        ("DD_PYTORCH_RECORDS", "False", "records", False),
        ("DD_PYTORCH_RECORDS", "1", "records", True),
        ("DD_PYTORCH_SOURCE", " rollout ", "source", "rollout"),
    ],
)
def test_a_good_value_is_read(variable: str, raw: str, field: str, value: object) -> None:
    settings = load({variable: raw})
    assert getattr(settings, field) == value
    assert settings.complaints == ()


@pytest.mark.parametrize(
    ("mode", "to_agent", "with_an_agent", "without"),
    [
        ("auto", True, False, True),
        ("agent", True, False, False),
        ("local", False, True, True),
        ("both", True, True, True),
        ("none", False, False, False),
    ],
)
def test_the_export_mode_says_where_records_go(mode: str, to_agent: bool, with_an_agent: bool, without: bool) -> None:
    chosen = load({"DD_PYTORCH_EXPORT": mode})
    assert chosen.export == mode
    assert (chosen.to_agent, chosen.to_log(True), chosen.to_log(False)) == (to_agent, with_an_agent, without)


def test_auto_keeps_a_run_log_beside_the_agent_where_a_directory_is_named() -> None:
    assert load({"DD_PYTORCH_LOG_DIR": "/logs"}).to_log(agent_answers=True)
    assert not load({"DD_PYTORCH_LOG_DIR": "/logs", "DD_PYTORCH_EXPORT": "agent"}).to_log(agent_answers=True)


def test_our_own_service_wins_over_ddtraces() -> None:
    assert load({"DD_SERVICE": "shop", "DD_PYTORCH_SERVICE": "trainer"}).service == "trainer"


def test_one_bad_pair_does_not_cost_the_good_ones() -> None:
    settings = load({"DD_PYTORCH_LOG_METADATA": "team:vision,bad,run:7"})
    assert settings.log_metadata == (("team", "vision"), ("run", "7"))
    (complaint,) = settings.complaints
    assert complaint == "DD_PYTORCH_LOG_METADATA='bad' is not pairs such as team:vision,run:7; using the rest"


@pytest.mark.parametrize(
    ("variable", "raw", "accepted"),
    [
        ("DD_PYTORCH_LOG_MAX_MB", "1e9", "from 1 to 1048576"),
        ("DD_PYTORCH_EXPORT", "carrier pigeon", "auto, agent, local, both, none"),
        ("DD_PYTORCH_NVTX", "all", "true, false or crossnode"),
        ("TORCH_DISTRIBUTED_TRACING", "everything", "ALL, CROSSNODE or NONE"),
        ("DD_PYTORCH_ROTATION_SECONDS", "ten", "a number from 0.01 to 86400"),
        ("DD_PYTORCH_ROTATION_SECONDS", "0", "a number from 0.01 to 86400"),
        ("DD_PYTORCH_ROTATION_SECONDS", "-5", "a number from 0.01 to 86400"),
        ("DD_PYTORCH_ROTATION_SECONDS", "nan", "a number from 0.01 to 86400"),
        ("DD_PYTORCH_STALL_SECONDS", "0.9", "0 or a number from 1 to 86400"),
        ("DD_PYTORCH_SNAPSHOT_SECONDS", "inf", "a number from 0.1 to 86400"),
        ("DD_PYTORCH_LOG_MAX_MB", "0.5", "a number from 1"),
        ("DD_PYTORCH_LOG_METADATA", "team=vision", "pairs such as team:vision"),
        ("DD_PYTORCH_LOG_METADATA", "team:", "pairs such as team:vision"),
        ("DD_PYTORCH_RECORDS", "maybe", "true or false"),
        ("DD_PYTORCH_LOG_RANKS", "%0", "such as 0,8-15"),
        ("DD_PYTORCH_LOG_RANKS", "8-3", "such as 0,8-15"),
        ("DD_PYTORCH_LOG_RANKS", "0,,1", "such as 0,8-15"),
        ("DD_PYTORCH_LOG_RANKS", "first", "such as 0,8-15"),
    ],
)
def test_a_bad_value_gives_the_default_and_a_complaint_that_helps(variable: str, raw: str, accepted: str) -> None:
    row, settings = ROWS[variable], load({variable: raw})
    assert replace(settings, complaints=()) == load({})
    (complaint,) = settings.complaints
    for part in (variable, repr(raw), accepted, repr(row.default)):
        assert part in complaint


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("DD_PYTORCH_LOGDIR", "DD_PYTORCH_LOG_DIR"),
        ("DD_PYTORCH_LOG_MAX_MIB", "DD_PYTORCH_LOG_MAX_MB"),
        ("DD_PYTORCH_log_dir", "DD_PYTORCH_LOG_DIR"),
        ("DD_PYTORCH_JOBID", "DD_PYTORCH_JOB_ID"),
        ("DD_PYTORCH_SERVICE_NAME", "DD_PYTORCH_SERVICE"),
        ("DD_PYTORCH_ENABLED", "DD_TRACE_PYTORCH_ENABLED"),
        ("DD_PYTORCH_QQQ", None),
        ("DD_PYTORCH_", None),
    ],
)
def test_a_variable_that_we_do_not_know_is_told_with_the_nearest(variable: str, nearest: str | None) -> None:
    (complaint,) = load({variable: "a secret"}).complaints
    meant = f"; did you mean {nearest}?" if nearest else ""
    assert complaint == f"{variable} is no setting of ddtrace-pytorch{meant}"


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("DD_TRACE_PYTORCH_ENABLE", "DD_TRACE_PYTORCH_ENABLED"),
        ("DD_TRACE_TORCH_ENABLED", "DD_TRACE_PYTORCH_ENABLED"),
        ("DD_TRACE_PYTORH_ENABLED", "DD_TRACE_PYTORCH_ENABLED"),
        ("DD_TRACE_PYTOCH_ENABLED", "DD_TRACE_PYTORCH_ENABLED"),
        ("DD_TRACE_PYTOCRH_ENABLED", "DD_TRACE_PYTORCH_ENABLED"),
        ("DD_PATCH_MODULE", "DD_PATCH_MODULES"),
        ("DD_PATCHMODULES", "DD_PATCH_MODULES"),
    ],
)
def test_a_misspelt_switch_is_told_too(variable: str, nearest: str) -> None:
    assert load({variable: "true"}).complaints == (f"{variable} switches nothing on; did you mean {nearest}?",)
    assert load({variable: " "}).complaints == ()


def test_no_variable_of_ddtraces_own_is_taken_for_a_misspelt_switch() -> None:
    (listed,) = (Path(ddtrace.__file__).parent / "internal" / "settings").glob("_supported_configurations.py")
    ddtraces = {*re.findall(r"DD_\w+", listed.read_text()), "DD_TRACE_PYTEST_ENABLED", "DD_IAST_PATCH_MODULES"}
    assert len(ddtraces) > 500
    others = [name for name in ddtraces if not name.startswith("DD_PYTORCH_") and name not in ROWS]
    assert load(dict.fromkeys(others, "true")).complaints == ()


def test_variables_that_are_empty_or_none_of_ours_are_not_complained_of() -> None:
    others = ("DD_TRACE_PYTORCH_ENABLED", "DD_PATCH_MODULES", "PYTORCH_LOG_DIR", "DD_PYTORCHLIKE", "_DD_PYTORCH_X")
    assert load(dict.fromkeys(others, "1") | {"DD_PYTORCH_LOGDIR": " "}).complaints == ()


TWO_SESSIONS = """
    import torch.distributed as dist
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
"""


def test_an_unknown_variable_costs_one_warning_in_each_process(jobs: Jobs, tmp_path: Path) -> None:
    env = alone(tmp_path / "log", DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_LOGDIR="/data/logs")
    result = jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(TWO_SESSIONS)], env).ok()
    assert len(rank_spans(tmp_path / "log")) == 2
    assert result.stderr.count("DD_PYTORCH_LOGDIR") == 1, result.describe()


def test_of_the_ranks_of_a_host_one_warns_and_says_which_it_is(jobs: Jobs, tmp_path: Path) -> None:
    env = alone(tmp_path / "log", DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_LOGDIR="/data/logs")
    script = jobs.script('import torch.distributed as dist; dist.init_process_group("gloo")')
    result = jobs.run([*DDTRACE_RUN, *torchrun(2), script], env).ok()
    assert len(rank_spans(tmp_path / "log")) == 2
    said = [line for line in result.stderr.splitlines() if "DD_PYTORCH_LOGDIR" in line]
    assert said == [
        "WARNING ddtrace_pytorch [rank 0]: DD_PYTORCH_LOGDIR is no setting of ddtrace-pytorch; "
        "did you mean DD_PYTORCH_LOG_DIR?"
    ], result.describe()


@given(st.text())
def test_no_name_ever_stops_a_job_or_fills_its_log(name: str) -> None:
    for complaint in load({"DD_PYTORCH_" + name: "1"}).complaints:
        assert len(complaint) < 1_000
        assert complaint.isprintable()


def test_one_bad_value_leaves_the_others_alone_and_all_are_told() -> None:
    settings = load({"DD_PYTORCH_EXPORT": "x", "DD_PYTORCH_LOG_MAX_MB": "y", "GPU_SERIAL": "z"})
    assert settings.gpu_serial == "z"
    assert len(settings.complaints) == 2


def test_a_variable_that_is_set_but_empty_is_as_good_as_unset() -> None:
    assert load({row.variable: "   " for row in TABLE}) == load({})


@pytest.mark.parametrize(
    ("raw", "chosen"),
    [
        ("all", range(20)),
        ("ALL", range(20)),
        ("0", {0}),
        ("0,8-15", {0, *range(8, 16)}),
        (" 1 , 3-4 ", {1, 3, 4}),
        ("5-5", {5}),
        ("%8", {0, 8, 16}),
        ("%1", range(20)),
    ],
)
def test_ranks_are_chosen(raw: str, chosen: set[int]) -> None:
    ranks = load({"DD_PYTORCH_LOG_RANKS": raw}).log_ranks
    assert {rank for rank in range(20) if rank in ranks} == set(chosen)


@given(st.sampled_from(TABLE), st.text())
def test_no_text_ever_stops_a_job(row: Setting, raw: str) -> None:
    settings = load({row.variable: raw})
    assert len(settings.complaints) <= 1
    assert settings.service
    assert all(len(complaint) < 1_000 for complaint in settings.complaints)


def test_settings_are_read_from_the_process_when_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VM_ID", "from the process")
    assert load().vm_id == "from the process"


def test_the_default_log_directory_is_this_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_log_root() == str(tmp_path / f"ddtrace-pytorch-{os.getuid()}")
    assert load({}).log_root == default_log_root()


def test_a_tilde_in_the_log_directory_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load({"DD_PYTORCH_LOG_DIR": " ~/runs "}).log_dir == "/home/somebody/runs"


@pytest.mark.parametrize(("text", "first"), [("all", 0), ("%8", 0), ("3", 3), ("8-15,5", 5)])
def test_the_first_chosen_rank_speaks_for_all(text: str, first: int) -> None:
    ranks = load({"DD_PYTORCH_LOG_RANKS": text}).log_ranks
    assert ranks.first == first
    assert ranks.first in ranks
