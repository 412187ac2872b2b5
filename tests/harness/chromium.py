"""A headless Chromium, driven over a pipe with its own protocol: one start, any number of looks at a page."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-default-apps", "--disable-extensions", "--disable-sync", "--no-first-run",
    "--no-default-browser-check", "--metrics-recording-only", "--mute-audio", "--remote-debugging-pipe",
    "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--force-color-profile=srgb",
)  # fmt: skip


def executable() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


needs_chromium = pytest.mark.skipif(
    executable() is None and os.environ.get("CI") != "true", reason="no chromium: apt-get install chromium"
)

# In a process of its own: the descriptors that it hears and speaks on may be anybody's here.
CONNECT = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass
class Look:
    """What happened while a page was open: `requests` are addresses, `complaints` what the console said, exceptions,
    and dialogs."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


class Browser:
    def __init__(self, process: subprocess.Popen[bytes], to: int, of: int) -> None:
        self._process = process
        self._to = to
        self._of = of
        self._unread = b""
        self._asked = 0
        self._session: str | None = None
        self.look = Look()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path, *, dark: bool, width: int, height: int = 900, phone: bool = False) -> Look:
        """Load `page`, without a network; back when it is complete and painted."""
        self.look = Look()
        self.ask("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme",
                                                         "value": "dark" if dark else "light"}])  # fmt: skip
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.visit(page.as_uri())
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
        return self.look

    def visit(self, address: str) -> None:
        """Load a page; back when it is complete."""
        self.ask("Page.navigate", url=address)
        self._until("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """What an expression is, as JSON has it; a promise is waited for."""
        told = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def screenshot(self, to: Path, whole: bool = True) -> None:
        """All of the page, however long, or what fits in the window."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)
        to.write_bytes(base64.b64decode(shot["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        message: dict[str, Any] = {"id": self._asked, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._hear()
            if told.get("id") == self._asked:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result

    def _until(self, event: str) -> None:
        while self._hear().get("method") != event:
            pass

    def _hear(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._of], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser says nothing"
            more = os.read(self._of, 1 << 20)
            assert more, f"the browser is gone: {self._process.poll()}"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        self._note(told.get("method", ""), told.get("params", {}))
        return told

    def _note(self, event: str, said: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.look.requests.append(said["request"]["url"])
        elif event in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.look.complaints.append(json.dumps(said)[:500])
        elif event == "Page.javascriptDialogOpening":
            self.look.complaints.append(f"dialog: {said['message']}")
            # Nobody answers it otherwise, and the page stands still.
            self._asked += 1
            answer = {"id": self._asked, "method": "Page.handleJavaScriptDialog", "params": {"accept": True},
                      "sessionId": self._session}  # fmt: skip
            os.write(self._to, json.dumps(answer).encode() + b"\0")


def _pipe() -> list[int]:
    """Neither end is 3 or 4, where the browser expects its own."""
    ends = os.pipe()
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in ends]
    for fd in ends:
        os.close(fd)
    return moved


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """One that keeps what it keeps in `directory`."""
    path = executable()
    assert path is not None
    for name in ("profile", "cache"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    its_in, to = _pipe()
    of, its_out = _pipe()

    env = {**os.environ, "HOME": str(directory), "XDG_CACHE_HOME": str(directory / "cache")}
    command = [sys.executable, "-S", "-c", CONNECT, str(its_in), str(its_out), path, *FLAGS,
               f"--user-data-dir={directory / 'profile'}", "about:blank"]  # fmt: skip
    with open(directory / "chromium.log", "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, pass_fds=(its_in, its_out)
        )
    os.close(its_in)
    os.close(its_out)
    try:
        opened = Browser(process, to, of)
        yield opened
        # It may be gone before it answers.
        with contextlib.suppress(AssertionError):
            opened._session = None
            opened.ask("Browser.close")
        process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(to)
        os.close(of)
