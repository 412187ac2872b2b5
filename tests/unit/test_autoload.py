"""The doors: whoever imports the built-in integration's modules gets ours, in whatever order things happen."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ddtrace_pytorch import autoload

ROOT = Path(__file__).resolve().parents[2]

PATCH = """
def patch(): return "built-in"
def unpatch():
    calls.append("unpatch")
    from ddtrace.contrib.internal.pytorch import _distributed
    _distributed.uninstall()
def get_version(): return "built-in"
def _supported_versions(): return {}
def something_else(): return "built-in"
calls = []
"""
DISTRIBUTED = """
def install(): return "built-in"
def uninstall(): from ddtrace.contrib.internal.pytorch import patch; patch.calls.append("uninstall")
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with a stand-in for ddtrace's built-in integration, and no torch."""
    package = tmp_path / "ddtrace" / "contrib" / "internal" / "pytorch"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:3]):
        (folder / "__init__.py").touch()
    (package / "patch.py").write_text(PATCH)
    (package / "_distributed.py").write_text(DISTRIBUTED)
    return tmp_path


def python(world: Path, code: str) -> None:
    prelude = f"import sys; sys.path[:0] = [{str(world)!r}, {str(ROOT)!r}]\nfrom ddtrace_pytorch import autoload\n"
    where = "import ddtrace.contrib.internal.pytorch."
    code = code.replace("IMPORT_PATCH", where + "patch as slot").replace("IMPORT_NET", where + "_distributed as net")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", prelude + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


OURS = """
ours = sys.modules["ddtrace_pytorch.patch"]
for name in ("patch", "unpatch", "get_version", "_supported_versions"):
    assert getattr(slot, name) is getattr(ours, name), name
assert slot.something_else() == "built-in"
"""
NET = """
ours = sys.modules["ddtrace_pytorch.patch"]
assert net.install is ours.patch and net.uninstall is ours.unpatch
"""


@pytest.mark.parametrize(
    "order",
    [
        "autoload.install(); IMPORT_PATCH",
        "IMPORT_PATCH; autoload.install()",
        "autoload.install(); autoload.torch_backend(); IMPORT_PATCH",
        "autoload.torch_backend(); autoload.torch_backend(); IMPORT_PATCH; autoload.torch_backend()",
        "IMPORT_PATCH; autoload.install(); import importlib; importlib.reload(slot)",
    ],
)
def test_the_slot_is_ours_in_every_order(world: Path, order: str) -> None:
    python(world, order + OURS)


@pytest.mark.parametrize("order", ["autoload.install(); IMPORT_NET", "IMPORT_NET; autoload.install()"])
def test_the_net_below_the_slot_is_ours_too(world: Path, order: str) -> None:
    python(world, order + NET)


def test_a_door_that_opens_while_the_slot_is_being_imported_is_in_time(world: Path) -> None:
    patch = world / "ddtrace" / "contrib" / "internal" / "pytorch" / "patch.py"
    patch.write_text(
        "def get_version(): return 'built-in'\nfrom ddtrace_pytorch import autoload; autoload.torch_backend()\n" + PATCH
    )
    # The functions defined after the door opened are the built-in's; what they call is ours.
    python(world, "IMPORT_PATCH; IMPORT_NET" + NET)


def test_the_first_door_is_remembered(world: Path) -> None:
    python(world, "autoload.install(); autoload.torch_backend(); assert autoload.opened_by == 'pth'")
    python(world, "autoload.torch_backend(); autoload.install(); assert autoload.opened_by == 'torch.backends'")
    python(world, "assert autoload.opened_by is None")


def test_a_finder_that_got_in_front_is_overtaken(world: Path) -> None:
    python(
        world,
        """
from importlib.machinery import PathFinder
autoload.install()
class InFront:
    # As pytest's assertion rewriter: answers for some modules, and leaves most to those behind it.
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if name.endswith("patch") else None
sys.meta_path.insert(0, InFront())
IMPORT_PATCH
"""
        + OURS,
    )


