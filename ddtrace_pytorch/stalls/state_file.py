"""A rank's state on disk: a small file written through memory, and a lock beside it that says that the rank lives.

``rank-00003.state`` is :data:`SIZE` bytes, all of them taken from the disk when it is made, and mapped: a write is a
write to memory, which stays when the process is killed. It has two halves, written in turn, each with a number and a
checksum: a write that a kill cuts short, or that is under way while somebody reads, costs one beat and no more. Behind
them are positions (:mod:`~ddtrace_pytorch.stalls.positions`), which the training threads write themselves.

``rank-00003.lock`` has two bytes to lock. The rank holds the first for as long as it lives, stopped or not; whoever
claims what a dead rank left behind takes both at once. These are POSIX locks: they go with the process, whatever its
pid is or becomes, no forked child has them, and they are told across PID namespaces. They go, too, as soon as the
process closes any descriptor of the file, so nobody here opens one that this process has a lock of.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from ddtrace_pytorch.descriptors import high
from ddtrace_pytorch.private import make_directories
from ddtrace_pytorch.stalls import positions

SIZE = 64 * 1024
_HALF = (SIZE - positions.SIZE) // 2
_MAGIC = b"DDP1"
_HEAD = struct.Struct("<4sIQI")  # magic, bytes of text, number, CRC-32 of these two and the text
_CHECKED = struct.Struct("<IQ")
# Bytes of text that fit.
CAPACITY = _HALF - _HEAD.size

STATE, LOCK = ".state", ".lock"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
# How many bytes, from the first on, are locked for either.
_LIFE, _CLAIM = 1, 2
_FLOCK = struct.Struct("hhqqi4x")  # the C library's `struct flock`: type, whence, start, length, pid

# While somebody clears the folder away, or looks into a file that is being made.
_ATTEMPTS = 40
_BETWEEN_SECONDS = 0.005

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value

# The lock files that this process has a lock of, by path, and whose it is: a StateFile's, or that of a claim.
_held: dict[str, object] = {}
os.register_at_fork(after_in_child=_held.clear)


def pieces(number: int, text: bytes) -> list[tuple[int, bytes]]:
    """What is to be written for the `number`-th text, in this order, and where; `text` is at most CAPACITY bytes."""
    start = number % 2 * _HALF
    check = zlib.crc32(text, zlib.crc32(_CHECKED.pack(len(text), number)))
    return [(start + _HEAD.size, text), (start, _HEAD.pack(_MAGIC, len(text), number, check))]


def newest(data: bytes) -> bytes | None:
    """The newest whole text in the bytes of a state file; None if there is none."""
    found: dict[int, bytes] = {}
    for start in (0, _HALF):
        if len(data) < start + _HEAD.size:
            continue
        magic, length, number, check = _HEAD.unpack_from(data, start)
        text = data[start + _HEAD.size : start + _HEAD.size + min(length, CAPACITY)]
        if magic == _MAGIC and check == zlib.crc32(text, zlib.crc32(_CHECKED.pack(length, number))):
            found[number] = text
    return found[max(found)] if found else None


def read(path: str) -> tuple[bytes | None, bytes]:
    """The newest whole text of the state file at `path`, None if there is none, and the positions; its writer may be
    alive or dead."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None, b""
    with open(fd, "rb") as file:
        data = file.read(SIZE)
    return newest(data), data[2 * _HALF :]


def is_alive(lock: str) -> bool:
    """Whether the rank of the lock file at `lock` lives."""
    holder = _held.get(os.path.realpath(lock))
    if holder is not None:
        return isinstance(holder, StateFile)
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _locked(fd) == _LIFE
    finally:
        os.close(fd)


