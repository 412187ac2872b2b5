"""What stands between a job and its Agent, and does to it whatever a network and an overloaded Agent can do."""

from __future__ import annotations

import contextlib
import socket
import threading
from enum import Enum


class Mood(Enum):
    """How connections are dealt with, those that are open already too."""

    FAIR = "passes all on"
    DOWN = "nobody listens"
    SLOW = "answers after 3 s"
    ERROR = "500"
    GARBAGE = "no HTTP at all"
    VANISHES = "goes away in the midst of its answer"
    SILENT = "accepts, and says nothing"


_ANSWERS = {
    Mood.ERROR: b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\nno",
    Mood.GARBAGE: b"\x00\xff\x16\x03\x01" * 400,
    Mood.VANISHES: b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4096\r\n\r\n{",
}


class ChaosAgent:
    """Use as a context manager; `url` is for DD_TRACE_AGENT_URL, `mood` may be set at any time."""

    def __init__(self, agent_port: int) -> None:
        self.agent_port = agent_port
        self.mood_set = threading.Condition()
        self._mood = Mood.FAIR
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def mood(self) -> Mood:
        return self._mood

    @mood.setter
    def mood(self, mood: Mood) -> None:
        with self.mood_set:
            self._mood = mood
            self.mood_set.notify_all()
        self._hang_up()
        if mood is Mood.DOWN:
            self._stop_listening()
        elif self._listener is None:
            self._listen()

    def __enter__(self) -> ChaosAgent:
        self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        self.mood = Mood.DOWN

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _hang_up(self) -> None:
        for one in tuple(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.add(client)
        with client, contextlib.suppress(OSError):
            mood = self._mood
            if mood is Mood.SLOW:
                with self.mood_set:
                    self.mood_set.wait_for(lambda: self._mood is not mood, 3)
            if mood in (Mood.FAIR, Mood.SLOW):
                self._pass_on(client)
            elif mood is Mood.SILENT:
                while client.recv(65536):
                    pass
            else:
                client.recv(65536)
                client.sendall(_ANSWERS[mood])
        self._open.discard(client)

    def _pass_on(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self.agent_port)) as agent:
            self._open.add(agent)
            back = threading.Thread(target=_copy, args=(agent, client), daemon=True)
            back.start()
            _copy(client, agent)
            back.join()
            self._open.discard(agent)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
