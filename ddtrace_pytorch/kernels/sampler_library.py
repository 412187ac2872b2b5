"""The kernel sampler, ``native/kernel_sampler.c``, from Python: what its calls are and what its bytes mean.

It is a plain shared library, loaded so that nobody else sees its symbols, and built with the wheel where there is a C
compiler. Its calls give 0, or what is wrong, which :attr:`SamplerLibrary.error` then says in words.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from ctypes import POINTER, c_char, c_char_p, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

# The library has the same number, and whoever changes what is seen of it here changes both.
INTERFACE = 2

OK, ARGUMENT, NO_LIBRARY, NO_FUNCTION, NOT_OPEN, REFUSED, FORKED = range(7)
KERNEL, COPY, FILL = 10, 1, 2  # kinds
COPIES, FILLS = 1, 2  # flags
REASONS = ("unknown_kind", "cut_short", "untimed", "backwards", "out_of_window", "nameless", "unreadable", "outside")
BUCKETS = 64
# Records kept one by one whose memory isn't given back each time.
AT_HAND = 16_384

_FILE = Path(__file__).with_name("libkernel_sampler.so")
_NONE = 2**32 - 1
_ROW = struct.Struct(f"=4I3Q{BUCKETS}Q")
_RAW = struct.Struct("=3Q6I")
_PARENT = struct.Struct("=3QIi2Q")
_ERROR_BYTES = 512


class Limits(NamedTuple):
    """Of the library: bytes of one and how many at most."""

    row_size: int
    raw_size: int
    totals_size: int
    rows: int
    name_bytes: int
    raws: int
    buckets: int
    reasons: int
    names: int
    name_at_most: int
    buffers: int
    buffer: int
    parent_size: int
    tags: int
    tag_name: int
    tag_value: int


class Counters(NamedTuple):
    """Of all since the last time; how many, where it doesn't say bytes."""

    records: int
    buffers: int
    rows: int
    names: int
    name_bytes: int
    raws: int
    raws_left_out: int
    rows_full: int
    names_full: int
    names_cut: int
    unknown_kind: int
    cut_short: int
    untimed: int
    backwards: int
    out_of_window: int
    nameless: int
    unreadable: int
    outside: int
    cupti_dropped: int
    late_buffers: int
    late_bytes: int
    strays: int
    refusals: int
    held: int
    steps: int

    def dropped(self) -> dict[str, int]:
        """The reasons for which records were dropped, with how many."""
        return {reason: many for reason in REASONS if (many := getattr(self, reason))}


class Key(NamedTuple):
    """What ran where."""

    name: str
    kind: int
    device: int
    stream: int


class Counted(NamedTuple):
    """Of what ran under one name on one stream; times in ns, `buckets` as in :mod:`~ddtrace_pytorch.histogram`."""

    many: int
    total: int
    longest: int
    buckets: dict[int, int]


class Raw(NamedTuple):
    """One record; times in ns since the epoch, on CUPTI's clock. No `name`: there was no room for it."""

    start: int
    end: int
    name: str | None
    kind: int
    device: int
    stream: int
    correlation: int
    graph_node: int
    graph: int


class Taken(NamedTuple):
    """What was counted since the last time; `other`: all that found no room."""

    sums: dict[Key, Counted]
    other: Counted
    raws: list[Raw]
    totals: Counters


class Copied(NamedTuple):
    """The same as bytes, for whoever has the time to read them."""

    totals: Counters
    rows: bytes
    names: bytes
    raws: bytes

    def read(self) -> Taken:
        names = self._texts()
        other, *rows = _ROW.iter_unpack(self.rows)
        sums = {Key(names[row[0]], *row[1:4]): _sum(row) for row in rows}
        return Taken(sums, _sum(other), list(self.kept()), self.totals)

    def kept(self) -> Iterator[Raw]:
        """The records that were kept, read one by one."""
        names = self._texts()
        for start, end, node, name, kind, device, stream, correlation, graph in _RAW.iter_unpack(self.raws):
            named = None if name == _NONE else names[name]
            yield Raw(start, end, named, kind, device, stream, correlation, node, graph)

    def _texts(self) -> list[str]:
        return [_text(name) for name in self.names.split(b"\0")[:-1]]


class Parent(NamedTuple):
    """Whom what the GPU does belongs to, as the library was told; `left_out`: tags that it had no room for."""

    trace_id: int
    span_id: int
    priority: int | None
    tags: tuple[tuple[str, str], ...]
    left_out: int


def find() -> Path | None:
    """The library of this version, beside this module; None where it was not built, or for another version."""
    try:
        interface = ctypes.CDLL(str(_FILE)).ks_interface
    except (OSError, AttributeError):
        return None
    interface.restype = c_uint32
    return _FILE if interface() == INTERFACE else None