class StateFile:
    """The state of a living rank, written by it; belongs to the process that made it. One call at a time."""

    def __init__(self, directory: str, name: str) -> None:
        """Make `name`'s files in `directory`, itself made where it is missing.

        Raises:
            OSError: that can't be done; where another living process has them already, EBUSY.
        """
        self._place = os.path.join(os.path.realpath(directory), name)
        self._number = 0
        self._lock = self._take_lock()
        try:
            self._address = self._map()
        except BaseException:
            self._remove_files()
            del _held[self._place + LOCK]
            raise
        found = os.fstat(self._lock)
        self._identity = found.st_dev, found.st_ino

    @property
    def positions(self) -> int:
        """The address of the positions."""
        return self._address + 2 * _HALF

    def write(self, text: bytes) -> None:
        """Keep `text`, of at most CAPACITY bytes: memory is written, and no more."""
        self._number += 1
        for offset, piece in pieces(self._number, text):
            ctypes.memmove(self._address + offset, piece, len(piece))

    def is_whole(self) -> bool:
        """Whether the files are still there and the lock is ours: people clear directories, and user code closes
        descriptors wholesale."""
        found = self._own_lock()
        return found is not None and found.st_nlink > 0

    def remove(self) -> None:
        """Be done: delete the files and let go of the lock."""
        self._let_go(keep=False)

    def leave(self) -> None:
        """Be done, and leave the files to whoever clears them away."""
        self._let_go(keep=True)

    def _let_go(self, keep: bool) -> None:
        _libc.munmap(self._address, SIZE)
        if self._own_lock() is not None:
            if keep:
                os.close(self._lock)
            else:
                self._remove_files()
        _held.pop(self._place + LOCK, None)

    def _own_lock(self) -> os.stat_result | None:
        """None where the descriptor is closed, and perhaps somebody else's by now."""
        try:
            found = os.fstat(self._lock)
        except OSError:
            return None
        return found if (found.st_dev, found.st_ino) == self._identity else None

    def _take_lock(self) -> int:
        path = self._place + LOCK
        if _held.setdefault(path, self) is not self:
            raise _busy(path)
        try:
            for _ in range(_ATTEMPTS):
                make_directories(os.path.dirname(path))
                fd = _open_lock(path, os.O_CREAT)
                if fd is not None:
                    if _lock(fd, _LIFE) and _is_at(path, fd):
                        return fd
                    os.close(fd)
                time.sleep(_BETWEEN_SECONDS)
            raise _busy(path)
        except BaseException:
            del _held[path]
            raise

    def _map(self) -> int:
        path = self._place + STATE
        try:
            os.unlink(path)  # of a process that had the lock before
        except FileNotFoundError:
            pass
        fd = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Without the disk's space in hand, a write to memory would be a bus error.
            os.posix_fallocate(fd, 0, SIZE)
            # Not the module mmap: up to Python 3.12 its objects close a descriptor that may be the user's by then.
            address = _libc.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
            if address == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
            return int(address)
        finally:
            os.close(fd)

    def _remove_files(self) -> None:
        if _is_at(self._place + LOCK, self._lock):
            _remove(self._place)
        os.close(self._lock)


class Claim:
    """What a dead rank left, in the hands of one process alone."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.text, self.entered = read(place + STATE)

    def remove(self) -> None:
        """Delete the files, and the folders that are empty then."""
        _remove(self._place)


class Taken(Exception):
    """What a dead rank left is in another process' hands, or no longer there."""


class Alive(Exception):
    """The rank lives."""


@contextmanager
def claim(lock: str) -> Iterator[Claim]:
    """What the rank of the lock file at `lock` left, for as long as the block runs; nobody else gets it meanwhile.

    Raises:
        Alive: it lives.
        Taken: another process claims it, or did.
        OSError: the file can't be opened.
    """
    path = os.path.realpath(lock)
    mine = object()
    holder = _held.setdefault(path, mine)
    if holder is not mine:
        raise Alive if isinstance(holder, StateFile) else Taken
    try:
        fd = _open_lock(path)
        if fd is None:
            raise Taken
        try:
            if not _lock(fd, _CLAIM):
                raise Alive if _locked(fd) == _LIFE else Taken
            if not _is_at(path, fd):
                raise Taken
            yield Claim(path.removesuffix(LOCK))
        finally:
            os.close(fd)
    finally:
        del _held[path]


def _busy(path: str) -> OSError:
    return OSError(errno.EBUSY, "another living process writes as the same rank", path)


def _open_lock(path: str, create: int = 0) -> int | None:
    try:
        return high(os.open(path, _OPEN | create, 0o600))
    except FileNotFoundError:
        return None


def _lock(fd: int, length: int) -> bool:
    """Lock the first `length` bytes, if nobody else has one of them."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _locked(fd: int) -> int:
    """How many bytes another process has locked: one, and a rank lives; both, and what it left is claimed; none."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, _CLAIM, 0)
    kind, _, _, length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else int(length)


def _is_at(path: str, fd: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def _remove(place: str) -> None:
    """The lock last: whoever finds one finds what belongs to it, or nothing."""
    for path in (place + STATE, place + LOCK):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
    for folder in (os.path.dirname(place), os.path.dirname(os.path.dirname(place))):
        try:
            os.rmdir(folder)
        except OSError:
            return  # there are others in it
