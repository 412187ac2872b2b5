"""What a user's own ddtrace span costs while a session of ours is open, beside what it costs without us.

    python benchmarks/user_span.py [--rounds 30]

One process, the two in turn: patched with a process group open, and unpatched with none. The Agent is a small
server in another process that says yes to everything. Processor time of the thread that makes the spans, so that
whatever else runs on the machine stays out of it.
"""

from __future__ import annotations

import argparse
import atexit
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from _machine import describe
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent
SPANS = 2000

AGENT = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class YesMan(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_PUT = do_GET

    def log_message(self, *ignored):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), YesMan)
print(server.server_port, flush=True)
server.serve_forever()
"""


def microseconds_per_span() -> float:
    from ddtrace.trace import tracer

    def block() -> float:
        started = time.thread_time()
        for _ in range(SPANS):
            with tracer.trace("user.work"):
                pass
        return (time.thread_time() - started) / SPANS * 1e6

    block()  # opening and closing a session gives the other threads something to do: let it pass
    return block()


def measure(rounds: int) -> list[tuple[float, float]]:
    """µs a span without us and with us, one pair a round, in an order that alternates."""
    import torch.distributed as dist

    import ddtrace_pytorch

    def without_us() -> float:
        return microseconds_per_span()

    def with_us() -> float:
        ddtrace_pytorch.patch()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        took = microseconds_per_span()
        dist.destroy_process_group()
        ddtrace_pytorch.unpatch()
        return took

    without_us(), with_us()
    pairs = []
    for turn in range(rounds):
        print(f"\rround {turn + 1} of {rounds}", end="", flush=True)
        if turn % 2:
            traced = with_us()
            pairs.append((without_us(), traced))
        else:
            plain = without_us()
            pairs.append((plain, with_us()))
    print()
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    machine = describe()
    sys.path.insert(0, str(ROOT))
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True)
    atexit.register(agent.terminate)  # registered before ddtrace is imported, so it runs after its last flush
    assert agent.stdout is not None
    os.environ["DD_TRACE_AGENT_URL"] = f"http://127.0.0.1:{agent.stdout.readline().strip()}"
    os.environ["DD_INSTRUMENTATION_TELEMETRY_ENABLED"] = "false"
    os.environ["DD_REMOTE_CONFIGURATION_ENABLED"] = "false"
    pairs = measure(rounds)
    publish(
        "user_span",
        machine,
        [
            Measured("a user's span without us", median(plain for plain, _ in pairs), "µs", None, rounds),
            Measured("a user's span with a session open", median(ours for _, ours in pairs), "µs", None, rounds),
            Measured("more with us", (median(ours / plain for plain, ours in pairs) - 1) * 100, "%", 5.0, rounds),
        ],
    )


if __name__ == "__main__":
    main()
