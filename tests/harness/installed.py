"""What a test needs of other people's packages."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(package: str) -> None:
    """Skip, with its name, where it isn't installed."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
