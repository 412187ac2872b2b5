"""native/kernel_sampler.c as tests build it, and a libcupti that replays records."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path

from ddtrace_pytorch.kernels.sampler_library import KERNEL

from .native import OURS, SOURCES, compiled


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
