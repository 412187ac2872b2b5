"""This process's sockets, found and ended without the objects that own them (Linux).

They are told apart by inode, because the number of a descriptor may be another socket's a moment later. Nothing of a
socket is changed by looking: Python's own socket objects would make it non-blocking where the user has set a default
time-out.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from typing import Any

_libc = ctypes.CDLL(None)
# Room for an address of any family; the port is in the same place for IPv4 and IPv6, most significant byte first.
_ADDRESS_BYTES = 128
_PORT = slice(2, 4)


def own_sockets() -> dict[str, int]:
    """The inode of each socket of this process, and a descriptor of it."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        inode = inode_of(int(descriptor))
        if inode is not None:
            found[inode] = int(descriptor)
    return found


def inode_of(descriptor: int) -> str | None:
    """None for what is no socket, or is closed."""
    try:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return name if name.startswith("socket:") else None


def connected_to(port: int, but: set[str]) -> set[str]:
    """The inodes of those whose other end is `port` on any host, without those in `but`."""
    return {
        inode
        for inode, descriptor in own_sockets().items()
        if inode not in but and _port(_libc.getpeername, descriptor) == port
    }


def listens_on(port: int) -> bool:
    """Whether this process is the server behind `port`."""
    return any(
        _port(_libc.getsockname, descriptor) == port and _listens(descriptor) for descriptor in own_sockets().values()
    )


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
        if inode_of(held) == inode:
            _libc.shutdown(held, socket.SHUT_RDWR)
    finally:
        os.close(held)


def _port(name: Any, descriptor: int) -> int | None:
    """What `name`, of the C library, says of the socket; None for one that has no port."""
    address = ctypes.create_string_buffer(_ADDRESS_BYTES)
    size = ctypes.c_uint32(_ADDRESS_BYTES)
    if name(descriptor, address, ctypes.byref(size)) != 0:
        return None
    family = int.from_bytes(address.raw[:2], sys.byteorder)
    return int.from_bytes(address.raw[_PORT], "big") if family in (socket.AF_INET, socket.AF_INET6) else None


def _listens(descriptor: int) -> bool:
    listens = ctypes.c_int()
    size = ctypes.c_uint32(ctypes.sizeof(listens))
    option = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return _libc.getsockopt(descriptor, *option, ctypes.byref(listens), ctypes.byref(size)) == 0 and bool(listens.value)
