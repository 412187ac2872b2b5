"""This process's TCP sockets, found and ended without the objects that own them (Linux).

They are told apart by inode, because the number of a descriptor may be another socket's a moment later. Nothing of a
socket is changed by looking: Python's own socket objects would make it non-blocking where the user has set a default
time-out.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator

_LISTENS = "0A"

_libc = ctypes.CDLL(None)


def own_sockets() -> dict[str, int]:
    """The inode of each socket of this process, and a descriptor of it."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:["):
            found[name[len("socket:[") : -1]] = int(descriptor)
    return found


def connected_to(port: int) -> set[str]:
    """The inodes of those whose other end is `port` on any host."""
    return {inode for _, remote, _, inode in _table() if remote == port} & set(own_sockets())


def listens_on(port: int) -> bool:
    """Whether this process is the server behind `port`."""
    listening = {inode for local, _, state, inode in _table() if local == port and state == _LISTENS}
    return bool(listening & set(own_sockets()))


def shut_down(inode: str) -> None:
    """End the connection both ways: who waits in it, in C++ or elsewhere, gets an error. Nothing if it is gone."""
    descriptor = own_sockets().get(inode)
    if descriptor is None:
        return
    try:
        held = os.dup(descriptor)
    except OSError:
        return
    try:
        if os.readlink(f"/proc/self/fd/{held}") == f"socket:[{inode}]":
            _libc.shutdown(held, socket.SHUT_RDWR)
    finally:
        os.close(held)


def _table() -> Iterator[tuple[int, int, str, str]]:
    """Local port, remote port, state and inode of every TCP socket in this network namespace."""
    for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(name, encoding="ascii") as lines:
                next(lines, None)
                for line in lines:
                    _, local, remote, state, *rest = line.split()
                    yield int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16), state, rest[5]
        except OSError:
            continue  # no IPv6 here
