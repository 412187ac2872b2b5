"""One rank's ear: a thread that waits for its node to be called, on a connection of its own.

In a TCPStore it waits inside C++ and costs nothing until the server wakes it; elsewhere it looks from time to time.
It counts itself in and out, so that the process that hosts the store can let all ears go before the store does: an
ear that loses its connection makes torch complain on stderr.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ddtrace_pytorch.border import log
from ddtrace_pytorch.stalls.connection import Board, Connection
from ddtrace_pytorch.threads import leave_signals_to_others

GOODBYE = "goodbye"
EARS = "ears"
# The number of the last roll, when it was called (wall clock, ns), by which rank, and whether it is over.
CALLED = "called"
OVER = "over"
# After each try to connect.
_PAUSES_SECONDS = (1.0, 5.0, 30.0)


class Ear:
    """Calls `answer` with its connection and the number of each roll that is called by `ring`."""

    def __init__(
        self,
        connection: Connection,
        ring: str,
        pause: float | None,
        delay: float,
        answer: Callable[[Board, int], None],
    ) -> None:
        """`pause`: the seconds between two looks; None where the server wakes who waits. `delay`: what this one
        leaves to others to answer first."""
        self.connection = connection
        self.ring = ring
        self.heard_at: float | None = None  # of the monotonic clock
        self._pause = pause
        self._delay = delay
        self._answer = answer
        self._leaving = threading.Event()
        self.thread = threading.Thread(target=self._listen, name="ddtrace_pytorch.ear", daemon=True)

    def leave(self) -> None:
        """Look no more. One that waits in C++ has to be told :data:`GOODBYE` by its ring."""
        self._leaving.set()

    def _listen(self) -> None:
        leave_signals_to_others()
        try:
            if not self._connect():
                return
            board = self.connection.board
            board.add(EARS, 1)
            while self._wait(board):
                word = board.take(self.ring)
                if word == GOODBYE:
                    break
                if word:
                    self.heard_at = time.monotonic()
                    self._leaving.wait(self._delay)
                    # Who comes late, or was stopped, answers no more: nobody would take its answer away again.
                    number, *_, last = board.get([CALLED])[0].decode().split()
                    if number == word and last != OVER:
                        self._answer(board, int(word))
            if board.add(EARS, -1) == 0:
                board.remove([EARS, CALLED])
        except Exception as error:
            log.debug("this rank no longer hears the roll called", exc_info=error)
        finally:
            self.connection.close()

    def _connect(self) -> bool:
        """Whether it was done: a host that is busy with the connections of a whole job is asked again."""
        for pause in _PAUSES_SECONDS:
            try:
                self.connection.open()
                return True
            except (OSError, RuntimeError) as error:
                log.debug("no connection to hear the roll called with", exc_info=error)
            if self._leaving.wait(pause):
                break
        return False

    def _wait(self, board: Board) -> bool:
        if self._pause is None:
            board.wait(self.ring)
            return True
        while not self._leaving.wait(self._pause):
            if board.there([self.ring]):
                return True
        return False
