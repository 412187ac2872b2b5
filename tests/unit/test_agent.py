"""Whether what answers at the Agent's address is one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ddtrace_pytorch import agent


class Server(BaseHTTPRequestHandler):
    """Of what it is asked for it has what `has` says."""

    has: frozenset[str] = frozenset()

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200 if self.path in self.has else 404)
        self.end_headers()

    do_PUT = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Serving", (Server,), {"has": frozenset(request.param)})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        pytest.param(["/info", "/v0.4/traces"], True, id="an Agent"),
        pytest.param(["/v0.4/traces"], True, id="an older one, or what stands in for one"),
        pytest.param(["/", "/metrics"], False, id="another server"),
    ],
    indirect=["url"],
)
def test_what_takes_traces_is_one(url: str, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "url", lambda: url)
    assert agent.answers() is is_one
