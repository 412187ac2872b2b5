"""HTTP over a Unix socket: how an Agent may be reached, and torch's worker server always is."""

from __future__ import annotations

import http.client
import socket


class UnixConnection(http.client.HTTPConnection):
    """To the socket at `path`; `timeout` in seconds, of each operation on it."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
