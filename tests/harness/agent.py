"""A real ddapm-test-agent on a free loopback port, with its trace checks on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from harness.waiting import until

CHECKS = "meta_tracer_version_header,trace_content_length,trace_count_header,trace_peer_service"

Span = dict[str, Any]


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(many: int, but: int = 0) -> list[int]:
    """Different ones: none is let go of before all are found."""
    with contextlib.ExitStack() as probes:
        found: list[int] = []
        while len(found) < many:
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            if (port := int(probe.getsockname()[1])) != but:
                found.append(port)
        return found


class Agent:
    """Use as a context manager; `url` is for DD_TRACE_AGENT_URL."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Agent:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        http, grpc = free_ports(2, but=self.port)
        with open(self._directory / f"agent-{self.port}.log", "ab") as output:
            self._process = subprocess.Popen(
                [
                    os.path.join(os.path.dirname(sys.executable), "ddapm-test-agent"),
                    f"--port={self.port}",
                    f"--otlp-http-port={http}",
                    f"--otlp-grpc-port={grpc}",
                    "--pool-trace-check-failures=true",
                    "--max-requests=100000",
                    f"--vcr-cassettes-directory={self._directory}",
                    *self._arguments,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                # The option of the same meaning cannot be parsed by the agent itself.
                env={"ENABLED_CHECKS": CHECKS}
                | {name: value for name, value in os.environ.items() if not name.startswith("DD_")},
            )
        until(self._answers, 30, f"the test agent answers on port {self.port}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the test agent ended at once; see {self._directory}"
        try:
            self._get("/info")
        except OSError:
            return False
        return True

    def _get(self, path: str, patience: float = 10.0) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=patience) as response:
            body: bytes = response.read()
        return body

    def clear(self) -> None:
        self._get("/test/session/clear")
        self._get("/test/trace_check/clear")

    def check_failures(self) -> str:
        """What the agent's own trace checks found wrong; empty if nothing."""
        try:
            self._get("/test/trace_check/failures")
        except urllib.error.HTTPError as failures:
            return failures.read().decode()
        return ""

    def received(self, name: str | None = None) -> list[Span]:
        """Every version of every span received, in no order."""
        # Of half an hour that takes it a while.
        traces = json.loads(self._get("/test/session/traces", patience=300.0))
        spans = [span for trace in traces for span in trace]
        return [span for span in spans if name is None or span["name"] == name]

    def spans(self, name: str | None = None) -> list[Span]:
        """Every span received, its last version only (snapshots give way to the finished span), by start."""
        newest: dict[tuple[int, int], Span] = {}
        for span in sorted(self.received(name), key=version):
            newest[span["trace_id"], span["span_id"]] = span
        return sorted(newest.values(), key=lambda span: int(span["start"]))

    def ranks(self) -> list[Span]:
        """The finished pieces of rank spans, by rank and start."""
        pieces = [span for span in self.spans("pytorch.rank") if not is_snapshot(span)]
        return sorted(pieces, key=lambda span: (span["metrics"]["rank"], span["start"]))


def version(span: Span) -> float:
    """When a snapshot was taken; later than any for a finished span."""
    return float(span.get("metrics", {}).get("_dd.partial_version", float("inf")))


def is_snapshot(span: Span) -> bool:
    return version(span) != float("inf")
