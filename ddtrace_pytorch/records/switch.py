"""Whether the user's records are taken, and by whom. The one place that the public functions look at.

Kept apart from them so that looking costs the read of a name, and imports nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtrace_pytorch.records.recorder import Recorder

# None: nobody takes them.
recorder: Recorder | None = None


def nobody() -> None:
    """Makes no recorder."""


def before_torch() -> None:
    """Where ddtrace has been asked for us, and waits for torch to be imported, a process may record and never import
    it."""
    monkey = sys.modules.get("ddtrace._monkey")
    if "torch" not in sys.modules and "pytorch" in getattr(monkey, "_get_patched_modules", tuple)():
        from ddtrace_pytorch.instrumentation import listen

        listen()


# Makes the recorder where the functions that record are first asked for.
wake: Callable[[], object] = before_torch


def _not_known_yet() -> bool:
    find_compiler()
    return compiling is not _not_known_yet and compiling()


# Whether it is Dynamo that reads the code: it takes torch's own function for a constant.
compiling: Callable[[], bool] = _not_known_yet


def find_compiler() -> None:
    """Make :data:`compiling` torch's own function, once torch is imported; the first releases have none."""
    global compiling
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    if compiler is not None:
        names = ("is_dynamo_compiling", "is_compiling")
        found = (getattr(compiler, name) for name in names if hasattr(compiler, name))
        compiling = next(found, lambda: False)


find_compiler()
