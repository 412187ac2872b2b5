"""A profiler window where the user's code says so, in the session that is open then; nothing where there is none."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ddtrace_pytorch.border import safely


class ByHand:
    """One window, from its ``with`` to the end of that."""

    def __init__(self) -> None:
        self._windows: Any = None

    def __enter__(self) -> None:
        windows = _windows()
        if windows is not None and windows.begin_by_hand():
            self._windows = windows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        windows, self._windows = self._windows, None
        if windows is not None:
            windows.end_by_hand()


@safely("find the session for a profiler window")
def _windows() -> Any:
    # Not imported, nothing is switched on.
    instrumentation = sys.modules.get("ddtrace_pytorch.instrumentation")
    session = instrumentation.current_session() if instrumentation is not None else None
    return session.windows if session is not None and "torch" in sys.modules else None
