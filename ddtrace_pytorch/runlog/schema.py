"""The run log's language: what a record holds, how it becomes a line, and how files are named. Pure.

Layout: ``<root>/<job id>/<incarnation>/rank-00000.jsonl``, the two folder names made by :func:`safe_name`.

Every record is one line of RFC 8259 JSON in ASCII, ended by ``\\n``, with at least

========  ==========================================================================================
``type``  one of the words below; always the first key, so that a reader can pass over a line unparsed
``ts``    when it happened or was over: nanoseconds since the epoch, on a clock that never jumps
========  ==========================================================================================

and the fields of its type, :data:`RECORDS`; what they mean is in docs/run-log.md.

JSON has no NaN: a float that is not finite is written as the text ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, and
:func:`decode` turns these back into floats inside ``metrics``, whose values are always numbers. A value that JSON
can't hold becomes the name of its type, never its ``repr``: a run log must not spill what it doesn't understand.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

SCHEMA_VERSION = 1

MAX_DEPTH = 8
NEVER = 1 << 1000  # no time: with what no float can hold nobody can reckon
MAX_INT_BITS = 4096  # beyond some 4,300 digits Python itself refuses to read an integer back

# What records of each type may have, besides ``type`` and ``ts``.
_STAMP = ("seq", "step", "relative_step", "step_tags", "at", "thread", "task", "parent")
RECORDS: Mapping[str, frozenset[str]] = {
    kind: frozenset((*fields.split(), *stamp))
    for kind, fields, stamp in (
        ("identity", "schema mono rank world_size host node pid source metadata segment log_ranks collectives job "
                     "device tags versions", ()),
        ("step", "step relative_step start duration metrics tags first unfinished", ()),
        ("user_span", "name start duration id attributes error", _STAMP),
        ("event", "name attributes tags", _STAMP),
        ("scalar", "metrics types", _STAMP),
        ("call", "op group key start duration bytes source step", ()),
        ("summary", "name resource start tags metrics how buckets", ()),
        ("span", "name resource service trace_id span_id parent_id start duration error tags metrics links", ()),
        ("beat", "seq steps calls groups", ()),
        ("state", "why state", ()),
        ("verdict", "kind detail ranks doing moves group op key usual waiting message culprits tags", ()),
        ("profile", "step steps how state why start duration activity path bytes memory of metrics kernels "
                    "longest", ()),
        ("kernels", "step steps state start duration of metrics kernels longest", ()),
        ("drop", "reason count bytes", ()),
    )
}  # fmt: skip

_from_text = json.JSONDecoder().raw_decode

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


# What goes round in a circle ends in a RecursionError, without looking for circles in all that doesn't.
_as_it_is = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
_in_unicode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, ensure_ascii=False).encode


def encode(record: Mapping[str, Any]) -> bytes:
    """`record` as one line, ``type`` first; never raises, whatever the values are."""
    if next(iter(record), None) == "type":
        # Nearly all records hold what JSON has, and to find that out value by value takes most of the time.
        try:
            line = _as_it_is(record)
        except (OverflowError, RecursionError, RuntimeError, TypeError, ValueError):
            pass
        else:
            if "\\ud" not in line:  # else perhaps half of a pair, which is no text
                return line.encode("ascii") + b"\n"
    return _encode_slowly(record)


def json_text(value: Any) -> str:
    """`value` as JSON by the rules of :func:`encode`, but with what is not ASCII as it is; never raises."""
    try:
        text = _in_unicode(value)
        text.encode()  # half of a pair is no text
    except (OverflowError, RecursionError, RuntimeError, TypeError, ValueError):
        return _in_unicode(_plain(value, MAX_DEPTH))
    return text


def _encode_slowly(record: Mapping[str, Any]) -> bytes:
    head = {key: record[key] for key in ("type", "ts") if key in record}
    line = json.dumps(_plain({**head, **record}, MAX_DEPTH), separators=(",", ":"), allow_nan=False)
    return line.encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of one line; None if the line is damaged or is no record."""
    try:
        text = line.strip().decode()
        record, end = _from_text(text)  # loads() would first guess the encoding
        if end != len(text):
            return None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    ts = record.get("ts")
    if not isinstance(record.get("type"), str) or type(ts) is not int or not -NEVER < ts < NEVER:
        return None
    metrics = record.get("metrics")
    if isinstance(metrics, dict):
        for name, value in metrics.items():
            if isinstance(value, str) and value in _NOT_FINITE:
                metrics[name] = _NOT_FINITE[value]
    return record


def _plain(value: Any, depth: int) -> Any:
    """`value` in the types JSON has. Keys and text are UTF-8 all through: a lone surrogate becomes its escape."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return value if value.bit_length() <= MAX_INT_BITS else type(value).__name__
    if isinstance(value, float):
        return value if math.isfinite(value) else _name_of(value)
    if depth and isinstance(value, dict):
        # tuple() first: it takes the items in one go, even while another thread adds one.
        return {_key(key): _plain(item, depth - 1) for key, item in tuple(dict.items(value))}
    if depth and isinstance(value, (list, tuple)):
        return [_plain(item, depth - 1) for item in tuple(value)]
    return type(value).__name__


def _text(value: str) -> str:
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _key(key: Any) -> str:
    plain = _plain(key, 0)
    return plain if isinstance(plain, str) else json.dumps(plain)


MAX_NAME = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def safe_name(text: str) -> str:
    """`text` as the name of one folder or file: ``A-Z a-z 0-9 . _ -``, at most 100 characters, never ``.`` or ``..``.

    Where that changes anything, eight hex digits of its SHA-256 are added, so two ids never share a folder.
    """
    name = _UNSAFE.sub("_", text)
    if name == text and 0 < len(name) <= MAX_NAME and name.strip("."):
        return name
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{name[: MAX_NAME - 9]}-{digest}"


class SegmentName(NamedTuple):
    """What a file's name says: ``rank-00003[.<claim>][.seg-<segment>].jsonl[.gz]``.

    `claim` tells apart processes that write as the same rank into the same folder. Sorted, the names of one
    process' segments are in the order they were written.
    """

    rank: int
    claim: int
    segment: int
    compressed: bool = False

    @property
    def stem(self) -> str:
        return f"rank-{self.rank:05d}" + (f".{self.claim}" if self.claim else "")

    def __str__(self) -> str:
        segment = f".seg-{self.segment:05d}" if self.segment else ""
        return f"{self.stem}{segment}.jsonl" + (".gz" if self.compressed else "")


# Asks the ranks that write beside it for a profiler window, whose trace is in a folder below.
REQUEST = "profile-request.json"
_TRACE = re.compile(r"rank-\d{5,9}(?:_[A-Za-z0-9]+)*_step-\d{6,19}(?:-\d+)?\.(?:json\.gz|memory\.pickle)", re.ASCII)
_SEGMENT = re.compile(r"rank-(\d{5,9})(?:\.([1-9]\d{0,8}))?(?:\.seg-(\d{5,9}))?\.jsonl(\.gz)?", re.ASCII)


def is_trace(name: str) -> bool:
    """Whether a file's name is that of a profiler window's trace, or of a snapshot of memory beside one."""
    return _TRACE.fullmatch(name) is not None


def parse_name(name: str) -> SegmentName | None:
    """The parts of a run log file's name; None if it isn't one."""
    match = _SEGMENT.fullmatch(name)
    if match is None:
        return None
    rank, claim, segment, gz = match.groups()
    return SegmentName(int(rank), int(claim or 0), int(segment or 0), gz is not None)
