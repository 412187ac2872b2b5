"""What keeps this package out of torch.compile's sight."""

from __future__ import annotations

import gc
import itertools
import sys
from types import ModuleType

import pytest
import torch  # noqa: F401  without it there is nothing to keep out of

from ddtrace_pytorch import compiler


@pytest.mark.once
def test_modules_may_come_while_those_of_the_package_are_looked_through() -> None:
    """As another thread's do, which runs when collecting garbage runs a finalizer: up to Python 3.11, at any object."""
    numbers, before = itertools.count(), set(sys.modules)

    def comes(phase: str, info: dict[str, int]) -> None:
        sys.modules[f"came {next(numbers)}"] = ModuleType("came")

    threshold = gc.get_threshold()
    gc.callbacks.append(comes)
    gc.set_threshold(1)
    try:
        compiler.leave_package_uncompiled()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(comes)
        for name in set(sys.modules) - before:
            del sys.modules[name]
