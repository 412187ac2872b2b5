"""A disk with hardly any room."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of its own at `place`, which it makes, of `size`: ``64k``."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free on `disk`; gives the file to delete to have it back."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        while file.write(b"x" * (1 << 20)) == 1 << 20:
            pass
    return filler
