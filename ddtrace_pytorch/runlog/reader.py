"""Reads run logs as they are found: cut short, compressed, from several hosts, beside files of others.

:func:`scan` finds which ranks of which runs a directory holds, reading no more of a file than its first identity
line; :func:`read` streams one rank's records. Whatever is passed over is said in a sentence in ``notes``. Files are
somebody else's data: no symbolic link is followed, nothing but regular files is opened, no line is trusted.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ddtrace_pytorch.runlog.fields import integer, mapping, text
from ddtrace_pytorch.runlog.schema import REQUEST, SCHEMA_VERSION, SegmentName, decode, is_trace, parse_name

FIRST_BLOCK = 8 * 1024  # who wrote a file is in its first lines, and often all that is asked
BLOCK = 256 * 1024
MAX_LINE = 16 * 1024 * 1024  # what is longer is no record, and not held in memory
IDENTITY_WITHIN = 64  # lines; a disk that was full when the file began leaves damaged ones before it

_BEGINNING = b'{"type":"'
_OF_TYPE = _BEGINNING + b'%s"'

# What a line begins with that was too long; it is no JSON.
_DAMAGED = b"\0"


TRAINER = "trainer"


@dataclass
class RankLog:
    """One process' log: `segments` are its files, oldest first.

    `identity` is what the first identity line found says (empty if there is none); :func:`read` gives later ones.
    `notes` grows while the log is read.
    """

    directory: str
    rank: int
    job: str
    incarnation: str
    host: str
    identity: dict[str, Any]
    segments: tuple[str, ...]
    notes: list[str] = field(default_factory=list)
    damaged: bool = False  # nothing in it could be read

    @property
    def began(self) -> int:
        """When, in ns since the epoch; 0 where it doesn't say."""
        return integer(self.identity, "ts") or 0

    @property
    def source(self) -> str:
        """What the process was for."""
        return text(self.identity, "source") or TRAINER

    @property
    def trains(self) -> bool:
        return self.source == TRAINER


