"""C that tests build with gcc: stand-ins for libraries of others, and parts of ours that no Python module loads."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "native"
OURS = SOURCES.parent.parent / "native"


def built(name: str, directory: Path, *flags: str) -> Path:
    """The shared object of tests/native/`name`.c, made in `directory`."""
    return compiled([SOURCES / f"{name}.c"], directory / f"{name}.so", "-shared", "-fPIC", *flags)


def compiled(sources: Iterable[Path], made: Path, *flags: str) -> Path:
    """What gcc makes of `sources`, without a warning."""
    command = ["gcc", "-O1", "-Wall", "-Werror", *flags, *map(str, sources), "-o", str(made), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made
