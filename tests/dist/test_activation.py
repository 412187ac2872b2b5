"""Every way to switch us on ends in our integration, in the right door, and never in ddtrace's built-in one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.job import DDTRACE_RUN, PYTHON, Jobs, Result, alone, environment, torchrun
from harness.log import of_type, rank_spans
from harness.look import LOOK, OURS, SAY, ours_in, seen_by

pytestmark = pytest.mark.dist

# name -> (settings, launched under, first lines of the script)
WAYS: dict[str, tuple[dict[str, str], Sequence[str], str]] = {
    "DD_PATCH_MODULES": ({"DD_PATCH_MODULES": "pytorch:true"}, DDTRACE_RUN, ""),
    "DD_TRACE_PYTORCH_ENABLED": ({"DD_TRACE_PYTORCH_ENABLED": "true"}, DDTRACE_RUN, ""),
    "auto after torch": ({"DD_PATCH_MODULES": "pytorch:true"}, (), "import torch; import ddtrace.auto"),
    "auto before torch": ({"DD_TRACE_PYTORCH_ENABLED": "true"}, (), "import ddtrace.auto; import torch"),
    "patch after torch": ({}, (), "import torch; import ddtrace; ddtrace.patch(pytorch=True)"),
    "patch before torch": ({}, (), "import ddtrace; ddtrace.patch(pytorch=True); import torch"),
    "ours after torch": ({}, (), "import torch; import ddtrace_pytorch; ddtrace_pytorch.patch()"),
    "ours before torch": ({}, (), "import ddtrace_pytorch; ddtrace_pytorch.patch(); import torch"),
    "ours after ddtrace": ({}, (), "import ddtrace, torch, ddtrace_pytorch as d; d.patch(); d.patch()"),
    "all at once": (
        {"DD_PATCH_MODULES": "pytorch:true"},
        DDTRACE_RUN,
        "import ddtrace, ddtrace_pytorch; ddtrace.patch(pytorch=True); ddtrace_pytorch.patch()",
    ),
}


class Looks:
    """Runs the ways as many at a time as there are processors, and keeps what each saw."""

    def __init__(self, jobs: Jobs, pool: ThreadPoolExecutor, ways: Iterable[str]) -> None:
        self._jobs = jobs
        self._begun = {way: pool.submit(self._run, way) for way in ways}

    def _run(self, way: str) -> Result:
        settings, launcher, first = WAYS[way]
        script = self._jobs.script(f"    {first}\n{LOOK}{SAY}", f"{way}.py")
        return self._jobs.run([*launcher, *PYTHON, script], alone(self.log(way), **settings))

    def log(self, way: str) -> Path:
        return self._jobs.directory / f"log of {way}"

    def __getitem__(self, way: str) -> Result:
        begun: Future[Result] = self._begun[way]
        return begun.result().ok()


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Looks]:
    jobs = Jobs(tmp_path_factory.mktemp("ways"))
    pool = ThreadPoolExecutor(os.cpu_count())
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    yield Looks(jobs, pool, [params["way"] for params in chosen if "way" in params])
    pool.shutdown(cancel_futures=True)
    jobs.end()


@pytest.mark.parametrize("way", WAYS)
def test_every_way_ends_in_our_integration_alone(looks: Looks, way: str) -> None:
    assert ours_in(seen_by(looks[way])) == OURS
    assert [span["name"] for span in of_type(looks.log(way), "span")] == ["pytorch.rank"]
    assert looks[way].stderr == ""


# No door: neither the .pth file's, nor (by an environment variable) torch's.
CLOSED = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ddtrace_pytorch' not in type(f).__module__]"


def test_without_a_door_the_same_look_sees_the_built_in(jobs: Jobs, tmp_path: Path) -> None:
    # Its own end, without an Agent, is not ours to test: it may abort.
    leave = "    import os; sys.stdout.flush(); os._exit(0)\n"
    script = jobs.script(f"    {CLOSED}\n    import ddtrace.auto\n{LOOK}{SAY}{leave}")
    env = alone(tmp_path / "log", DD_PATCH_MODULES="pytorch:true", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    facts = seen_by(jobs.run([*PYTHON, script], env))
    assert facts["slot"] == ["ddtrace.contrib.internal.pytorch.patch"]
    assert "init_process_group" in facts["wrapped"]
    assert rank_spans(tmp_path / "log") == []


def test_a_built_in_that_came_first_is_switched_off_for_us(jobs: Jobs, tmp_path: Path) -> None:
    first = f"    {CLOSED}\n    import ddtrace.auto, torch, ddtrace_pytorch; ddtrace_pytorch.patch()\n"
    script = jobs.script(first + LOOK + SAY)
    env = alone(tmp_path / "log", DD_PATCH_MODULES="pytorch:true", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ours_in(seen_by(jobs.run([*PYTHON, script], env))) == OURS
    assert len(rank_spans(tmp_path / "log")) == 1


@pytest.mark.once
def test_workers_of_torch_distributed_run_inherit_it(jobs: Jobs, tmp_path: Path) -> None:
    env = environment(
        None, DD_TRACE_PYTORCH_ENABLED="true", DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log")
    )
    launcher = [*PYTHON, "-m", "torch.distributed.run", *torchrun(2)[1:]]
    result = jobs.run([*DDTRACE_RUN, *launcher, jobs.script(LOOK + SAY)], env).ok()
    said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    together = OURS | {"threads": sorted([*OURS["threads"], "ddtrace_pytorch.standstill"])}
    assert [ours_in(facts) for facts in said] == [together, together]
    spans = rank_spans(tmp_path / "log")
    assert [span["metrics"]["rank"] for span in spans] == [0, 1]
    assert {span["tags"]["launcher"] for span in spans} == {"torchrun"}


INSIDE_PYTEST = f"""
    import ddtrace
    ddtrace.patch(pytorch=True)
{LOOK}
    def test_it():
        facts = look()
        assert facts["slot"] == {OURS["slot"]}
        assert facts["wrapped"] == []
        assert facts["threads"] == {OURS["threads"]}
"""


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        pytest.param([], {}, id="patch in the test"),
        pytest.param(["--ddtrace", "--ddtrace-patch-all"], {"DD_PATCH_MODULES": "pytorch:true"}, id="ddtrace's plugin"),
    ],
)
def test_under_pytest_it_is_ours(jobs: Jobs, tmp_path: Path, options: list[str], settings: dict[str, str]) -> None:
    script = jobs.script(INSIDE_PYTEST, "test_inside.py")
    env = alone(tmp_path / "log", **settings, DD_CIVISIBILITY_AGENTLESS_ENABLED="false")
    result = jobs.run([*PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, script], env).ok()
    assert "1 passed" in result.stdout
    assert len(rank_spans(tmp_path / "log")) == 1
