"""C functions that a library of others may have brought into the process, at any time."""

from __future__ import annotations

import ctypes
from typing import Any


def functions(*names: str, library: ctypes.PyDLL | None = None) -> list[Any] | None:
    """The functions of those names, without a result; None where one of them isn't there now. Those that everybody in
    the process sees, or else those of one `library`."""
    # That lets nobody else run in between: letting others run costs more than the call.
    here = ctypes.PyDLL(None) if library is None else library
    try:
        found = [here[name] for name in names]
    except AttributeError:
        return None
    for function in found:
        function.restype = None
    return found
