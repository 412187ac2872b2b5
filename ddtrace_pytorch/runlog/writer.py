"""Writes one rank's run log without ever holding up, or failing, the training that fills it.

Any thread may call :meth:`RunLogQueue.put`; everything else here is called by one background thread. What can't be
kept is counted exactly, and the count is the next thing written.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ddtrace_pytorch.private import make_directories, make_private
from ddtrace_pytorch.runlog.schema import SegmentName, encode, parse_name, safe_name
from ddtrace_pytorch.taking import all_of

QUEUE_FULL = "queue full"
DISK = "disk"
LOG_CAP = "log cap"
# The same, of what was written before the process group was made anew: it was in another log.
EARLIER_CAP = "log cap, before the group was made anew"
TOO_LARGE = "record too large"

MIB = 1024 * 1024


# What is to be a line of the log, or is one already.
Record = Mapping[str, Any] | bytes


class LogUnusable(OSError):
    """The run log can't be written where it should be; the message says why and what to do."""


def log_directory(root: str, job_id: str, incarnation: str) -> str:
    """Where the ranks of one incarnation of a job write."""
    return os.path.join(root, safe_name(job_id), safe_name(incarnation))


def private_root(path: str) -> None:
    """Make the directory `path` in a place others can write to, or check that it is ours alone.

    Raises :class:`LogUnusable` where that can't be: see :func:`~ddtrace_pytorch.private.make_private`.
    """
    try:
        make_private(path)
    except OSError as error:
        raise LogUnusable(_unusable(path, error.strerror or str(error))) from error


def _unusable(path: str, why: str) -> str:
    return f"run log directory {path} can't be used: {why}; set DD_PYTORCH_LOG_DIR to a directory of your own"


# Told drops that wait before those of one reason are put together.
DROPS_HELD = 64


class RunLogQueue:
    """Between the training threads and the writer: bounded, and without a lock.

    A lock would be held over a fork, or by the very thread a signal handler interrupts. No record and no refusal is
    lost for that: an append and the next number of a counter are each done by the interpreter in one go. The bounds
    are rough: threads that put at the same moment may go past them by a record each, and the bytes, an estimate in any
    case, may be summed wrongly until the next :meth:`take`.
    """

    def __init__(self, limit_records: int = 65_536, limit_bytes: int = 32 * MIB) -> None:
        self._limit_records = limit_records
        self._limit_bytes = limit_bytes
        self._records: deque[Record] = deque()
        self._bytes = 0
        self._drops: deque[tuple[str, int]] = deque()
        self._refused = count()
        self._refused_read = 0
        self._refused_told = 0

    def put(self, record: Record) -> None:
        """Hand `record` over (don't change it afterwards); a full queue counts it instead. Never waits or raises."""
        weight = len(record) if isinstance(record, bytes) else _weight(record)
        if len(self._records) >= self._limit_records or self._bytes + weight > self._limit_bytes:
            next(self._refused)
        else:
            self._bytes += weight
            self._records.append(record)

    def count_lost(self, reason: str, records: int) -> None:
        """Have `records` told as dropped that were never put. Not as a record: that might be refused, and its count be
        forgotten. Never waits or raises."""
        drops = self._drops
        if len(drops) >= DROPS_HELD:
            drops.extend(self.take_drops().items())
        if records:
            drops.append((reason, records))

    def take_drops(self) -> dict[str, int]:
        """How many records others have counted as dropped since the last time, by the reason."""
        found: dict[str, int] = {}
        try:
            while True:
                reason, many = self._drops.popleft()
                found[reason] = found.get(reason, 0) + many
        except IndexError:
            return found

    def take(self) -> tuple[list[Record], int]:
        """What has been put since the last time, oldest first, and how many records were refused since then."""
        self._bytes = 0
        records = all_of(self._records)
        # A counter can only be read by taking a number from it, so our own readings are taken off again.
        refused = next(self._refused) - self._refused_read
        self._refused_read += 1
        fresh, self._refused_told = refused - self._refused_told, refused
        return records, fresh


def _weight(record: Mapping[str, Any]) -> int:
    total = 256
    for value in tuple(record.values()):
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            total += 64 * len(value)
            for item in tuple(value.values()):
                if isinstance(item, str):
                    total += len(item)
        elif isinstance(value, list):
            total += 256 * len(value)
    return total


@dataclass
class Loss:
    """Records that are not in the log, and their size in bytes where it is known."""

    count: int = 0
    bytes: int = 0

    def add(self, count: int, size: int) -> None:
        self.count += count
        self.bytes += size


@dataclass
class _Segment:
    """One file of this log: `size` is what it takes on disk, `records` and `losses` what would go with it."""

    path: str
    name: SegmentName
    size: int = 0
    records: int = 0
    record_bytes: int = 0
    losses: list[tuple[str, Loss]] = field(default_factory=list)
    headed: bool = False  # its identity line is written
    torn: bool = False  # its last line is incomplete


