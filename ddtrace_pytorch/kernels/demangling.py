"""The names of kernels as their authors wrote them: CUPTI gives those that the linker sees."""

from __future__ import annotations

import ctypes
from functools import lru_cache

# What there was no room to keep the name of.
UNNAMED = "other kernels"

# Of longer ones, with templates in templates, nobody reads the end, and to make them takes its time.
_LONGEST = 4_000


def name_of(name: str | None) -> str:
    """What the kernel of that `name` is called; None: it wasn't kept."""
    return demangled(name or UNNAMED)


@lru_cache(maxsize=4_096)
def demangled(name: str) -> str:
    """`name` as in C++, if it is a mangled one."""
    if not name.startswith("_Z") or len(name) > _LONGEST:
        return name
    try:
        library = ctypes.CDLL("libstdc++.so.6")  # torch has it loaded
    except OSError:
        return name
    demangle, free = library.__cxa_demangle, ctypes.CDLL(None).free
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    demangle.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    status = ctypes.c_int()
    made = demangle(name.encode(errors="surrogateescape"), None, None, ctypes.byref(status))
    if not made:
        return name
    try:
        return ctypes.string_at(made).decode(errors="replace")
    finally:
        free(made)
