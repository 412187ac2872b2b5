"""Shared objects that tests build with gcc, to stand in for libraries of others."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "native"


def built(name: str, directory: Path, *flags: str) -> Path:
    """The shared object of tests/native/`name`.c, made in `directory`."""
    made = directory / f"{name}.so"
    source = str(SOURCES / f"{name}.c")
    command = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", *flags, source, "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made
