"""Torch's flight recorders: what the C++ side wrote down of each collective, whoever issued it.

There are two, one that NCCL's process groups write to and one that gloo's do; both are read, where this torch has them.
:meth:`FlightRecorder.status` is cheap. :meth:`FlightRecorder.dump` is not, and belongs on a thread of its own: torch
holds the interpreter for all of a direct dump, so it is asked through torch's worker server, which answers without.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import pickle
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ddtrace_pytorch.unix_http import UnixConnection

BUFFER_SIZE = "2000"
# The second is the older spelling, which is still understood by those that have the first.
BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

# A dump of the usual 2,000 entries takes some 0.1 s.
ANSWER_SECONDS = 2.0
# What the kernel takes as the address of a Unix socket, less the name of the file.
_LONGEST_DIRECTORY = 90
# Entries decoded between two offers of the interpreter to the threads that train.
_AT_A_TIME = 16
_LEVEL_ERROR = 2
_GENERIC = "fr_trace_json"
# When an operation was issued that gloo's thread isn't done with: it says so as the last thing it does for each.
_UNFINISHED = re.compile(r'"retired":\s*false[^{}]*?"time_created_ns":\s*(\d+)')

_BYTES = {
    "Bool": 1, "Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8, "UInt16": 2, "UInt32": 4, "UInt64": 8,
    "Half": 2, "BFloat16": 2, "Float": 4, "Double": 8, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "Float8_e8m0fnu": 1,
}  # fmt: skip


# The types of numbers that have another name in torch's C++ than in Python.
_RENAMED = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16",
    "Float": "float32", "Double": "float64", "ComplexHalf": "complex32", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip
_TORCH_NAMES = {name: _RENAMED.get(name, name.lower()) for name in _BYTES}


def buffer_for(release: tuple[int, int], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set before the first process group so that the recorder has a buffer; none where it has one, or
    where the user said how long it is to be. Later than that torch doesn't look."""
    if not (2, 2) <= release < (2, 11) or any(name in environ for name in BUFFER_VARIABLES):
        return {}
    return {BUFFER_VARIABLES[0 if release >= (2, 8) else 1]: BUFFER_SIZE}


class Status(NamedTuple):
    """How far a group has come, in the backend's own count; -1: not told."""

    enqueued: int
    started: int
    completed: int


class Entry(NamedTuple):
    """One operation on one group. `number` is torch's count on the group at that moment, `record` the recorder's over
    all groups, `recorded` its id of the group; `input_bytes` is None where it can't be told, `shape` and `dtype` are
    those of the first input; `retired`: it has ended; times in ns since the epoch, 0 where unknown."""

    group: str
    backend: str
    name: str
    number: int
    record: int
    p2p: bool
    input_bytes: int | None
    created: int
    completed: int
    recorded: int = -1
    retired: bool = True
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Dump:
    """What the recorders held. `off` are the backends whose recorder holds nothing at all, which one with a buffer
    never does once a collective was issued."""

    off: frozenset[str]
    entries: tuple[Entry, ...]


