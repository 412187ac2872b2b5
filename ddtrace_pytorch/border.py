"""The border: no error of ours goes past it into a training job."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

log = logging.getLogger("ddtrace_pytorch")

P = ParamSpec("P")
R = TypeVar("R")

_said: set[str] = set()
_speaker = "ddtrace_pytorch"


def speak_for(rank: int) -> None:
    """From now on warnings of this process say which rank they are from."""
    global _speaker
    _speaker = f"ddtrace_pytorch [rank {rank}]"


def warn(message: str, *, exc_info: bool = False) -> None:
    """Log `message` as a warning."""
    # Most training scripts set up no logging, and then neither the level nor the logger's name is shown.
    level = "" if log.hasHandlers() else "WARNING "
    log.warning("%s%s: %s", level, _speaker, message, exc_info=exc_info)


def warn_once(message: str, *, exc_info: bool = False) -> None:
    """Log `message` as a warning the first time this process says it."""
    if message not in _said:
        _said.add(message)
        warn(message, exc_info=exc_info)


def in_words(error: BaseException) -> str:
    """Type and text of `error`, as Python would end its traceback; bears one whose text raises."""
    (*_, words) = traceback.format_exception_only(error)
    return words.strip()


def complain(what: str, error: Exception) -> None:
    """Say once that we could not do `what`: in ``except``, where :func:`safely` would cost a call."""
    why = in_words(error)
    try:
        warn_once(f"could not {what}; training goes on without it ({why})", exc_info=log.isEnabledFor(logging.DEBUG))
    except Exception:
        pass  # the user's log handler raised, and nobody is left to tell


def safely(what: str) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Make a function of ours safe to call from user code: a failure is logged once and gives None.

    `what` completes the sentence "could not ...". Only :class:`Exception` is caught: KeyboardInterrupt and
    SystemExit are the user's.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                complain(what, error)
                return None

        return guarded

    return decorate


def leave_no_trace(error: BaseException) -> None:
    """Take the frame that calls this, and has just caught `error`, out of the traceback; a bare ``raise`` follows.

    Whoever reads the tracebacks of a job, or groups them, finds them as they were without us. (Up to Python 3.10 a
    bare ``raise`` brings back the traceback that was caught, and the frame stays.)
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
