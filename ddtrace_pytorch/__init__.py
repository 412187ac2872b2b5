"""Auto-instrumentation of distributed PyTorch training for Datadog.

Importing this package imports neither torch nor ddtrace.
"""

from __future__ import annotations

from ddtrace_pytorch._version import __version__
from ddtrace_pytorch.patch import get_version, patch, unpatch

TYPE_CHECKING = False  # type checkers know the name; typing is not to be imported at every start
if TYPE_CHECKING:
    from typing import Any

    from ddtrace_pytorch.api import event, profile_window, scalar, set_step, span, step_tag

_RECORDS = ("event", "profile_window", "scalar", "set_step", "span", "step_tag")

__all__ = [
    "__version__",
    "event",
    "get_version",
    "patch",
    "profile_window",
    "scalar",
    "set_step",
    "span",
    "step_tag",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """What not every process uses is imported when it is first asked for; the interpreter's start is everybody's."""
    if name not in _RECORDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddtrace_pytorch import api

    for record in _RECORDS:
        globals()[record] = getattr(api, record)
    return globals()[name]