class FlightRecorder:
    """Reads the recorders of `module`, which is ``torch._C._distributed_c10d``."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def exists(self) -> bool:
        """Whether this torch has a recorder that can be read from a running job.

        Torch 2.2 and 2.3 can only be asked for everything with stacks, which may deadlock on the interpreter's lock.
        """
        return bool(self._direct())

    def status(self) -> dict[str, Status]:
        """How far each group has come, by the recorder's own ids of them; some microseconds. Empty while it is off."""
        found: dict[str, Status] = {}
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            ask = getattr(self._module, name, None)
            if ask is not None:
                for group, said in json.loads(ask(False, False)).get("pg_status", {}).items():
                    found[group] = Status(
                        *(int(said.get(f"last_{what}_collective", -1)) for what in ("enqueued", "started", "completed"))
                    )
        return found

    def gloo_is_busy(self, since: int) -> bool:
        """Whether gloo's threads aren't done with all that was issued since then (ns since the epoch); False where
        nobody can tell. Some 70 ms where all 2,000 entries are in use: they aren't decoded, but torch writes them down
        with the interpreter held."""
        ask = getattr(self._module, "_dump_fr_trace_json", None)
        if ask is None:
            return False
        said = ask(True, False)
        text = said.decode() if isinstance(said, bytes) else said
        return any(int(created) >= since for created in _UNFINISHED.findall(text))

    def dump(self) -> Dump:
        """All that the recorders hold: tens of milliseconds, never on a thread that trains nor on the Pulse."""
        direct = self._direct()
        answers = self._ask_server(direct)
        off: set[str] = set()
        found: list[Entry] = []
        for handler, ask in direct.items():
            head, entries = parse(answers[handler] if handler in answers else ask())
            if not entries and not head.get("pg_status"):
                off.add("gloo" if handler == _GENERIC else "nccl")
            found += entries
        return Dump(frozenset(off), tuple(found))

    def _direct(self) -> dict[str, Any]:
        """What to call for each recorder, by the name of its handler in the worker server."""
        module = self._module
        found: dict[str, Any] = {}
        if hasattr(module, "_dump_fr_trace_json"):
            found[_GENERIC] = module._dump_fr_trace_json
        if hasattr(module, "_dump_nccl_trace_json"):
            found["dump_nccl_trace_json"] = module._dump_nccl_trace_json
        elif "includeStackTraces" in (getattr(getattr(module, "_dump_nccl_trace", None), "__doc__", None) or ""):
            found["pickled"] = lambda: module._dump_nccl_trace(True, False, False)
        return found

    def _ask_server(self, names: Iterable[str]) -> dict[str, bytes]:
        """The answers of torch's worker server, which lives only as long as this takes; without those it hasn't."""
        level = _log_level()
        if level is None or not hasattr(self._module, "_WorkerServer"):
            return {}
        short = len(tempfile.gettempdir()) <= _LONGEST_DIRECTORY
        answers = {}
        with tempfile.TemporaryDirectory(prefix="ddtrace-pytorch-", dir=None if short else "/tmp") as private:
            path = os.path.join(private, "s")
            with _quiet(level):
                server = self._module._WorkerServer(path)
            try:
                for name in names:
                    connection = UnixConnection(path, ANSWER_SECONDS)
                    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                        connection.request("POST", f"/handler/{name}", headers={"Connection": "close"})
                        response = connection.getresponse()
                        body = response.read()
                        if response.status == http.HTTPStatus.OK:
                            answers[name] = body
            finally:
                with _quiet(level):
                    server.shutdown()
        return answers


def parse(answer: bytes) -> tuple[dict[str, Any], list[Entry]]:
    """What one recorder said: all but the entries as it is, and the entries."""
    if answer[:1] == b"\x80":
        head = pickle.loads(answer)  # torch's own words, from this process
        return head, [entry_of(one) for one in head.pop("entries", ())]
    text = answer.decode()
    start = text.find('"entries":[')
    if start < 0:
        return json.loads(text), []
    # One by one: decoding them all at once would keep the interpreter from the threads that train.
    decoder = json.JSONDecoder()
    entries = []
    at = start + len('"entries":[')
    while text[at] != "]":
        one, at = decoder.raw_decode(text, at + (text[at] == ","))
        entries.append(entry_of(one))
        if len(entries) % _AT_A_TIME == 0:
            time.sleep(0)
    return json.loads(text[:start] + '"entries":[' + text[at:]), entries


def entry_of(said: Mapping[str, Any]) -> Entry:
    backend, colon, name = said["profiling_name"].partition(":")
    if not colon:
        backend, name = "", backend
    # Gloo's own count leaves out what `_get_sequence_number_for_group` counts; NCCL's is the same.
    number = said["op_id"] if backend == "gloo" else said.get("collective_seq_id", said.get("seq_id", 0))
    sizes, kinds = said.get("input_sizes") or ((),), said.get("input_dtypes") or (None,)
    return Entry(
        group=str(said["process_group"][0]),
        backend=backend,
        name=name,
        number=int(number),
        record=int(said["record_id"] if "record_id" in said else said["id"]),
        p2p=bool(said.get("is_p2p", False)),
        input_bytes=_bytes(said.get("input_sizes", ()), said.get("input_dtypes", ())),
        created=int(said.get("time_created_ns") or 0),
        completed=int(said.get("time_discovered_completed_ns") or 0),
        recorded=int(said.get("pg_id", -1)),
        retired=bool(said.get("retired", True)),
        shape=tuple(map(int, sizes[0])) if said.get("input_sizes") else None,
        dtype=_TORCH_NAMES.get(str(kinds[0])),
    )


def _bytes(sizes: Iterable[Iterable[int]], kinds: Iterable[str]) -> int | None:
    sizes, kinds = list(sizes), list(kinds)
    if len(sizes) != len(kinds) or any(kind not in _BYTES for kind in kinds):
        return None
    return sum(prod(size) * _BYTES[kind] for size, kind in zip(sizes, kinds, strict=True))


def _log_level() -> ctypes.c_int | None:
    """From which level on torch's C++ side logs; None where that can't be read."""
    import torch

    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _quiet(level: ctypes.c_int) -> Iterator[None]:
    """The worker server says on stderr, as warnings, that it starts and that it ends: not every minute on every rank.

    For the one to five milliseconds of that, so that hardly anybody else's warning is lost.
    """
    before = level.value
    level.value = max(before, _LEVEL_ERROR)
    try:
        yield
    finally:
        level.value = before
