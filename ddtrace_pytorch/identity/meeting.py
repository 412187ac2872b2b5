"""Where the ranks of one process group meet: its own store, as used by one thread that is not the training thread's.

Every key carries the number of this init in the process and the restart count: what an earlier session left in the
store must not be taken for this one's. Nobody waits inside the store, where a thread could not be woken: what is not
there yet is looked for again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 0.5


class Meeting:
    """Says and hears words in the store; :meth:`hurry`, from any thread, makes all waiting come to an end."""

    def __init__(self, store: Any | None, ordinal: int, restart_count: str) -> None:
        """`ordinal` counts the inits of this process; without a `store`, nobody is met."""
        self._store: Any = store
        self._own_connection = False
        self._suffix = f"{restart_count}/{ordinal}"
        self._hurry = threading.Event()
        self.alone = store is None

    def hurry(self) -> None:
        self._hurry.set()

    @property
    def hurried(self) -> bool:
        return self._hurry.is_set()

    def leave(self) -> None:
        """Let go of the store; nothing can be said or heard after that."""
        self._store = None

    def say(self, word: str, text: str) -> None:
        self._store.set(self._key(word), text)
        if not hasattr(self._store, "check"):
            self._store.add(self._key(word) + "/said", 1)

    def hear(self, word: str, patience: float, at_last: float = 0.0) -> str | None:
        """What was said, once it is; None after `patience` seconds, or `at_last` seconds after a hurry."""
        return self.hear_all([word], patience, at_last)[0]

    def hear_all(self, words: Sequence[str], patience: float, at_last: float = 0.0) -> list[str | None]:
        """The same for all of `words`, in few questions: those that were said where time ran out for the rest."""
        store = self._connection()
        if self._wait_for(words, patience, at_last):
            said = list(words)
        else:
            # Who is in a hurry asks no more.
            said = [] if self.hurried else [word for word in words if self._said(word)]
        keys = [self._key(word) for word in said]
        # Before 2.1 stores have no questions for several keys, and some never got them.
        several = len(keys) > 1 and hasattr(store, "has_extended_api") and store.has_extended_api()
        texts = store.multi_get(keys) if several else [store.get(key) for key in keys]
        heard = dict(zip(said, texts, strict=True))
        return [heard[word].decode() if word in heard else None for word in words]

    def _key(self, word: str) -> str:
        return f"ddtrace_pytorch/{word}/{self._suffix}"

    def _connection(self) -> Any:
        # A connection of our own where there is one, so that a look never queues behind the user's own waiting.
        if not self._own_connection and hasattr(self._store, "clone"):
            self._store = self._store.clone()
            self._own_connection = True
        return self._store

    def _said(self, *words: str) -> bool:
        keys = [self._key(word) for word in words]
        # Before 2.2 a PrefixStore cannot be asked for a key without waiting for it, but a counter can be read.
        if hasattr(self._store, "check"):
            return bool(self._store.check(keys))
        return all(self._store.add(key + "/said", 0) for key in keys)

    def _wait_for(self, words: Sequence[str], patience: float, at_last: float) -> bool:
        deadline = time.monotonic() + patience
        pause = FIRST_PAUSE_SECONDS
        while not self._said(*words):
            if self.hurried:
                deadline = min(deadline, time.monotonic() + at_last)
            if time.monotonic() >= deadline:
                return False
            self._hurry.wait(pause)
            if self.hurried:
                time.sleep(FIRST_PAUSE_SECONDS)
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        return True
