"""The four functions that ddtrace calls, before anything behind them is loaded."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

# The attribute of that name is the function.
from ddtrace_pytorch.patch import SUPPORTED_TORCH, _supported_versions, supports

ROOT = Path(__file__).resolve().parents[2]


def python(code: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ddtrace_pytorch; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("release", "accepted"),
    [
        ("1.13.1", False),
        ("2.0.0a0+gitabc", True),
        ("2.0.1", True),
        ("2.9.0a0+1234.nv25.10", True),
        ("2.13.0+cpu", True),
        ("2.15.0.dev20261128+cu132", True),
        ("3.0.0", False),
        ("20.1", False),
    ],
)
def test_ddtraces_check_and_ours_accept_the_same_releases(release: str, accepted: bool) -> None:
    assert supports(release) is accepted
    assert (release in SpecifierSet(_supported_versions()["torch"])) is accepted


def test_the_range_is_said_once() -> None:
    assert _supported_versions() == {"torch": SUPPORTED_TORCH}


def test_the_version_is_known_before_torch_is_imported() -> None:
    done = python("print(ddtrace_pytorch.get_version()); assert 'torch' not in sys.modules")
    assert done.stdout.strip() == version("torch")


def test_a_torch_that_is_still_being_imported_has_its_version_too() -> None:
    code = "import types; sys.modules['torch'] = types.ModuleType('torch'); print(ddtrace_pytorch.get_version())"
    assert python(code).stdout.strip() == version("torch")


def test_unpatch_of_what_was_never_patched_imports_nothing() -> None:
    python("before = set(sys.modules); ddtrace_pytorch.unpatch(); assert set(sys.modules) == before")


def test_a_broken_room_is_a_warning_and_not_an_error() -> None:
    broken = "sys.modules['ddtrace_pytorch.instrumentation'] = None"
    done = python(f"{broken}; ddtrace_pytorch.patch(); ddtrace_pytorch.patch()")
    (warning,) = done.stderr.splitlines()
    assert "could not instrument torch" in warning
    assert "ddtrace_pytorch.instrumentation" in warning


def test_without_torch_there_is_no_version() -> None:
    bare = "sys.path[:] = [path for path in sys.path if 'site-packages' not in path]"
    assert python(f"{bare}; print(repr(ddtrace_pytorch.get_version()))").stdout.strip() == "''"