def libcupti() -> str | None:
    """The libcupti that this process has, as torch brings it; None where it has none."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        return mapped(maps, "libcupti.so")


def mapped(maps: Iterable[str], name: str) -> str | None:
    """The first file mapped whose name begins so and that is still there, of lines as in /proc/self/maps."""
    for line in maps:
        path = line.rstrip("\n").split(maxsplit=5)[5:]
        if path and os.path.basename(path[0]).startswith(name) and os.path.exists(path[0]):
            return path[0]
    return None


def opened() -> SamplerLibrary:
    """The library of this process, open. RuntimeError, which says why, where there can be none."""
    path, cupti = find(), libcupti()
    if path is None:
        raise RuntimeError("the kernel sampler was not built")
    if cupti is None:
        raise RuntimeError("torch has brought no libcupti")
    library = SamplerLibrary(path)
    if library.open(cupti):
        raise RuntimeError(library.error)
    return library


class SamplerLibrary:
    """The library at that path. `quick` is how to call what is called at each step: nobody else runs in between, for
    letting others run costs more than the call. What may wait for CUPTI lets others run."""

    def __init__(self, path: Path) -> None:
        self.quick = quick = ctypes.PyDLL(str(path))
        self._waiting = waiting = ctypes.CDLL(str(path))
        self._arm, self._keep = quick.ks_arm, quick.ks_keep
        for function in (self._arm, self._keep, waiting.ks_on):
            function.argtypes = [c_uint32]
        self._error = quick.ks_error
        self._error.argtypes, self._error.restype = [], c_char_p
        waiting.ks_open.argtypes = [c_char_p]
        waiting.ks_take.argtypes = [c_void_p, c_uint32, c_void_p, c_uint32, c_void_p, c_uint32, c_void_p]
        quick.ks_step_error.argtypes = [c_void_p, c_uint32]
        quick.ks_context.argtypes = [c_void_p]
        quick.ks_limits.argtypes, quick.ks_limits.restype = [POINTER(c_uint32), c_uint32], c_uint32
        numbers = (c_uint32 * len(Limits._fields))()
        quick.ks_limits(numbers, len(numbers))
        self.limits = limits = Limits(*numbers)
        self._rows = _room(limits.rows * _ROW.size)
        self._names = _room(limits.name_bytes)
        self._raws = _room(limits.raws * _RAW.size)

    def open(self, libcupti: str) -> int:
        """Find CUPTI's functions in the library of that name."""
        return int(self._waiting.ks_open(os.fsencode(libcupti)))

    def on(self, flags: int = 0) -> int:
        """Record what is launched from now on: kernels, and what `flags` ask for."""
        return int(self._waiting.ks_on(flags))

    def arm(self, flags: int = 0) -> int:
        """Record the next step: on where it begins, paused where it ends, unless this is called again before that."""
        return int(self._arm(flags))

    def pause(self) -> int:
        """Record nothing that is launched from now on; what was launched still counts when it ends."""
        return int(self._waiting.ks_pause())

    def flush(self) -> int:
        """Have CUPTI hand over what has ended."""
        return int(self._waiting.ks_flush())

    def off(self) -> int:
        """Record nothing any more: nobody hears of what hasn't ended by now."""
        return int(self._waiting.ks_off())

    def keep(self, many: int) -> int:
        """Keep so many of the records that come next as they are."""
        return int(self._keep(many))

    @property
    def error(self) -> str:
        """What was wrong with this thread's last call that gave anything but 0."""
        return str(self._error().decode(errors="replace"))

    def step_error(self) -> str | None:
        """What was wrong with the last switch of a step that failed since this was called last."""
        words = (c_char * _ERROR_BYTES)()
        self.quick.ks_step_error(words, len(words))
        return words.value.decode(errors="replace") or None

    def parent(self) -> Parent | None:
        """What it was told last; None where there is no parent, or none any more."""
        limits = self.limits
        told = (c_char * limits.parent_size)()
        if self.quick.ks_context(told) or not any(told.raw[: _PARENT.size]):
            return None
        low, high, span, has_priority, priority, many, left_out = _PARENT.unpack_from(told)
        tag = struct.Struct(f"{limits.tag_name}s{limits.tag_value}s")
        tags = (tag.unpack_from(told, _PARENT.size + number * tag.size) for number in range(many))
        texts = tuple((_text(name), _text(value)) for name, value in tags)
        return Parent(high << 64 | low, span, priority if has_priority else None, texts, left_out)

    def take(self) -> Taken:
        """What was counted since the last time, by one thread at a time. RuntimeError where it isn't open, or in a
        forked child."""
        return self.copy().read()

    def copy(self) -> Copied:
        """The same, unread: some milliseconds at most, where reading may take a second."""
        limits = self.limits
        into = (c_uint64 * len(Counters._fields))()
        if self._waiting.ks_take(
            _into(self._rows), limits.rows, _into(self._names), limits.name_bytes, _into(self._raws), limits.raws, into
        ):
            raise RuntimeError(self.error)
        totals = Counters(*into)
        copied = Copied(
            totals,
            self._rows[: totals.rows * _ROW.size],
            self._names[: totals.name_bytes],
            self._raws[: totals.raws * _RAW.size],
        )
        if totals.raws > AT_HAND:
            self._raws.madvise(mmap.MADV_DONTNEED)
        return copied


def _room(size: int) -> mmap.mmap:
    """Of which only what is used takes memory."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _into(room: mmap.mmap) -> Any:
    return (c_char * len(room)).from_buffer(room)


def _text(raw: bytes) -> str:
    """Two different names stay two, whatever their bytes."""
    return raw.partition(b"\0")[0].decode(errors="backslashreplace")


def _sum(row: tuple[Any, ...]) -> Counted:
    count, total, longest, *buckets = row[4:]
    return Counted(count, total, longest, {bucket: many for bucket, many in enumerate(buckets) if many})
