"""What was said of each stall of this rank, from when it is noticed until it is over: perhaps while it is judged."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ddtrace_pytorch.stalls.verdict import Where
from ddtrace_pytorch.stalls.watch import Identity, Over, Pending


class Told:
    """Noticed, judged and over on whichever thread; nothing stays of a stall that is over and not being judged."""

    def __init__(self) -> None:
        # Of each that is not over: the call that the verdict was about, once there is one.
        self._of: dict[Identity, Where | None] = {}
        # Those that are being judged, with how they ended meanwhile.
        self._judged: dict[Identity, Over | None] = {}
        self._lock = threading.Lock()

    def noticed(self, stalls: Iterable[Pending]) -> None:
        with self._lock:
            for one in stalls:
                self._of.setdefault(one.identity, None)

    def judge(self, stalls: Iterable[Pending]) -> bool:
        """`stalls` are judged until :meth:`judged`; gives whether one of them is not over yet."""
        with self._lock:
            self._judged = {one.identity: None for one in stalls if one.identity in self._of}
            return bool(self._judged)

    def judged(self, where: Where | None) -> list[tuple[Over, Where]]:
        """The verdict was about `where` (None: there was none); gives which of them are over by now, and the call that
        was said of each."""
        over = []
        with self._lock:
            for identity, ended in self._judged.items():
                said = self._of[identity] = where or self._of[identity]
                if ended is not None:
                    del self._of[identity]
                    if said is not None:
                        over.append((ended, said))
            self._judged = {}
        return over

    def over(self, ended: Over) -> Where | None:
        """The call that was said of it; None where none was, or where :meth:`judged` is still to give it."""
        identity = ended.pending.identity
        with self._lock:
            if identity in self._judged:
                self._judged[identity] = ended
                return None
            return self._of.pop(identity, None)