class RunLogFile:
    """The files of one rank: one that grows, and older segments compressed beside it.

    `directory` is made when first needed (mode 0700, files 0600). `identity` gives the fields of the identity record
    as they stand when a segment begins. The files together never take more than `max_bytes`; a segment is closed at
    `segment_bytes` (default and most: an eighth and a quarter of that). `guarded` is the directory in a shared
    place that :func:`private_root` must find fit first. `clock` gives ``ts`` for drop records. `left` are the segments
    of this process' earlier logs, the oldest first, which take part of `max_bytes` and go before its own.

    Belongs to one thread of the process that made it; in a forked child it does nothing.
    """

    def __init__(
        self,
        directory: str,
        rank: int,
        identity: Callable[[], Mapping[str, Any]],
        max_bytes: int,
        segment_bytes: int | None = None,
        *,
        guarded: str | None = None,
        clock: Callable[[], int] = time.time_ns,
        left: deque[Any] | None = None,
    ) -> None:
        self._left: deque[_Segment] = deque() if left is None else left
        self._directory = os.path.abspath(directory)
        self._guarded = guarded
        self._rank = rank
        self._identity = identity
        self._clock = clock
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes or max_bytes // 8, max_bytes // 4)
        self._pid = os.getpid()
        self._fd: int | None = None
        self._inode: tuple[int, int] | None = None
        self._live: _Segment | None = None
        self._closed: deque[_Segment] = deque()
        self._losses: dict[str, Loss] = {}

    @property
    def path(self) -> str | None:
        """The file that grows; None until the first is open."""
        return self._live.path if self._live else None

    def open(self) -> None:
        """Begin the first file. Raises :class:`LogUnusable`; without this call, :meth:`write` does it and counts."""
        try:
            self._append([])
        except LogUnusable:
            raise
        except OSError as error:
            raise LogUnusable(_unusable(self._directory, error.strerror or str(error))) from error

    def count_lost(self, reason: str, records: int, size: int = 0) -> None:
        """Have `records` told as dropped with the next write that works."""
        if records:
            self._losses.setdefault(reason, Loss()).add(records, size)

    def write(self, records: Sequence[Record] = ()) -> None:
        """Append `records` with one write call (more only where a segment ends); never raises :class:`OSError`.

        What the disk doesn't take is counted and told by the next call that works, even one without records.
        """
        if os.getpid() != self._pid:
            return
        for lines in self._portions([one if isinstance(one, bytes) else encode(one) for one in records]):
            try:
                self._append(lines)
            except OSError:
                self.count_lost(DISK, len(lines), sum(map(len, lines)))

    def close(self) -> None:
        """Write what is still to be told and close the file."""
        if os.getpid() != self._pid:
            return
        if self._losses:
            self.write()
        self._shut()
        self._left.extend(self._closed)
        self._closed.clear()
        if self._live is not None and not any(segment is self._live for segment in self._left):
            self._left.append(self._live)

    def _portions(self, lines: list[bytes]) -> Iterator[list[bytes]]:
        """`lines` in as few parts as fit into a segment each; one empty part if there are only losses to tell."""
        portion: list[bytes] = []
        size = 0
        for line in lines:
            if len(line) > self._segment_bytes:
                self.count_lost(TOO_LARGE, 1, len(line))
                continue
            if size + len(line) > self._segment_bytes:
                yield portion
                portion, size = [], 0
            portion.append(line)
            size += len(line)
        if portion or self._losses:
            yield portion

    def _append(self, lines: list[bytes]) -> None:
        """Write `lines` after what is due before them; counts those that did not arrive. Raises OSError if none did."""
        live = self._ready(sum(map(len, lines)))
        head = [] if live.headed else [encode({"type": "identity", **self._identity(), "segment": live.name.segment})]
        told = list(self._losses.items())
        drops = [encode(self._drop_record(reason, loss)) for reason, loss in told]
        arrived = self._put_lines(live, head + drops + lines)
        if arrived < len(head):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        live.headed = True
        arrived -= len(head)
        for reason, loss in told[:arrived]:
            del self._losses[reason]
            live.losses.append((reason, loss))
        arrived = max(arrived - len(drops), 0)
        live.records += arrived
        live.record_bytes += sum(map(len, lines[:arrived]))
        self.count_lost(DISK, len(lines) - arrived, sum(map(len, lines[arrived:])))

    def _drop_record(self, reason: str, loss: Loss) -> dict[str, Any]:
        return {"type": "drop", "ts": self._clock(), "reason": reason, "count": loss.count, "bytes": loss.bytes}

    def _put_lines(self, live: _Segment, lines: list[bytes]) -> int:
        """Append `lines`; return how many of them are wholly in the file."""
        assert self._fd is not None
        repair = b"\n" if live.torn else b""  # ends the incomplete line, so only that one is lost
        data = repair + b"".join(lines)
        written = 0
        try:
            while written < len(data):
                got = os.write(self._fd, data[written:] if written else data)
                if not got:
                    break
                written += got
        except OSError:
            if not written:
                raise
        live.size += written
        if written:
            live.torn = not data.endswith(b"\n", 0, written)
        return data.count(b"\n", len(repair), written)

    def _ready(self, incoming: int = 0) -> _Segment:
        """The segment to append to: the open one, or a new one if it is full or no longer where we made it."""
        if self._fd is not None and self._live is not None:
            self._notice_loss(self._live)
        if self._fd is not None and self._live is not None:
            self._rotate_if_full(self._live, incoming)
        if self._fd is None:
            self._make_room()
            self._live = self._create(self._live.name if self._live else None)
        assert self._live is not None
        return self._live

    def _notice_loss(self, live: _Segment) -> None:
        """Let go of the file if it is gone: people delete logs, and user code closes descriptors wholesale."""
        assert self._fd is not None
        try:
            found = os.fstat(self._fd)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._inode:
            self._fd = None  # closed, and perhaps somebody else's by now: not ours to close
            self._closed.append(live)
        elif not found.st_nlink:
            self._shut()
            self._tell_again(live)

    def _rotate_if_full(self, live: _Segment, incoming: int) -> None:
        if (live.records or live.losses) and live.size + incoming > self._segment_bytes:
            self._shut()
            self._closed.append(live)
            self._compress(live)

    def _shut(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.close(fd)
            except OSError:
                pass  # some network file systems report here what they could not keep; nothing more can be done

    def _create(self, last: SegmentName | None) -> _Segment:
        """Make the next file of ours; O_EXCL sees to it that no other process has it, or will."""
        if self._guarded is not None:
            private_root(self._guarded)
        make_directories(self._directory)
        if last is None:
            name = SegmentName(self._rank, self._free_claim(0), 0)
        else:
            name = last._replace(segment=last.segment + 1)
        while (fd := self._claim(name)) is None:
            name = name._replace(claim=self._free_claim(name.claim + 1))
        self._fd = fd
        path = os.path.join(self._directory, str(name))
        found = os.fstat(self._fd)
        self._inode = (found.st_dev, found.st_ino)
        return _Segment(path, name)

    def _claim(self, name: SegmentName) -> int | None:
        """The new file of that `name`; None if another process has it. One that has compressed it has it, too: while
        that is done, a list of the directory may show neither of the two."""
        path = os.path.join(self._directory, str(name))
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return None
        if os.path.lexists(os.path.join(self._directory, str(name._replace(compressed=True)))):
            os.close(fd)
            os.unlink(path)
            return None
        return fd

    def _free_claim(self, first: int) -> int:
        taken = {
            name.claim for name in map(parse_name, os.listdir(self._directory)) if name and name.rank == self._rank
        }
        return next(claim for claim in count(first) if claim not in taken)

    def _compress(self, segment: _Segment) -> None:
        """Replace a closed segment by its .gz; where that can't be done the plain file stays, and counts as such."""
        target = os.path.join(self._directory, str(segment.name._replace(compressed=True)))
        unfinished = target + ".tmp"
        try:
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb") as out, open(segment.path, "rb") as plain:
                with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=out) as packed:
                    shutil.copyfileobj(plain, packed)
                size = out.tell()
            os.rename(unfinished, target)
            os.unlink(segment.path)
            segment.path, segment.size = target, size
        except OSError:
            try:
                os.unlink(unfinished)
            except OSError:
                pass

    def _make_room(self) -> None:
        """Delete the oldest segments until the next, and the compressed copy made of it, fit under the cap."""
        for segments, why in ((self._left, EARLIER_CAP), (self._closed, LOG_CAP)):
            while segments and self._taken() + 2 * self._segment_bytes > self._max_bytes:
                oldest = segments[0]
                try:
                    os.unlink(oldest.path)
                    self.count_lost(why, oldest.records, oldest.record_bytes)
                except FileNotFoundError:
                    pass  # deleted by somebody else, who knows what was in it
                segments.popleft()
                if segments is self._closed:
                    self._tell_again(oldest)

    def _taken(self) -> int:
        # Of an earlier log that isn't closed yet, another thread may still add some.
        return sum(segment.size for segments in (tuple(self._left), self._closed) for segment in segments)

    def _tell_again(self, segment: _Segment) -> None:
        """Losses that were told in a segment now gone must be told anew for the sum over the log to stay true."""
        for reason, loss in segment.losses:
            self.count_lost(reason, loss.count, loss.bytes)


class RunLogWriter:
    """A queue that any thread fills and the file that one thread empties it into."""

    def __init__(self, file: RunLogFile, queue: RunLogQueue | None = None) -> None:
        self.file = file
        self.queue = queue or RunLogQueue()

    def flush(self) -> None:
        """Write what has been put so far. May take as long as the disk does."""
        records, refused = self.queue.take()
        self.file.count_lost(QUEUE_FULL, refused)
        for reason, many in self.queue.take_drops().items():
            self.file.count_lost(reason, many)
        self.file.write(records)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        self.file.close()
