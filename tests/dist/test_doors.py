"""The two doors to ddtrace's slot, alone and together, as each way to install the package opens them."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone
from harness.log import rank_spans
from harness.look import LOOK, OURS, SAY, ours_in, seen_by

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]


class Site:
    """An environment with our package installed in its own site-packages, and this one's packages behind them."""

    def __init__(self, where: Path) -> None:
        venv.create(where, symlinks=True)
        self.python = str(where / "bin" / "python")
        (self.packages,) = where.glob("lib/python*/site-packages")
        # A bare line only adds to sys.path: no .pth file over there is run, so no copy of ours over there is seen
        # but its metadata, which ours hides.
        outer = next(path for path in sys.path if (Path(path) / "torch" / "__init__.py").exists())
        (self.packages / "zz_outer.pth").write_text(f"{outer}\n")

    def install(self, *arguments: str) -> Site:
        """`pip install` that takes what lies behind for nothing: a copy of ours over there is no reason to stop."""
        pip = [*PYTHON, "-m", "pip", "--python", self.python, "install"]
        run_here([*pip, "--quiet", "--no-deps", "--ignore-installed", *arguments])
        return self


def run_here(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": build_path()})
    assert done.returncode == 0, done.stdout + done.stderr


def build_path() -> str:
    import hatchling

    return str(Path(str(hatchling.__file__)).parents[1])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("wheel")
    run_here(
        [*PYTHON, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(where), str(ROOT)]
    )
    (built,) = where.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("installed")).install(str(wheel))


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("editable")).install("--editable", str(ROOT))


def door(jobs: Jobs, site: Site, log: Path, **settings: str) -> str:
    """Which door opened for a user of `site`; whichever it was, it led to us."""
    script = jobs.script(LOOK + SAY)
    env = alone(log, DD_PATCH_MODULES="pytorch:true", PYTHONPATH="", **settings)
    facts = seen_by(jobs.run([site.python, *DDTRACE_RUN, site.python, script], env))
    assert ours_in(facts) == OURS
    assert len(rank_spans(log)) == 1
    return str(facts["door"])


def test_a_wheel_opens_the_pth_door_and_torch_finds_it_open(jobs: Jobs, installed: Site, tmp_path: Path) -> None:
    assert door(jobs, installed, tmp_path / "log") == "pth"


def test_a_wheel_needs_no_door_of_torchs(jobs: Jobs, installed: Site, tmp_path: Path) -> None:
    assert door(jobs, installed, tmp_path / "log", TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "pth"


def test_an_editable_install_has_torchs_door(jobs: Jobs, editable: Site, tmp_path: Path) -> None:
    assert not list(editable.packages.glob("ddtrace_pytorch.pth"))
    assert door(jobs, editable, tmp_path / "log") == "torch.backends"


def test_a_wheel_works_where_torch_was_imported_before_ddtrace_run_was(
    jobs: Jobs, installed: Site, tmp_path: Path
) -> None:
    early = installed.packages / "zzz_early.pth"
    early.write_text("import torch\n")
    try:
        assert door(jobs, installed, tmp_path / "log") == "pth"
    finally:
        early.unlink()


def test_a_broken_package_behind_its_door_leaves_no_trace_in_an_interpreter(wheel: Path, tmp_path: Path) -> None:
    site = Site(tmp_path / "broken").install(str(wheel))
    (site.packages / "ddtrace_pytorch" / "patch.py").write_text("raise ImportError('broken')\n")
    look = "import sys; print(sys.meta_path, len(sys.path_hooks), 'ddtrace_pytorch' in sys.modules)"
    plain, ours = (
        subprocess.run([site.python, *options, "-c", look], capture_output=True, text=True, env={}, check=True)
        for options in (["-S"], [])
    )
    assert ours.stderr == ""
    assert ours.stdout == plain.stdout
