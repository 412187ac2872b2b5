"""Calling one roll: every node is rung, and what they answer is gathered. For a thread that may be kept for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from ddtrace_pytorch.border import log
from ddtrace_pytorch.stalls.connection import Board, Connection
from ddtrace_pytorch.stalls.ear import CALLED, OVER
from ddtrace_pytorch.threads import leave_signals_to_others

# Who finds a roll younger than this leaves it at that. By the wall clocks of two hosts: where they differ by more,
# there are more rolls than needed.
AGAIN_SECONDS = 10.0
_LOOK_SECONDS = 0.05


def answer_key(number: int, node: int) -> str:
    return f"answer/{number}/{node}"


class Asking:
    """One try to call the roll; `done` is set when there is a result, whichever."""

    def __init__(self, connection: Connection, rank: int, rings: Mapping[int, Sequence[str]], patience: float) -> None:
        """`rings`: the keys that call each node; `patience`: seconds from :attr:`thread`'s start to the last look."""
        self.connection = connection
        self.done = threading.Event()
        self.answers: dict[int, bytes] | None = None  # by node; None: the store said nothing of use
        self.called_by_another = False
        self._rank = rank
        self._rings = rings
        self._patience = patience
        self.thread = threading.Thread(target=self._run, name="ddtrace_pytorch.roll_call", daemon=True)

    def _run(self) -> None:
        leave_signals_to_others()
        deadline = time.monotonic() + self._patience
        try:
            self.connection.open()
            board = self.connection.board
            claim = self._claim(board)
            if claim is None:
                self.called_by_another = True
            else:
                self._call(board, claim, deadline)
        except Exception as error:
            log.debug("the roll could not be called", exc_info=error)
        finally:
            self.done.set()
            self.connection.close()

    def _claim(self, board: Board) -> str | None:
        """What this rank says of its roll; None if another rank calls it, or just did."""
        before = board.exchange(CALLED, "", "0 0 -")
        number, when, *_ = before.split()
        now = time.time_ns()
        if abs(now - int(when)) < AGAIN_SECONDS * 1e9:
            return None
        mine = f"{int(number) + 1} {now} {self._rank}"
        return mine if board.exchange(CALLED, before, mine) == mine else None

    def _call(self, board: Board, claim: str, deadline: float) -> None:
        number = int(claim.split()[0])
        awaited = {node: answer_key(number, node) for node in self._rings}
        board.put({ring: str(number) for rings in self._rings.values() for ring in rings})
        keys = list(awaited.values())
        while not (whole := board.there(keys)) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        heard = [node for node, key in awaited.items() if whole or board.there([key])]
        self.answers = dict(zip(heard, board.get([awaited[node] for node in heard]), strict=True)) if heard else {}
        self.done.set()
        board.exchange(CALLED, claim, f"{claim} {OVER}")
        # What came too late for the roll before this one is still there.
        board.remove([*keys, *(answer_key(number - 1, node) for node in self._rings)] if number > 1 else keys)
