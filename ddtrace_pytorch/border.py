"""The border: no error of ours goes past it into a training job."""

from __future__ import annotations

import functools
import logging
import os
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

from ddtrace_pytorch.identity.place import local_rank_hint
from ddtrace_pytorch.visible import visible

log = logging.getLogger("ddtrace_pytorch")

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = __name__.partition(".")[0]
# Characters of a warning that are said: it may quote anything.
_LONGEST = 4_000
_VARARGS = 0x04  # as `inspect` has it, which takes long to import

_said: set[str] = set()
_speaker = "ddtrace_pytorch"


def speak_for(rank: int) -> None:
    """From now on warnings of this process say which rank they are from."""
    global _speaker
    _speaker = f"ddtrace_pytorch [rank {rank}]"


def warn(message: str, *, exc_info: bool = False) -> None:
    """Log `message` as a warning, in a line of its own whatever it quotes."""
    message = visible(message[:_LONGEST])
    if len(message) > _LONGEST:
        message = message[:_LONGEST] + "…"
    # Most training scripts set up no logging, and then neither the level nor the logger's name is shown.
    level = "" if log.hasHandlers() else "WARNING "
    log.warning("%s%s: %s", level, _speaker, message, exc_info=exc_info)


def warn_once(message: str, *, exc_info: bool = False) -> None:
    """Log `message` as a warning the first time this process says it."""
    if message not in _said:
        _said.add(message)
        warn(message, exc_info=exc_info)


def warn_for_host(message: str) -> None:
    """Log `message`, which all ranks of a host have reason to say, as a warning of the first of them alone, where the
    launcher numbers them."""
    if not local_rank_hint(os.environ)[0]:
        warn_once(message)


def warn_first(message: str, *, about: str | None = None, exc_info: bool = False) -> None:
    """Log `message` as a warning, unless this process or another one of the job on this host has. `about`: what it is
    about, where the message itself is another each time."""
    about = about or message
    if about not in _said:
        _said.add(about)
        from ddtrace_pytorch.first_here import is_first  # which takes as long to import as all the rest

        if is_first(about):
            warn(message, exc_info=exc_info)


def in_words(error: BaseException) -> str:
    """Type and text of `error`, as Python would end its traceback; bears one whose text raises."""
    (*_, words) = traceback.format_exception_only(error)
    return words.strip()


def pass_on(error: BaseException) -> None:
    """In ``except``: raise again what is not ours.

    That is KeyboardInterrupt and the like, and whatever the user's code raised that Python runs in the midst of ours: a
    signal's handler, or a debugger.
    """
    if not isinstance(error, Exception) or _came_in_between(error):
        raise


def run_theirs(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of the user's that may end neither the job nor the thread that calls it: what it raises to do so
    is an Exception.

    What only came while it ran passes: KeyboardInterrupt, and what the handler of a signal raised. Both come to the
    main thread alone.
    """
    try:
        return function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and (isinstance(error, KeyboardInterrupt) or _came_in_between(error)):
            raise
        raise RuntimeError(f"it raised {in_words(error)}") from error


def _came_in_between(error: BaseException) -> bool:
    """Whether a function raised it that was given the frame which it interrupts."""
    interrupted: list[FrameType] = []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if interrupted and not str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
            for given in _arguments(frame):
                if any(given is one for one in interrupted):
                    return True
        interrupted.append(frame)
        trace = trace.tb_next
    return False


def _arguments(frame: FrameType) -> list[object]:
    code, found = frame.f_code, frame.f_locals
    many = code.co_argcount + code.co_kwonlyargcount
    given = [found.get(name) for name in code.co_varnames[:many]]
    if code.co_flags & _VARARGS:
        given += found.get(code.co_varnames[many], ())
    return given


def complain(what: str, error: BaseException, say: Callable[..., None] = warn_once) -> None:
    """Say once that we could not do `what`: in ``except``, where :func:`safely` would cost a call. What is not ours
    passes on."""
    pass_on(error)
    try:
        why = in_words(error)
        say(f"could not {what}; training goes on without it ({why})", exc_info=log.isEnabledFor(logging.DEBUG))
    except Exception as broken:
        pass_on(broken)  # else the user's log handler raised, and nobody is left to tell


def safely(what: str, say: Callable[..., None] = warn_once) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Make a function of ours safe to call from user code: a failure is logged once and gives None.

    `what` completes the sentence "could not ...", which `say` says. Only :class:`Exception` is caught, and of that
    nothing that the user's signal handlers raise: KeyboardInterrupt and SystemExit are the user's.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                try:
                    complain(what, error, say)
                except RecursionError:
                    pass  # the user's code is as deep as it may go: there is no room to say anything
                return None

        return guarded

    return decorate


def call_each(what: str, *functions: Callable[[], object]) -> None:
    """Call all of them as :func:`safely` does, whatever was raised in the midst of those before: the first of that goes
    on at the end."""
    raised: BaseException | None = None
    try:
        for function in functions:
            try:
                safely(what)(function)()
            except BaseException as error:
                # Ctrl-C, where it comes behind what somebody may catch, ends the process still.
                if raised is None or (isinstance(raised, Exception) and not isinstance(error, Exception)):
                    raised = error
        if raised is not None:
            raise raised
    finally:
        raised = None  # or its traceback would keep itself, and what the callers have


def leave_no_trace(error: BaseException) -> None:
    """Take the frame that calls this, and has just caught `error`, out of the traceback; a bare ``raise`` follows.

    Whoever reads the tracebacks of a job, or groups them, finds them as they were without us. (Up to Python 3.10 a
    bare ``raise`` brings back the traceback that was caught, and the frame stays.)
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
