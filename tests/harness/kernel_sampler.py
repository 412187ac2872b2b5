"""native/kernel_sampler.c and a libcupti that replays records, both through ctypes."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .native import OURS, SOURCES, compiled

OK, ARGUMENT, NO_LIBRARY, NO_FUNCTION, NOT_OPEN, REFUSED, FORKED = range(7)
KERNEL, COPY, FILL = 10, 1, 2
COPIES, FILLS = 1, 2  # flags of on()
REASONS = ("unknown_kind", "cut_short", "untimed", "backwards", "out_of_window", "nameless", "unreadable", "outside")
BUCKETS = 64
NONE = 2**32 - 1


class Row(ctypes.Structure):
    _fields_ = [
        *((name, c_uint32) for name in "name kind device stream".split()),
        *((name, c_uint64) for name in "count total longest".split()),
        ("buckets", c_uint64 * BUCKETS),
    ]


class Raw(ctypes.Structure):
    _fields_ = [
        *((name, c_uint64) for name in "start end graph_node".split()),
        *((name, c_uint32) for name in "name kind device stream correlation graph".split()),
    ]


class Totals(ctypes.Structure):
    _fields_ = [
        *((name, c_uint64) for name in "records buffers rows names name_bytes raws raws_left_out".split()),
        *((name, c_uint64) for name in "rows_full names_full names_cut".split()),
        *((name, c_uint64) for name in REASONS),
        *((name, c_uint64) for name in "cupti_dropped late_buffers late_bytes strays refusals held".split()),
    ]

    def dropped(self) -> dict[str, int]:
        """The reasons for which records were dropped, with how many."""
        return {reason: many for reason in REASONS if (many := getattr(self, reason))}


class Limits(NamedTuple):
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


class Sum(NamedTuple):
    """Of what ran under one name on one stream; times in ns."""

    count: int
    total: int
    longest: int
    buckets: dict[int, int]


Key = tuple[str, int, int, int]  # name, kind, device, stream


@dataclass
class Taken:
    sums: dict[Key, Sum]
    other: Sum
    names: list[str]
    raws: list[Raw]
    totals: Totals


class Sampler:
    def __init__(self, library: Path) -> None:
        self.c = c = ctypes.CDLL(str(library))
        c.ks_error.restype = c_char_p
        c.ks_interface.restype = c_uint32
        c.ks_open.argtypes = [c_char_p]
        c.ks_limits.argtypes = [POINTER(c_uint32), c_uint32]
        c.ks_limits.restype = c_uint32
        for function in (c.ks_on, c.ks_keep):
            function.argtypes = [c_uint32]
        c.ks_take.argtypes = [c_void_p, c_uint32, c_void_p, c_uint32, c_void_p, c_uint32, c_void_p]
        numbers = (c_uint32 * c.ks_limits(None, 0))()
        c.ks_limits(numbers, len(numbers))
        self.limits = Limits(*numbers)
        self._rows = (Row * self.limits.rows)()
        self._names = (c_char * self.limits.name_bytes)()
        self._raws = (Raw * self.limits.raws)()

    def open(self, library: Path | str) -> int:
        return int(self.c.ks_open(str(library).encode()))

    def on(self, flags: int = 0) -> int:
        return int(self.c.ks_on(flags))

    def pause(self) -> int:
        return int(self.c.ks_pause())

    def flush(self) -> int:
        return int(self.c.ks_flush())

    def off(self) -> int:
        return int(self.c.ks_off())

    def keep(self, many: int) -> int:
        return int(self.c.ks_keep(many))

    @property
    def error(self) -> str:
        return str(self.c.ks_error().decode())

    def take_raw(self, totals: Totals, rows: int | None = None) -> int:
        rows = self.limits.rows if rows is None else rows
        names, raws = self.limits.name_bytes, self.limits.raws
        return int(self.c.ks_take(self._rows, rows, self._names, names, self._raws, raws, ctypes.byref(totals)))

    def take(self) -> Taken:
        totals = Totals()
        assert self.take_raw(totals) == OK, self.error
        names = [name.decode() for name in self._names.raw[: totals.name_bytes].split(b"\0")[:-1]]
        assert len(names) == totals.names
        other, *rows = self._rows[: totals.rows]
        assert (other.name, other.device, other.stream) == (NONE, NONE, NONE)
        sums = {(names[row.name], row.kind, row.device, row.stream): _sum(row) for row in rows}
        assert len(sums) == len(rows), "two rows of one name on one stream"
        raws = [Raw.from_buffer_copy(raw) for raw in self._raws[: totals.raws]]
        return Taken(sums, _sum(other), names, raws, totals)


def _sum(row: Row) -> Sum:
    buckets = {bucket: many for bucket, many in enumerate(row.buckets) if many}
    return Sum(row.count, row.total, row.longest, buckets)


@dataclass(frozen=True)
class Record:
    """One of CUPTI's. A `length` cuts it, and ends its buffer; of a copy, `name` is which way it goes."""

    start: int
    end: int
    name: int | bytes = b"kernel"
    kind: int = KERNEL
    device: int = 0
    stream: int = 7
    correlation: int = 0
    graph_node: int = 0
    graph: int = 0
    length: int = 0


@dataclass
class MockCupti:
    library: Path
    c: ctypes.CDLL = field(init=False)
    _texts: dict[bytes, ctypes.Array[c_char]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.c = c = ctypes.CDLL(str(self.library))
        c.mock_calls.restype = c_char_p
        c.mock_delivered.restype = c.mock_faults.restype = c_uint64
        c.mock_fail.argtypes = [c_char_p, c_int]
        c.mock_lose.argtypes = [c_uint64]
        c.mock_complete.argtypes = [c_void_p, c_size_t]
        c.mock_hoard.argtypes = [POINTER(c_uint64)]
        c.mock_hoard.restype = c_uint32
        c.mock_replay.argtypes = [c_void_p, c_uint64, c_uint64]

    def address(self, text: bytes) -> int:
        """Where this text lies, always the same."""
        return ctypes.addressof(self._texts.setdefault(text, ctypes.create_string_buffer(text)))

    def packed(self, records: Sequence[Record]) -> ctypes.Array[c_uint64]:
        cells: list[int] = []
        for one in records:
            name = self.address(one.name) if isinstance(one.name, bytes) else one.name
            cells += [one.kind, one.start, one.end, one.device, one.stream, one.correlation, name]
            cells += [one.graph_node, one.graph, one.length]
        return (c_uint64 * len(cells))(*cells)

    def replay(self, records: Iterable[Record], times: int = 1) -> None:
        records = list(records)
        self.c.mock_replay(self.packed(records), len(records), times)

    def calls(self) -> list[str]:
        """What was called since the last time."""
        calls = self.c.mock_calls().decode().split()
        self.c.mock_forget_calls()
        return calls

    def hoard(self) -> tuple[int, int]:
        """Takes all buffers; gives how many, and the address of one."""
        address = c_uint64()
        return self.c.mock_hoard(ctypes.byref(address)), address.value


def build_sampler(directory: Path) -> Path:
    flags = ("-std=c11", "-O2", "-Wextra", "-Wpedantic", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
    return compiled([OURS / "kernel_sampler.c"], directory / "kernel_sampler.so", *flags)


def build_mock(directory: Path, *flags: str) -> Path:
    made = directory / "mock_cupti.so"
    return compiled([SOURCES / "mock_cupti.c"], made, "-O2", "-Wextra", "-shared", "-fPIC", "-pthread", *flags)


def own_copy(library: Path, directory: Path) -> Path:
    """A library with state of its own."""
    return Path(shutil.copy(library, directory))
