"""Keeps a rank's last words on disk for as long as it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from ddtrace_pytorch.border import safely, warn_once
from ddtrace_pytorch.private import make_private
from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.stalls.last_words import Identity, LastWords
from ddtrace_pytorch.stalls.places import folder, name
from ddtrace_pytorch.stalls.positions import Legend
from ddtrace_pytorch.stalls.roll import Life, RankState
from ddtrace_pytorch.stalls.state_file import CAPACITY, StateFile

# How much is kept of the first line of an exception.
MESSAGE_LENGTH = 200


class Keeper:
    """One rank's: :meth:`begin`, a :meth:`beat` a second, :meth:`end`, :meth:`forget`. Any thread may call these."""

    def __init__(
        self,
        roots: Sequence[str],
        describe: Callable[[], RankState],
        span: Callable[[], SpanRecord],
        legend: Callable[[], Legend],
        write_to: Callable[[int], object],
    ) -> None:
        """The first of `roots` that can be used has the file. `describe` gives what this rank does, `span` its open
        span as a snapshot, `legend` what the positions mean that are written to the address that `write_to` is called
        with (0: no more)."""
        self._roots = roots
        self._describe = describe
        self._span = span
        self._legend = legend
        self._write_to = write_to
        self._identity: Identity | None = None
        self._file: StateFile | None = None
        self._ended = False
        self._end: tuple[RankState, SpanRecord] | None = None
        self._lock = threading.Lock()

    @safely("keep last words")
    def begin(self, identity: Identity) -> None:
        """Make the file and write to it. Where there is no place for one, a warning is all there is."""
        self._identity = identity
        # Not under the lock, which a beat waits for: this may take as long as the disk does.
        made = None if self._ended else self._make(identity)
        with self._lock:
            if not self._ended:
                self._take(made)
                made = None
        if made is not None:
            made.remove()
        self.beat()

    @safely("keep last words")
    def beat(self) -> RankState:
        """Write down how things stand; gives it."""
        with self._lock:
            state = self._describe()
            if not self._ended:
                if self._file is not None and self._identity is not None and not self._file.is_whole():
                    self._remove()
                    self._take(self._make(self._identity))
                self._write(state, self._span())
            return state

    @safely("keep last words")
    def end(self, span: SpanRecord) -> None:
        """The span is finished, but not sent yet: if the process is gone before, it is told as `span` says."""
        with self._lock:
            self._ended = True
            self._end = replace(self._describe(), life=Life.ENDED, end_reason=_reason(span)), span
            self._write(*self._end)

    @safely("clear last words away")
    def forget(self) -> None:
        """All is told: there is nothing to keep, but for the others to see where an exception took this rank, or a
        signal ended it in the midst of a collective."""
        with self._lock:
            self._ended = True
            if self._end is not None and _is_missed(*self._end) and self._file is not None:
                self._write(*self._end, told=True)
                self._write_to(0)
                self._file.leave()
                self._file = None
            else:
                self._remove()

    @safely("keep last words")
    def resume(self) -> None:
        """The process outlived its end: go on."""
        self._ended, self._end = False, None
        if self._file is None and self._identity is not None:
            self.begin(self._identity)
        else:
            self.beat()

    def abandon(self) -> None:
        """In a forked child: the file is the parent's."""
        self._file = None
        self._write_to(0)
        self._lock = threading.Lock()

    def _take(self, made: StateFile | None) -> None:
        self._file = made
        self._write_to(made.positions if made is not None else 0)

    def _remove(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._write_to(0)  # before the memory goes
            file.remove()

    def _make(self, whose: Identity) -> StateFile | None:
        refusals = []
        for root in self._roots:
            try:
                make_private(root)
                return StateFile(folder(root, whose.job, whose.incarnation), name(whose.rank))
            except OSError as error:
                refusals.append(f"{root}: {error.strerror or error}")
        warn_once(
            f"a rank that is killed can't be told of afterwards, for there is no place for its last words "
            f"({'; '.join(refusals)}); set DD_PYTORCH_STATE_DIR to a directory of your own on this host"
        )
        return None

    def _write(self, state: RankState, span: SpanRecord, told: bool = False) -> None:
        if self._file is not None and self._identity is not None:
            words = LastWords(self._identity, state, span, self._legend(), told=told)
            self._file.write(words.encode(CAPACITY))


def _is_missed(state: RankState, span: SpanRecord) -> bool:
    """Whether others may ask where it was."""
    reason = span.tags.get("pytorch.end_reason", "")
    in_a_call = any(here.current is not None for here in state.groups.values())
    return reason == "exception" or (reason.startswith("signal:") and in_a_call)


def _reason(span: SpanRecord) -> str | None:
    """Why the span ended, with the exception if there was one."""
    reason, kind = span.tags.get("pytorch.end_reason"), span.tags.get("error.type")
    if reason is None or kind is None:
        return reason
    message = next(iter(span.tags.get("error.message", "").splitlines()), "")[:MESSAGE_LENGTH]
    return f"{reason}: {kind}: {message}" if message else f"{reason}: {kind}"
