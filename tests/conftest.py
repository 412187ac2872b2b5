from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.agent import Agent
from harness.job import Jobs, jobs_in
from hypothesis import settings

# What a change is judged by is the same each time, however busy the machine. HYPOTHESIS_PROFILE=explore looks for more.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with Agent(tmp_path_factory.mktemp("agent")) as agent:
        yield agent


@pytest.fixture
def agent(shared_agent: Agent) -> Iterator[Agent]:
    """The Agent, empty at the start; whatever it received must have passed its checks."""
    shared_agent.clear()
    yield shared_agent
    assert shared_agent.check_failures() == ""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with jobs_in(tmp_path) as jobs:
        yield jobs


# What no release of torch has a part in: CI runs these on one of them (`-m "not once"` leaves them out).
ONCE = (
    "unit/test_aftermath.py", "unit/test_agent.py", "unit/test_diagnose.py", "unit/test_docs.py", "unit/test_doctor.py",
    "unit/test_exporter.py", "unit/test_graph.py", "unit/test_inquest.py", "unit/test_job.py",
    "unit/test_kernel_sampler.py", "unit/test_last_words.py", "unit/test_logs_as_found.py", "unit/test_own_windows.py",
    "unit/test_page.py",
    "unit/test_positions.py", "unit/test_pulse.py", "unit/test_reading_large_logs.py", "unit/test_report.py",
    "unit/test_report_collectives.py", "unit/test_report_page.py", "unit/test_report_records.py",
    "unit/test_report_steps.py", "unit/test_report_windows.py", "unit/test_roll_call.py", "unit/test_run_log_docs.py",
    "unit/test_runlog.py", "unit/test_sampler.py", "unit/test_sampling_budget.py", "unit/test_settings.py",
    "unit/test_settings_matter.py", "unit/test_signal_pipe.py", "unit/test_slow_groups.py", "unit/test_spans_docs.py",
    "unit/test_standstill.py", "unit/test_state_file.py", "unit/test_stragglers.py", "unit/test_timeline.py",
    "unit/test_timeline_clocks.py", "unit/test_timeline_lanes.py", "unit/test_troubleshooting.py",
    "unit/test_verdict.py", "unit/test_verdict_faults.py", "unit/test_verdict_properties.py", "unit/test_windows.py",
    "dist/test_cross_node.py", "dist/test_default_run.py", "dist/test_doors.py", "dist/test_identity_agreement.py",
    "dist/test_lifecycle.py", "dist/test_loaders.py", "dist/test_log_handlers.py", "dist/test_markers.py",
    "dist/test_parenthood.py", "dist/test_rank_span.py", "dist/test_records.py", "dist/test_report_of_a_job.py",
    "dist/test_rotation.py", "dist/test_timeline.py", "dist/test_torchtitan.py", "dist/test_two_hosts.py",
    "faults/test_agents.py", "faults/test_broken_descriptors.py", "faults/test_broken_signals.py",
    "faults/test_broken_threads.py", "faults/test_chaos_agent.py", "faults/test_diagnose.py", "faults/test_endings.py",
    "faults/test_forks.py", "faults/test_last_words.py", "faults/test_records.py", "faults/test_roll_call.py",
    "faults/test_sigterm.py", "faults/test_untrusted.py",
)  # fmt: skip

# What costs much and goes as deep into torch as anything: CI runs it on the newest release alone.
NEWEST = (
    "compat/test_compiled.py", "compat/test_identity.py", "compat/test_parallel.py", "compat/test_records_compiled.py",
    "compat/test_sharded.py", "compat/test_values.py", "dist/test_checkpoints.py", "dist/test_coverage.py",
    "dist/test_examples.py", "dist/test_frameworks.py", "dist/test_giving_back.py", "dist/test_instruments.py",
    "dist/test_lives_leave_nothing.py", "dist/test_passing_for_functions.py", "dist/test_steps.py",
    "dist/test_training_alone.py", "dist/test_whereabouts.py",
    "faults/test_stalls.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        file = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else None
        if file in ONCE:
            item.add_marker(pytest.mark.once)
        elif file in NEWEST and item.get_closest_marker("once") is None:
            item.add_marker(pytest.mark.newest)
