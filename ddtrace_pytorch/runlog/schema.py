"""The run log's language: what a record holds, how it becomes a line, and how files are named. Pure.

Layout: ``<root>/<job id>/<incarnation>/rank-00000.jsonl``, the two folder names made by :func:`safe_name`.

Every record is one line of RFC 8259 JSON in ASCII, ended by ``\\n``, with at least

========  ==========================================================================================
``type``  one of the words below; always the first key, so that a reader can pass over a line unparsed
``ts``    when it happened or was over: nanoseconds since the epoch, on a clock that never jumps
========  ==========================================================================================

and by type

============  =======================================================================================
``identity``  who this rank is: first line of every segment. A later one adds to what is known.
              ``schema`` (this module's version), ``mono`` (monotonic ns at ``ts``), ``rank``,
              ``world_size``, ``host``, ``node``, ``pid``, ``source`` (DD_PYTORCH_SOURCE), ``metadata``
              (DD_PYTORCH_LOG_METADATA), ``segment`` (0, 1, …),
              ``log_ranks`` (the text of DD_PYTORCH_LOG_RANKS: which ranks write a log at all),
              ``collectives`` (DD_PYTORCH_COLLECTIVES),
              ``job`` {``id``, ``source``, ``attempt`` (null: unknown), ``incarnation``, ``launcher``,
              ``ids``}, ``device`` (its tags: ``device.id``, …; null: not known yet), ``tags`` (all of the rank span),
              ``versions`` {``ddtrace_pytorch``, ``ddtrace``, ``torch``, ``python``}
``span``      ``name``, ``resource``, ``service``, ``trace_id`` (32 hex digits), ``span_id`` and
              ``parent_id`` (decimal text; null: no parent), ``start`` (ns since the epoch),
              ``duration`` (ns), ``error`` (0 or 1), ``tags``, ``metrics``, ``links`` [{``trace_id``,
              ``span_id``, ``why``}]. Written once, when the span is finished: what is known of an open one is in
              ``identity``, and that it is open in ``beat``.
``user_span`` a stretch of the user's code: ``name``, ``start``, ``duration`` (ns), ``id`` (decimal text),
              ``attributes`` and, if it failed, ``error`` {``type``, ``message``, ``stack``}
``event``     a moment in the user's code: ``name``, ``attributes``. Those without ``seq`` are our own: ``name``,
              ``tags``
``scalar``    numbers of the user's: ``metrics``, and in ``types`` {name: type and shape} what was no number
              All three have what there is of ``seq`` (counts this process' records of these three types; a gap is what
              was dropped), ``step``, ``relative_step`` (since the training was begun or resumed), ``step_tags``,
              ``at`` (file:line:function), ``thread`` (its name), ``task`` (a number for the asyncio task) and
              ``parent`` (the ``id`` of the ``user_span`` around it)
``step``      one training step: ``step`` (its number), ``relative_step`` (since the training was begun or resumed),
              ``start``, ``duration`` (ns), ``metrics`` (what isn't there is 0): of the duration ``data_ns`` went into
              waiting for batches, ``collective_ns`` into collectives, ``optimizer_ns`` into optimizers without these,
              and ``gc_ns`` into collecting garbage, in any of the others; ``device.memory.allocated`` and ``.peak``
              (bytes); ``tags`` that it was given; ``first`` (true: of its session); ``unfinished`` (true: the rank
              ended in the middle of it)
``call``      one sampled collective: ``op``, ``group`` (torch's name), ``key`` (its number there; both are the same
              on every rank of the group), ``start``, ``duration`` (ns), ``bytes``, ``source`` (what the duration is:
              ``completion`` of the collective, or ``issue`` of the call alone), ``step`` in which it was, if known
``summary``   totals since the last one: ``name``, ``resource``, ``start`` (ns; they end at ``ts``), ``tags``,
              ``metrics``. Of collectives (``pytorch.collectives``) one for each operation, group and ``how``
              (``waited``: for completion; ``issued``: and perhaps waited for later; ``native``: by torch's C++ side,
              without times), with ``buckets`` {``"b"``: calls that took less than 2**b ns, and at least half of
              that}; and without these two one of the operation ``unseen``, the difference between what torch launched
              and what was seen on a group. ``collective.group_launched`` and ``collective.group_seen`` alone are not
              since the last one but since the session began, and so is what is ``unseen``. Of the steps
              (``pytorch.steps``) there is one.
``beat``      the rank was alive: ``seq`` (1, 2, …), ``steps`` so far and, if they are counted, ``calls`` (collectives
              so far) and ``groups`` {name: [``entered``, ``completed``, what it is in or null, since when]}, which are
              as in ``state``
``state``     all that a rank says of itself (:class:`ddtrace_pytorch.stalls.roll.RankState`), in ``state``: where a
              collective raised or takes too long, at an end by an exception (``frames``: where that was raised), and of
              a rank that was killed the last that it left; ``why``: ``raised``, ``stall``, ``exception`` or ``killed``
``verdict``   who a stall waits for: ``kind``, ``detail`` (of a mismatch), ``ranks``, ``doing``, ``moves`` (they are
              only late), ``group`` (its label), ``op``, ``key``, ``message``, ``tags``, ``waiting`` (ranks), ``usual``
              (of a mismatch, the others' call) and ``culprits`` [{``rank``, ``kind``, ``doing``, ``frames``, …}]
``drop``      what is *not* in this log: ``reason``, ``count`` (records, exact, since the last drop record of
              that reason), ``bytes`` (their size, 0 where it isn't known). The sum over a log is the truth.
============  =======================================================================================

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
MAX_INT_BITS = 4096  # beyond some 4,300 digits Python itself refuses to read an integer back

_from_text = json.JSONDecoder().raw_decode

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


# What goes round in a circle ends in a RecursionError, without looking for circles in all that doesn't.
_as_it_is = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


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
    """`value` as JSON in ASCII, by the rules of :func:`encode`; never raises."""
    try:
        text = _as_it_is(value)
    except (OverflowError, RecursionError, RuntimeError, TypeError, ValueError):
        return json.dumps(_plain(value, MAX_DEPTH), separators=(",", ":"), allow_nan=False)
    return json.dumps(_plain(value, MAX_DEPTH), separators=(",", ":")) if "\\ud" in text else text


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
    if not isinstance(record.get("type"), str) or type(record.get("ts")) is not int:
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


_SEGMENT = re.compile(r"rank-(\d{5,9})(?:\.([1-9]\d{0,8}))?(?:\.seg-(\d{5,9}))?\.jsonl(\.gz)?", re.ASCII)


def parse_name(name: str) -> SegmentName | None:
    """The parts of a run log file's name; None if it isn't one."""
    match = _SEGMENT.fullmatch(name)
    if match is None:
        return None
    rank, claim, segment, gz = match.groups()
    return SegmentName(int(rank), int(claim or 0), int(segment or 0), gz is not None)
