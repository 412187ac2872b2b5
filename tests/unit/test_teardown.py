"""CUPTI is let go of, and that is awaited; a thread that ends at the next call of CUDA stands in for Kineto's."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ddtrace_pytorch.kernels import teardown


class Cuda:
    """Its calls, and what ends at one of them."""

    def __init__(self, initialised: bool = True) -> None:
        self.calls, self._initialised, self.called = 0, initialised, threading.Event()

    def is_initialized(self) -> bool:
        return self._initialised

    def is_current_stream_capturing(self) -> bool:
        self.calls += 1
        self.called.set()
        return False


def torch(cuda: Cuda, version: str | None = "13.0") -> Any:
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda=version))


def test_the_thread_that_a_profile_s_end_begins_has_ended_after_it() -> None:
    cuda = Cuda()
    before = teardown.threads(torch(cuda))
    thread = threading.Thread(target=cuda.called.wait, args=(30,))
    thread.start()
    teardown.wait(torch(cuda), before)
    assert str(thread.native_id) not in os.listdir("/proc/self/task")
    assert cuda.calls >= 1


def test_nothing_is_called_where_none_begins_or_no_gpu_is_used() -> None:
    for cuda in (Cuda(), Cuda(initialised=False)):
        teardown.wait(torch(cuda), teardown.threads(torch(cuda)))
        assert cuda.calls == 0


def test_one_that_stays_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teardown, "_PATIENCE", 0.05)
    cuda, over = Cuda(), threading.Event()
    before = teardown.threads(torch(cuda))
    thread = threading.Thread(target=over.wait)
    thread.start()
    began = time.monotonic()
    teardown.wait(torch(cuda), before)
    assert 0.05 <= time.monotonic() - began < 10
    over.set()
    thread.join()


@pytest.mark.parametrize(
    ("version", "said", "then"),
    [("13.0", None, "1"), ("12.6", None, "1"), ("12.4", None, None), (None, None, None), ("13.0", "0", "0")],
)
def test_it_is_asked_for_where_it_is_safe_and_the_user_s_word_stands(
    monkeypatch: pytest.MonkeyPatch, version: str | None, said: str | None, then: str | None
) -> None:
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if said is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", said)
    teardown.ask_for(torch(Cuda(), version))
    assert os.environ.get("TEARDOWN_CUPTI") == then
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
