"""The pipe on which signals are heard."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from harness.waiting import until

from ddtrace_pytorch.signal_pipe import SignalPipe


def test_two_threads_wait_at_once() -> None:
    pipe = SignalPipe()
    both = threading.Barrier(3)

    def hear() -> bytes:
        both.wait(10)
        heard = b""
        while not heard:
            heard = pipe.wait(0.05)
        return heard

    try:
        with ThreadPoolExecutor(2) as threads:
            hearing = [threads.submit(hear) for _ in range(2)]
            both.wait(10)
            for byte in (b"\x0f", b"\x02"):
                before = sum(one.done() for one in hearing)
                pipe.poke(byte)
                until(lambda before=before: sum(one.done() for one in hearing) > before, 10, "one of them has heard it")
            assert sorted(one.result() for one in hearing) == [b"\x02", b"\x0f"]
    finally:
        pipe.close()
