"""What a user gets from the wheel, and that the versions we test with are the ones we say."""

from __future__ import annotations

import email
import itertools
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from ddtrace_pytorch.kernels.sampler_library import INTERFACE, NOT_OPEN, SamplerLibrary

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / ".riot" / "requirements"


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    where = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, str(where), cwd=ROOT)
    (built,) = where.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def riotfile() -> ModuleType:
    spec = spec_from_file_location("riotfile", ROOT / "riotfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metadata_of(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_wheel_holds_every_module_and_its_type_marker(wheel: zipfile.ZipFile) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "ddtrace_pytorch").rglob("*.py")}
    packed = set(wheel.namelist())
    assert sources <= packed
    assert "ddtrace_pytorch/py.typed" in packed


def test_wheel_holds_what_the_page_of_a_report_is_made_of(wheel: zipfile.ZipFile) -> None:
    for name in ("ddtrace_pytorch/cli/page/page.css", "ddtrace_pytorch/cli/page/page.js"):
        assert wheel.read(name) == (ROOT / name).read_bytes()


def test_wheel_holds_the_parts_in_c_for_this_python_alone(wheel: zipfile.ZipFile) -> None:
    built = {name for name in wheel.namelist() if name.endswith(".so")}
    parts = ("collectives/_counting", "records/_at_hand", "training/_collecting")
    modules = {f"ddtrace_pytorch/{part}{sysconfig.get_config_var('EXT_SUFFIX')}" for part in parts}
    assert built == modules | {"ddtrace_pytorch/kernels/libkernel_sampler.so"}
    assert "Root-Is-Purelib: false" in metadata_of(wheel, "WHEEL")
    assert f"Tag: cp3{sys.version_info.minor}-" in metadata_of(wheel, "WHEEL")


def test_sampler_of_the_wheel_loads_and_has_what_callers_expect(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    sampler = SamplerLibrary(Path(wheel.extract("ddtrace_pytorch/kernels/libkernel_sampler.so", tmp_path)))
    assert sampler.quick.ks_interface() == INTERFACE
    assert sampler.on() == NOT_OPEN


def test_wheel_is_of_python_alone_where_there_is_no_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "*.so", "benchmarks", "tests"))
    monkeypatch.setenv("PATH", "/nowhere")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    said = run(sys.executable, "-c", build, str(tmp_path), cwd=checkout)
    assert "counting.c is left out, its work is done in Python" in said
    assert "kernel_sampler.c is left out, nothing samples kernels" in said
    assert "-py3-none-any.whl" in said


