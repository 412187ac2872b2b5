"""The pipe on which the Pulse hears signals while the main thread is blocked in C++."""

from __future__ import annotations

import os
import select
import signal
import time

from ddtrace_pytorch.descriptors import high

_NOTHING = b"\0"


class SignalPipe:
    """A pipe that the interpreter's C signal handler writes signal numbers to; :meth:`poke` only wakes the reader."""

    def __init__(self) -> None:
        self._make()

    def _make(self) -> None:
        read, write = os.pipe()
        self._read, self._write = high(read), high(write)
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        found = os.fstat(self._read)
        self._identity = found.st_dev, found.st_ino

    def _is_ours(self, descriptor: int) -> bool:
        """Whether the number still stands for our pipe: user code closes descriptors wholesale, and gets them anew."""
        try:
            found = os.fstat(descriptor)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def attach(self) -> bool:
        """Become the wakeup descriptor, unless somebody else's (asyncio's) is set; whether it was ours already.

        Makes the pipe anew where it was closed. Main thread only.
        """
        if not (self._is_ours(self._read) and self._is_ours(self._write)):
            self.close()
            self._make()
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before not in (-1, self._write):
            signal.set_wakeup_fd(before)
        return before == self._write

    def detach(self) -> None:
        """Stop being the wakeup descriptor; somebody else's is left in place. Main thread only."""
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._write):
            signal.set_wakeup_fd(before)

    def wait(self, timeout: float) -> bytes:
        """The bytes written, after at most `timeout` seconds; empty where there was only a poke or nothing."""
        # One for each call: ranks may be threads of a process, and two can't wait with the same one.
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if not poll.poll(timeout * 1000):
            return b""
        if not self._is_ours(self._read):
            time.sleep(timeout)
            return b""
        try:
            return os.read(self._read, 4096).replace(_NOTHING, b"")
        except BlockingIOError:
            return b""

    def poke(self, byte: bytes = _NOTHING) -> None:
        if not self._is_ours(self._write):
            return
        try:
            os.write(self._write, byte)
        except BlockingIOError:
            pass  # full: the reader will wake anyway

    def close(self) -> None:
        """Detach and close. Main thread only: a closed descriptor's number may soon be somebody's file."""
        self.detach()
        for descriptor in (self._read, self._write):
            if self._is_ours(descriptor):
                os.close(descriptor)
