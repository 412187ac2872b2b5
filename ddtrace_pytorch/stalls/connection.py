"""A connection to the job's store that is ours alone, and that can be broken off from another thread.

The operations of a store wait inside C++, and where the store's host is frozen they ignore every time-out. What ends
them is the end of their socket. For the same reason the connection is a second client with a short time-out and not a
`clone()`: a clone whose socket ends connects again for as long as the user's own time-out says, five minutes or more.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ddtrace_pytorch.stalls import sockets

CONNECT_SECONDS = 2.0
# In milliseconds it still fits a C int.
_FOREVER = timedelta(days=14)


def bottom(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


class Board:
    """Keys under one prefix of a store, below all prefixes of the user's. Raises what the store raises."""

    def __init__(self, store: Any, place: str) -> None:
        """`place` tells this session from all others that the same server serves or served."""
        self._store = bottom(store)
        self._prefix = f"ddtrace_pytorch/roll/{place}/"
        # Before 2.1 stores have no operations on several keys, and some never got them.
        self._several = hasattr(self._store, "has_extended_api") and self._store.has_extended_api()
        # Before 2.2 nobody can ask for a key without waiting for it, but a counter can be read.
        self._checks = hasattr(self._store, "check")

    def put(self, values: Mapping[str, str | bytes]) -> None:
        keys = [self._prefix + key for key in values]
        if self._several:
            self._store.multi_set(keys, list(values.values()))
        else:
            for key, value in zip(keys, values.values(), strict=True):
                self._store.set(key, value)
        if not self._checks:
            for key in keys:
                self._store.add(key + "/said", 1)

    def there(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are."""
        if self._checks:
            return bool(self._store.check([self._prefix + key for key in keys]))
        return all(self._store.add(f"{self._prefix}{key}/said", 0) for key in keys)

    def wait(self, key: str) -> None:
        """Wait inside C++ until `key` is there; raises when the connection ends."""
        self._store.wait([self._prefix + key], _FOREVER)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """What was put under `keys`, which are there: for one that isn't, the store would wait."""
        whole = [self._prefix + key for key in keys]
        if self._several and len(whole) > 1:
            values: list[bytes] = self._store.multi_get(whole)
            return values
        return [self._store.get(key) for key in whole]

    def take(self, key: str) -> str:
        """The value of `key`, which is there, and is no more after that; empty where nothing can be removed."""
        (value,) = self.get([key])
        self.remove([key])
        return value.decode()

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._prefix + key, amount))

    def exchange(self, key: str, expected: str, desired: str) -> str:
        """Set `key` if its value is `expected` (empty: if it isn't there); what its value is after that."""
        value: bytes = self._store.compare_set(self._prefix + key, expected, desired)
        return value.decode()

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            whole = self._prefix + key
            try:
                self._store.delete_key(whole)
                if not self._checks:
                    self._store.delete_key(whole + "/said")
            except RuntimeError:  # not every release's stores can, and a broken one raises again
                self._store.set(whole, "")


class Connection:
    """One connection: opened and used by one thread, severed by any."""

    def __init__(self, store: Any, place: str) -> None:
        """`store` is the user's, behind any prefixes; nothing is connected yet."""
        self._users: Any = bottom(store)
        self._port: int = getattr(self._users, "port", 0)
        self._place = place
        self._board: Board | None = None
        self._older: set[str] = set()
        self._inode: str | None = None
        self._opening = threading.Event()

    @property
    def board(self) -> Board:
        assert self._board is not None
        return self._board

    def open(self) -> None:
        """Connect, or raise after about :data:`CONNECT_SECONDS`; a frozen host makes it wait until it is severed."""
        users = self._users
        if not pushes(users):
            # A file is shared by all its openers; a hash is in this process, and never blocks.
            own = users.clone() if hasattr(users, "clone") else type(users)(users.path) if _is_file(users) else users
            self._board = Board(own, self._place)
            return
        # Where nobody is there, C++ would try again for seconds, sleep in between where no socket can end it, and tell
        # the user all of it.
        socket.create_connection((users.host, self._port), CONNECT_SECONDS).close()
        self._older = set(sockets.own_sockets())
        self._opening.set()
        options = {"use_libuv": users.libuvBackend} if hasattr(users, "libuvBackend") else {}
        own = type(users)(
            users.host,
            self._port,
            is_master=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
            wait_for_workers=False,
            **options,
        )
        # Recent releases name the descriptor, which also holds where the user connects at this very moment.
        named = re.search(r"\bfd=(\d+)", repr(own))
        self._inode = sockets.inode_of(int(named[1])) if named else self._newest()
        self._board = Board(own, self._place)

    def sever(self) -> None:
        """Make what waits in this connection raise. Nothing where it isn't known from another of the same port, opened
        in the same moment. torch says on stderr that the connection was closed."""
        inode = self._inode or (self._newest() if self._opening.is_set() else None)
        if inode is not None:
            sockets.shut_down(inode)

    def close(self) -> None:
        """Let go of it, in the thread that used it: the server sees it end even if a fork still holds its socket."""
        if self._inode is not None:
            sockets.shut_down(self._inode)
        self.forget()

    def forget(self) -> None:
        """Let go of it without a word: in a forked child, whose socket is its parent's."""
        self._opening.clear()
        self._inode = self._board = self._users = None

    def _newest(self) -> str | None:
        newer = sockets.connected_to(self._port, self._older)
        return newer.pop() if len(newer) == 1 else None


def pushes(store: Any) -> bool:
    """Whether a wait in this store is ended by the server: a TCPStore, which is also the only one with a socket."""
    return hasattr(bottom(store), "port")


def _is_file(store: Any) -> bool:
    return hasattr(store, "path")