@dataclass
class Scan:
    """What a directory holds; `logs` are ordered by job, incarnation, rank, host; `beside` are paths of other files."""

    directory: str
    logs: list[RankLog] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def scan(directory: str, beside: Callable[[str], bool] = lambda name: False) -> Scan:
    """The run logs at or below `directory`: a log root, one job, one run, or several hosts' copies side by side.

    Files whose names are `beside` are expected there, and listed. Raises OSError if `directory` itself can't be listed.
    """
    found = Scan(directory)
    os.listdir(directory)  # os.walk would say nothing
    links: list[str] = []
    foreign: list[str] = []

    def unreadable(error: OSError) -> None:
        found.notes.append(f"could not look into {error.filename}: {error.strerror}")

    for folder, subfolders, files in os.walk(directory, onerror=unreadable):
        links += [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        processes: dict[str, list[SegmentName]] = {}
        for file in sorted(files):
            name = parse_name(file)
            path = os.path.join(folder, file)
            if os.path.islink(path):
                links.append(file)
            elif name is not None and os.path.isfile(path):
                processes.setdefault(name.stem, []).append(name)
            elif beside(file) and os.path.isfile(path):
                found.beside.append(path)
            elif is_trace(file) or file == REQUEST or file.endswith(".jsonl.gz.tmp"):
                continue  # what belongs there, the last a compression that a kill cut short; the original is there
            else:
                foreign.append(file)
        found.logs += [_rank_log(directory, folder, names) for names in processes.values()]

    for what, names in (("symbolic link", links), ("file that is no run log|files that are no run logs", foreign)):
        if names:
            found.notes.append(f"skipped {_plural(len(names), what)} ({_some(names)})")
    found.logs.sort(key=lambda log: (log.job, log.incarnation, log.rank, log.host))
    found.notes += _newer_schemas(found.logs)
    found.notes += _twins(found.logs)
    return found


# Is given whole lines, without their ends; gives those that are to be parsed.
Sift = Callable[[list[bytes]], Iterable[bytes]]


def read(log: RankLog, types: Collection[str] | None = None, sift: Sift | None = None) -> Iterator[dict[str, Any]]:
    """The records of `log` in the order they were written, one at a time; only those of `types` if given.

    Lines of other types are passed over without parsing them; of the rest, `sift` says which are parsed. Adds to
    ``log.notes`` what could not be read.
    """
    for path in log.segments:
        yield from read_file(path, log.notes, types, sift)


def read_file(
    path: str, notes: list[str], types: Collection[str] | None = None, sift: Sift | None = None
) -> Iterator[dict[str, Any]]:
    """The records of one file, plain or compressed; never raises for what is in it."""
    wanted = tuple(_OF_TYPE % word.encode() for word in types or ())
    label = os.path.join(*path.split(os.sep)[-2:])
    damaged = passed = 0
    empty, truncated = True, False
    try:
        with _open(path) as file:
            for lines, whole in _lines(file):
                empty = False
                passed += len(lines)
                if whole and wanted:
                    lines = [line for line in lines if line.startswith(wanted) or not line.startswith(_BEGINNING)]
                for line in sift(lines) if whole and sift is not None else lines:
                    record = decode(line)
                    if record is None:
                        passed -= 1
                        damaged += whole
                        truncated = not whole
                    elif types is None or record["type"] in types:
                        yield record
    except (EOFError, zlib.error, gzip.BadGzipFile):
        notes.append(f"{label} is cut short or damaged: {_plural(passed, 'record')} before that")
    except OSError as error:
        notes.append(f"{label} could not be read: {error.strerror or error}")
    else:
        if empty:
            notes.append(f"{label} is empty")
    if damaged:
        notes.append(f"skipped {_plural(damaged, 'damaged line')} in {label}")
    if truncated:
        notes.append(f"skipped the last line of {label}, which is cut short")


def _lines(file: io.BufferedReader | gzip.GzipFile) -> Iterator[tuple[list[bytes], bool]]:
    """The lines of `file`, many at a time, without their ends; at last the one that has no end, which is not whole."""
    begun = b""
    size = FIRST_BLOCK
    while block := file.read1(size):
        size = BLOCK
        lines = block.split(b"\n")
        lines[0] = begun + lines[0]
        begun = lines.pop()
        if len(begun) > MAX_LINE:
            begun = _DAMAGED
        yield lines, True
    if begun:
        yield [begun], False


def size_of(logs: Iterable[RankLog]) -> int:
    """Bytes of the files together, as far as it can be told."""
    paths = (path for log in logs for path in log.segments)
    return sum(os.path.getsize(path) for path in paths if os.path.exists(path))


@contextmanager
def _open(path: str) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if path.endswith(".gz"):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked
        else:
            yield file


def _rank_log(root: str, folder: str, names: list[SegmentName]) -> RankLog:
    """The log that the files `names` of one process in `folder` make up."""
    notes: list[str] = []
    chosen: dict[int, SegmentName] = {}
    for name in sorted(names, key=lambda name: (name.segment, name.compressed)):
        if name.segment in chosen:
            notes.append(f"{chosen[name.segment]} is there twice, plain and compressed; read once")
        chosen[name.segment] = name  # the compressed one is complete: it gets its name last
    paths = tuple(os.path.join(folder, str(name)) for name in chosen.values())

    identity: dict[str, Any] = {}
    readable = False
    glances: list[str] = []
    for path in paths:
        for number, record in enumerate(read_file(path, glances)):
            readable = True
            if record["type"] == "identity":
                identity = record
            if identity or number >= IDENTITY_WITHIN:
                break
        if identity:
            break
    if not readable:
        notes += glances  # nobody will read it again
    elif not identity:
        notes.append(f"{names[0]} has no identity line; rank and run are taken from its place")

    place = os.path.abspath(folder)
    job = mapping(identity, "job")
    rank = integer(identity, "rank")
    return RankLog(
        directory=os.path.relpath(folder, root),
        rank=names[0].rank if rank is None else rank,
        job=text(job, "id") or os.path.basename(os.path.dirname(place)),
        incarnation=text(job, "incarnation") or os.path.basename(place),
        host=text(identity, "host"),
        identity=identity,
        segments=paths,
        notes=notes,
        damaged=not readable,
    )


def _newer_schemas(logs: list[RankLog]) -> list[str]:
    versions = Counter(version for log in logs if (version := integer(log.identity, "schema") or 0) > SCHEMA_VERSION)
    return [
        f"{_plural(many, 'rank')} wrote schema {version}, newer than the {SCHEMA_VERSION} known here: "
        "what is known is read; update ddtrace-pytorch to see the rest"
        for version, many in sorted(versions.items())
    ]


def _twins(logs: list[RankLog]) -> list[str]:
    writers: dict[tuple[str, str, int], list[str]] = {}
    for log in logs:
        writers.setdefault((log.job, log.incarnation, log.rank), []).append(log.host or "an unknown host")
    return [
        f"rank {rank} of {job} ({incarnation}) was written by {len(hosts)} processes: {_some(hosts)}"
        for (job, incarnation, rank), hosts in writers.items()
        if len(hosts) > 1
    ]


def _plural(many: int, word: str) -> str:
    """`1 word`, `2 words`; irregular ones are given as ``one|many``."""
    one, _, other = word.partition("|")
    return f"{many:,} {one if many == 1 else other or one + 's'}"


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f", … {len(names) - limit} more" if len(names) > limit else "")