def test_the_built_in_is_retired_by_its_own_functions_and_the_slot_stays_ours(world: Path) -> None:
    python(
        world,
        "IMPORT_PATCH; IMPORT_NET; autoload.install(); autoload.retire_built_in()\n"
        "assert slot.calls == ['unpatch', 'uninstall'], slot.calls" + OURS + NET,
    )


def test_nothing_to_retire_is_nothing_done(world: Path) -> None:
    python(world, "autoload.install(); autoload.retire_built_in(); assert 'ddtrace' not in sys.modules")


def test_a_door_imports_nothing_and_starts_nothing(world: Path) -> None:
    python(
        world,
        """
before = set(sys.modules), len(sys.meta_path)
autoload.install()
assert set(sys.modules) == before[0]
assert len(sys.meta_path) == before[1] + 1
autoload.install(); autoload.torch_backend()
assert len(sys.meta_path) == before[1] + 1
""",
    )


def test_the_door_never_makes_import_torch_fail(world: Path) -> None:
    # A slot that cannot be written to is a failure of ours that nobody foresaw.
    code = """
import types
class Frozen(types.ModuleType):
    def __setattr__(self, name, value): raise RuntimeError("read only")
name = "ddtrace.contrib.internal.pytorch.patch"
sys.modules[name] = module = Frozen(name)
vars(module)["patch"] = print
import io; said, sys.stderr = sys.stderr, io.StringIO()
autoload.torch_backend()
text, sys.stderr = sys.stderr.getvalue(), said
assert "read only" in text and text.count("\\n") == 1, text
"""
    python(world, code)


@pytest.fixture
def module_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported and has not been, with the door open."""
    name = "a_module_to_come"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    others = [finder for finder in sys.meta_path if not isinstance(finder, autoload.Finder)]
    monkeypatch.setattr(sys, "meta_path", [autoload.Finder(), *others])
    yield name
    sys.modules.pop(name, None)


def test_a_module_is_told_of_once_it_has_run(module_to_come: str) -> None:
    told: list[ModuleType] = []
    autoload.after_import(module_to_come, told.append)
    assert told == []
    module = importlib.import_module(module_to_come)
    assert told == [module]
    assert module.value == 1
    assert importlib.import_module(module_to_come) is module
    assert told == [module]


def test_a_module_already_there_is_told_of_at_once(module_to_come: str) -> None:
    module = importlib.import_module(module_to_come)
    told: list[ModuleType] = []
    autoload.after_import(module_to_come, told.append)
    assert told == [module]


def test_who_has_lost_interest_is_not_told(module_to_come: str) -> None:
    told: list[ModuleType] = []
    forget = autoload.after_import(module_to_come, told.append)
    forget()
    forget()
    importlib.import_module(module_to_come)
    assert told == []


def test_a_module_looks_the_same_as_without_us(module_to_come: str) -> None:
    autoload.after_import(module_to_come, lambda module: None)
    module = importlib.import_module(module_to_come)
    spec = module.__spec__
    assert spec is not None
    assert spec.origin == module.__file__
    assert importlib.util.find_spec(module_to_come) is spec
    loader = spec.loader
    assert loader.get_source(module_to_come) == "value = 1\n"  # type: ignore[union-attr]
    assert loader.is_package(module_to_come) is False  # type: ignore[union-attr]


def test_a_module_that_cannot_be_found_fails_as_ever(module_to_come: str) -> None:
    autoload.after_import("no_such_module_anywhere", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        importlib.import_module("no_such_module_anywhere")


def test_a_module_that_fails_to_import_fails_as_ever(module_to_come: str, tmp_path: Path) -> None:
    told: list[ModuleType] = []
    (tmp_path / f"{module_to_come}.py").write_text("raise OSError('theirs')\n")
    autoload.after_import(module_to_come, told.append)
    with pytest.raises(OSError, match="theirs"):
        importlib.import_module(module_to_come)
    assert told == []
