"""Says to the native GPU tracer what its spans are children of: to Datadog's, if it is in the process, or else to ours.

The tracer is two C functions that no other library should have; of their interface no more is known than
:data:`SET_ARGUMENTS`. A library may be loaded at any time, so what isn't there is looked for again at each
:meth:`NativeParent.look`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.kernels.symbols import functions

TELL = "tell the native GPU tracer of the rank span"
_SET, _CLEAR = "dd_set_global_parent_context", "dd_clear_global_parent_context"

# The lower and the upper half of the trace's id, the span's, whether there is a sampling priority, and which; the names
# and the values of tags, and how many there are.
SET_ARGUMENTS = (
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_bool,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_char_p),
    ctypes.POINTER(ctypes.c_char_p),
    ctypes.c_size_t,
)
_HALF = (1 << 64) - 1


class Context(NamedTuple):
    """Of a parent: a trace's id of 128 bits, a span's of 64, and `tags` by name."""

    trace_id: int
    span_id: int
    priority: int | None
    tags: tuple[tuple[str, str], ...]


class NativeParent:
    """One session's; any thread may call any method, and none raises. What the tracer was told last is what `describe`
    gave last. `ours` is the kernel sampler's library, and is told where nobody else is."""

    def __init__(self, describe: Callable[[], Context], ours: ctypes.PyDLL | None = None) -> None:
        self._describe = describe
        self._ours = ours
        self._set: Callable[..., object] | None = None
        self._clear: Callable[[], object] | None = None
        self._theirs = False
        self._told: Context | None = None
        # Nobody knows whether the tracer copies what it is given.
        self._kept: tuple[Any, Any] = None, None
        self._over = False
        # A signal's handler may come over the thread that has it.
        self._lock = threading.RLock()

    @safely(TELL)
    def look(self) -> None:
        """Look for the functions, if they weren't there yet, and hand over what there is to know."""
        if not self._theirs:
            # Both: a parent that can't be taken back is worse than none.
            found = functions(_SET, _CLEAR)
            if found is not None:
                self._take(found, theirs=True)
            elif self._set is None and self._ours is not None:
                found = functions(_SET, _CLEAR, library=self._ours)
                if found is not None:
                    self._take(found, theirs=False)
        self.hand_over()

    def _take(self, found: list[Any], theirs: bool) -> None:
        """Tell these from now on, and have those who were told until now forget it."""
        found[0].argtypes, found[1].argtypes = SET_ARGUMENTS, []
        with self._lock:
            if self._theirs:
                return
            clear, told = self._clear, self._told
            # First, for a signal's handler may hand over at any point here.
            self._set, self._clear = found
            self._theirs = theirs
            self._told, self._kept = None, (None, None)
            if clear is not None and told is not None:
                clear()

    @safely(TELL)
    def hand_over(self) -> None:
        """Say who the parent is, if that is another one by now, or known better."""
        with self._lock:
            # Under the lock, and until nothing has changed: whoever looked first must not speak last.
            while self._set is not None and not self._over and (context := self._describe()) != self._told:
                if self._told is None or context.tags != self._told.tags:
                    kept = _texts(name for name, _ in context.tags), _texts(value for _, value in context.tags)
                else:
                    kept = self._kept
                self._set(
                    context.trace_id & _HALF,
                    context.trace_id >> 64 & _HALF,
                    context.span_id & _HALF,
                    context.priority is not None,
                    context.priority or 0,
                    *kept,
                    len(context.tags),
                )
                self._told, self._kept = context, kept

    @safely(TELL)
    def take_back(self) -> None:
        """The parent is no more, and nobody takes its place until :meth:`resume`."""
        with self._lock:
            self._over = True
            if self._clear is not None:
                self._clear()
            self._told, self._kept = None, (None, None)

    @safely(TELL)
    def resume(self) -> None:
        """There is a parent again."""
        self._over = False
        self.look()

    @safely(TELL)
    def abandon(self) -> None:
        """In a forked child: the parent is the parent process'."""
        self._lock = threading.RLock()
        self.take_back()


def _texts(texts: Any) -> Any:
    """An array of C strings; none that holds a zero byte is longer than up to there. NULL where there are none."""
    encoded = [text.encode(errors="replace") for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded) if encoded else None