def test_wheel_holds_nothing_but_the_package_its_door_and_its_metadata(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    (metadata,) = [top for top in tops if top.endswith(".dist-info")]
    assert tops == {"ddtrace_pytorch", "ddtrace_pytorch.pth", metadata}


def test_wheel_puts_the_pth_door_at_the_root_of_site_packages(wheel: zipfile.ZipFile) -> None:
    lines = wheel.read("ddtrace_pytorch.pth").decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("import "), "site only runs lines that begin with `import`"


def test_wheel_declares_the_command_and_the_torch_door(wheel: zipfile.ZipFile) -> None:
    declared = metadata_of(wheel, "entry_points.txt").split()
    assert "[torch.backends]" in declared
    assert declared[declared.index("[torch.backends]") + 1 :][:3] == [
        "ddtrace_pytorch",
        "=",
        "ddtrace_pytorch.autoload:torch_backend",
    ]
    assert declared[declared.index("[console_scripts]") + 1 :][:3] == [
        "ddtrace-pytorch",
        "=",
        "ddtrace_pytorch.cli.main:main",
    ]


def test_wheel_carries_the_licence_and_does_not_force_a_build_of_torch(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_string(metadata_of(wheel, "METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in metadata_of(wheel, "licenses/LICENSE")
    required = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert {re.split(r"[<>=!~]", need)[0] for need in required} == {
        "click",
        "ddtrace",
        "nvidia-ml-py",
        "packaging",
        "rich",
        "wrapt",
    }


def test_version_of_the_wheel_is_the_one_the_package_says(wheel: zipfile.ZipFile) -> None:
    source = (ROOT / "ddtrace_pytorch" / "_version.py").read_text()
    assert email.message_from_string(metadata_of(wheel, "METADATA"))["Version"] == source.split('"')[-2]


def start_python_with_door(site: Path, *code: str) -> str:
    """Output of a Python that finds our .pth file in `site`, and no installed copy of the package."""
    (site / "ddtrace_pytorch.pth").write_bytes((ROOT / "ddtrace_pytorch.pth").read_bytes())
    add = f"import site; site.addsitedir({str(site)!r}); print('started')"
    return run(sys.executable, "-I", "-S", "-c", "; ".join((add, *code)))


def test_door_without_its_package_starts_python_in_silence(tmp_path: Path) -> None:
    assert start_python_with_door(tmp_path) == "started\n"


def test_door_to_a_broken_package_starts_python_in_silence(tmp_path: Path) -> None:
    package = tmp_path / "ddtrace_pytorch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "autoload.py").write_text("def install():\n    raise RuntimeError('broken')\n")
    assert start_python_with_door(tmp_path, "import sys; print('ddtrace_pytorch.autoload' in sys.modules)") == (
        "started\nTrue\n"
    )


def test_door_imports_neither_torch_nor_ddtrace_nor_wrapt(tmp_path: Path) -> None:
    (tmp_path / "ddtrace_pytorch").symlink_to(ROOT / "ddtrace_pytorch")
    loaded = "import sys; print(sorted({'torch', 'ddtrace', 'wrapt', 'ddtrace_pytorch.autoload'} & set(sys.modules)))"
    assert start_python_with_door(tmp_path, loaded) == "started\n['ddtrace_pytorch.autoload']\n"


def test_every_row_of_ci_has_a_lockfile_and_every_lockfile_a_row(riotfile: ModuleType) -> None:
    rows = {f"{row.short_hash}.txt" for row in riotfile.venv.instances() if row.name in riotfile.CI}
    assert rows == {path.name for path in REQUIREMENTS.glob("*.txt")}, "riotfile.py has changed: run scripts/lock"


def test_lockfiles_pin_what_their_rows_ask_for(riotfile: ModuleType) -> None:
    from packaging.requirements import Requirement

    for row in riotfile.venv.instances():
        if row.name in riotfile.CI:
            pins = [Requirement(line) for line in (REQUIREMENTS / f"{row.short_hash}.txt").read_text().splitlines()]
            pinned = {pin.name: next(iter(pin.specifier)).version for pin in pins}
            for wanted in map(Requirement, row.full_pkg_str.replace("'", "").split()):
                assert wanted.specifier.contains(pinned[wanted.name]), (row.name, wanted)


def test_lockfiles_name_no_place_that_only_one_machine_has() -> None:
    for path in REQUIREMENTS.glob("*.txt"):
        for line in path.read_text().splitlines():
            assert re.fullmatch(r"[a-z0-9.\-]+==[a-z0-9.]+", line), f"{path.name}: {line}"


def test_matrix_covers_every_minor_of_torch_2_and_the_pythons_we_promise(riotfile: ModuleType) -> None:
    minors = [int(release.split(".")[1]) for release in riotfile.TORCH]
    assert minors == list(range(16))
    assert {python for pythons in riotfile.TORCH.values() for python in pythons} == {
        "3.10",
        "3.11",
        "3.12",
        "3.13",
        "3.14",
    }


def test_tests_run_against_the_installed_wheel_when_riot_runs_them() -> None:
    import os

    if os.environ.get("RIOT"):
        import ddtrace_pytorch

        assert Path(str(ddtrace_pytorch.__file__)).is_relative_to(sysconfig.get_path("purelib"))


def test_readme_lists_every_setting_with_its_default_and_meaning() -> None:
    from ddtrace_pytorch.settings import TABLE

    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    below = readme[readme.index("| variable | default | meaning |") + 2 :]
    listed = list(itertools.takewhile(lambda line: line.startswith("|"), below))
    default = {setting.variable: f"`{setting.default}`" if setting.default else "–" for setting in TABLE}
    assert listed == [f"| `{row.variable}` | {default[row.variable]} | {row.meaning} |" for row in TABLE]
