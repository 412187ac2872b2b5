"""No error of ours reaches the user's code; every error of theirs does."""

from __future__ import annotations

import functools
import itertools
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from harness.depth import rooms, with_room_for

from ddtrace_pytorch import border
from ddtrace_pytorch.border import run_theirs, safely, warn_once

_number = itertools.count()


def fresh(text: str) -> str:
    """A message that this process has not said yet."""
    return f"{text} {next(_number)}"


def test_a_warning_is_said_once_and_another_one_still(caplog: pytest.LogCaptureFixture) -> None:
    first, second = fresh("first"), fresh("second")
    for message in (first, second, first, second):
        warn_once(message)
    assert caplog.messages == [f"ddtrace_pytorch: {first}", f"ddtrace_pytorch: {second}"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert {record.name for record in caplog.records} == {"ddtrace_pytorch"}


def test_a_warning_names_the_rank_once_that_is_known(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(border, "_speaker", border._speaker)
    border.speak_for(3)
    warn_once(message := fresh("who said this"))
    assert caplog.messages == [f"ddtrace_pytorch [rank 3]: {message}"]


def test_where_logging_is_not_set_up_a_warning_says_that_it_is_one() -> None:
    said = "from ddtrace_pytorch.border import warn_once; {}warn_once('look out')"
    plain, set_up = (
        subprocess.run([sys.executable, "-c", said.format(first)], capture_output=True, text=True, check=True).stderr
        for first in ("", "import logging; logging.basicConfig(); ")
    )
    assert plain == "WARNING ddtrace_pytorch: look out\n"
    assert set_up == "WARNING:ddtrace_pytorch:ddtrace_pytorch: look out\n"


def test_what_succeeds_passes_through() -> None:
    @safely("add")
    def add(one: int, *, two: int) -> int:
        """Sum."""
        return one + two

    assert add(1, two=2) == 3
    assert add.__name__ == "add"
    assert add.__doc__ == "Sum."


def test_a_failure_gives_none_and_one_warning_that_says_what_and_why(caplog: pytest.LogCaptureFixture) -> None:
    what = fresh("measure the moon")

    @safely(what)
    def fail() -> int:
        raise OSError(28, "No space left on device")

    assert [fail(), fail(), fail()] == [None, None, None]
    (message,) = caplog.messages
    assert what in message
    assert "OSError" in message
    assert "No space left on device" in message
    assert "training goes on" in message


def test_the_traceback_is_there_for_who_debugs_us_and_only_for_them(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("deep inside")

    safely(fresh("stay quiet"))(fail)()
    with caplog.at_level(logging.DEBUG, "ddtrace_pytorch"):
        safely(fresh("speak up"))(fail)()
    quiet, loud = caplog.records
    assert not quiet.exc_info
    assert loud.exc_info
    assert isinstance(loud.exc_info[1], ValueError)


@pytest.mark.parametrize("theirs", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_the_users_passes_unchanged(theirs: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    error = theirs("theirs")

    @safely("swallow it")
    def interrupted() -> None:
        raise error

    with pytest.raises(theirs) as caught:
        interrupted()
    assert caught.value is error
    assert caplog.messages == []


def test_an_error_whose_text_raises_is_swallowed_too(caplog: pytest.LogCaptureFixture) -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text for you")

    @safely(what := fresh("read it"))
    def fail() -> None:
        raise Hostile

    assert fail() is None
    (message,) = caplog.messages
    assert what in message
    assert "Hostile" in message


def test_a_log_handler_that_raises_does_not_get_us_into_training() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ConnectionError("the log server is gone")

    @safely(fresh("be heard"))
    def fail() -> None:
        raise ValueError

    handler = Broken()
    logging.getLogger("ddtrace_pytorch").addHandler(handler)
    try:
        assert fail() is None
    finally:
        logging.getLogger("ddtrace_pytorch").removeHandler(handler)


class Alarm(Exception):
    """What handlers of the user's raise."""


def handler(number: int, frame: FrameType | None) -> None:
    raise Alarm


def once(*_: object) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise Alarm


class Handler:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.deeper()

    def deeper(self) -> None:
        raise Alarm

    def method(self, number: int, /, frame: FrameType | None = None) -> None:
        handler(number, frame)


HANDLERS: list[Callable[..., Any]] = [
    handler,
    once,
    lambda number, frame: handler(number, None),
    lambda *_: Handler().deeper(),
    Handler(),
    Handler().method,
    functools.partial(lambda text, number, frame: handler(number, frame), "bound"),
    functools.lru_cache(Handler()),
]


@pytest.fixture
def usr1() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("theirs", HANDLERS)
def test_what_a_signals_handler_raises_in_the_midst_of_ours_reaches_the_user(
    theirs: Callable[..., Any], usr1: None, caplog: pytest.LogCaptureFixture
) -> None:
    @safely(fresh("be interrupted"))
    def interrupted() -> None:
        inside()

    @safely(fresh("be interrupted in the midst"))
    def inside() -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Exception as error:
            border.pass_on(error)

    signal.signal(signal.SIGUSR1, theirs)
    with pytest.raises(Alarm):
        interrupted()
    assert caplog.messages == []


def test_it_also_does_while_a_warning_is_given(usr1: None) -> None:
    class Interrupted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            signal.raise_signal(signal.SIGUSR1)

    @safely(fresh("be heard in time"))
    def fail() -> None:
        raise ValueError

    signal.signal(signal.SIGUSR1, handler)
    heard = Interrupted()
    logging.getLogger("ddtrace_pytorch").addHandler(heard)
    try:
        with pytest.raises(Alarm):
            fail()
    finally:
        logging.getLogger("ddtrace_pytorch").removeHandler(heard)


def test_a_handler_that_raises_nothing_leaves_our_failure_ours(usr1: None, caplog: pytest.LogCaptureFixture) -> None:
    @safely(fresh("go on"))
    def fail() -> None:
        signal.raise_signal(signal.SIGUSR1)
        raise TimeoutError

    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    assert fail() is None
    assert len(caplog.messages) == 1


def test_what_interrupts_by_itself_passes_as_it_did(usr1: None) -> None:
    @safely(fresh("be interrupted from the keyboard"))
    def interrupted() -> None:
        signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(3))
    with pytest.raises(SystemExit):
        interrupted()


def test_where_there_is_no_room_for_one_more_call_a_failure_is_still_none_of_the_users() -> None:
    @safely(fresh("find room"))
    def fail() -> None:
        fail.__wrapped__()  # type: ignore[attr-defined]

    assert {with_room_for(room, fail) for room in rooms()} == {None}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(3), "it raised SystemExit: 3"),
        (SystemExit(), "it raised SystemExit"),
        (GeneratorExit(), "it raised GeneratorExit"),
        (KeyboardInterrupt(), "it raised KeyboardInterrupt"),
    ],
)
def test_what_of_the_users_is_called_may_not_end_who_calls_it(error: BaseException, words: str) -> None:
    said: list[BaseException] = []

    def theirs(first: int, *, second: int) -> int:
        if first == second:
            raise error
        return second

    def ours() -> None:
        try:
            run_theirs(theirs, 1, second=1)
        except BaseException as raised:
            said.append(raised)

    thread = threading.Thread(target=ours)
    thread.start()
    thread.join()
    assert [(type(one), str(one), one.__cause__) for one in said] == [(RuntimeError, words, error)]
    ours()
    on_main = (KeyboardInterrupt, "") if isinstance(error, KeyboardInterrupt) else (RuntimeError, words)
    assert (type(said[1]), str(said[1])) == on_main
    assert run_theirs(theirs, 1, second=2) == 2


def test_what_a_signals_handler_raises_while_it_runs_is_meant_for_who_called_it(usr1: None) -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(3))
    with pytest.raises(SystemExit):
        run_theirs(lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(KeyError):
        run_theirs({}.__getitem__, "an exception is theirs as it is")
