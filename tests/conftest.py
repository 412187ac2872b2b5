from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.agent import Agent
from harness.job import Jobs, jobs_in


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
