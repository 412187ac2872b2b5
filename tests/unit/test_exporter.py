from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.waiting import until

from ddtrace_pytorch import agent, exporter
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.exporter import Exporter
from ddtrace_pytorch.settings import load
from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.weakly import weakly


class Agent:
    """Takes the place of the module `agent`: keeps what it is asked for, and does `meanwhile` at each flush."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def answers(self) -> bool:
        self.calls.append("answers")
        return True

    def send(self, record: SpanRecord) -> None:
        self.calls.append(record.name)

    def flush(self) -> None:
        self.calls.append("flush")
        self.meanwhile()


@pytest.fixture
def fake_agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    fake = Agent()
    monkeypatch.setattr(agent, "answers", fake.answers)
    monkeypatch.setattr(agent, "flush", fake.flush)
    monkeypatch.setattr(exporter, "_send", fake.send)
    return fake


def begun(export: str, root: Path) -> Exporter:
    settings = load({"DD_PYTORCH_EXPORT": export, "DD_PYTORCH_LOG_DIR": str(root)})
    one = Exporter(settings, 0, Clock(), identity=lambda: {"rank": 0}, run=lambda: ("job", "incarnation"))
    one.start()
    return one


def span(name: str) -> SpanRecord:
    return SpanRecord(name, "resource", "service", 1, 2, None, start=0, duration=1, tags={}, metrics={})


def written(root: Path) -> list[str]:
    lines = (root / "job" / "incarnation" / "rank-00000.jsonl").read_text().splitlines()
    return [record.get("name", record["type"]) for record in map(json.loads, lines)]


def test_a_close_sends_and_writes_what_is_queued_and_flushes_once(fake_agent: Agent, tmp_path: Path) -> None:
    one = begun("both", tmp_path)
    one.put_span(span("first"))
    assert one.drain(10)
    fake_agent.calls.clear()
    one.put_span(span("second"))
    one.put({"type": "beat"})
    assert one.close(10)
    assert fake_agent.calls == ["second", "flush"]
    assert written(tmp_path) == ["identity", "first", "second", "beat"]


def test_a_drain_is_released_whenever_it_comes(fake_agent: Agent, tmp_path: Path) -> None:
    one = begun("both", tmp_path)
    late = [threading.Thread(target=one.drain, args=(60,), daemon=True) for _ in range(2)]
    fake_agent.meanwhile = late[0].start  # during the last look at the queues
    assert one.close(10)
    late[1].start()
    for thread in late:
        thread.join(10)
        assert not thread.is_alive()


def test_what_comes_during_the_last_look_is_written_or_counted(
    fake_agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for export in ("agent", "both"):
        one = begun(export, tmp_path)
        fake_agent.meanwhile = lambda one=one: one.put_span(span("late"))
        assert one.close(10)
    assert written(tmp_path) == ["identity", "late"]
    (told,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "1 span was not sent: the session was ending" in told


def test_whose_it_is_stays_until_the_thread_ends_and_no_longer(fake_agent: Agent, tmp_path: Path) -> None:
    class Whole:
        def identity(self) -> dict[str, int]:
            return {"rank": 0}

        def run(self) -> tuple[str, str]:
            return "job", "incarnation"

    whole, goes_on = Whole(), threading.Event()
    gone = weakref.ref(whole)
    settings = load({"DD_PYTORCH_EXPORT": "both", "DD_PYTORCH_LOG_DIR": str(tmp_path)})
    one = Exporter(settings, 0, Clock(), weakly(whole.identity), weakly(whole.run))
    fake_agent.meanwhile = lambda: goes_on.wait(60)
    one.put_span(span("held up"))
    one.start(whole)
    del whole
    assert not one.close(0.01)
    goes_on.set()
    assert one.close(60)
    assert written(tmp_path) == ["identity", "held up"]
    until(lambda: gone() is None, 10, "it is given back")


def test_spans_that_were_not_sent_are_counted_in_grammar(
    fake_agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = begun("agent", tmp_path)
    fake_agent.meanwhile = lambda: [one.put_span(span(name)) for name in ("late", "later")]
    assert one.close(10)
    assert "2 spans were not sent: the session was ending" in caplog.text


def test_spans_that_the_writer_has_no_time_for_are_counted_and_not_kept(
    fake_agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter, "SPANS_QUEUED", 10)
    one = Exporter(load({"DD_PYTORCH_EXPORT": "agent"}), 0, Clock(), identity=dict, run=lambda: None)
    for number in range(25):  # before it starts: a writer that is held up
        one.put_span(span(str(number)))
    one.start()
    assert one.close(10)
    assert [name for name in fake_agent.calls if name.isdigit()] == [str(number) for number in range(10)]
    assert "15 spans were not sent" in caplog.text


def test_an_agent_that_was_only_slow_is_asked_again_soon(
    fake_agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "FRESH_SECONDS", 0.05)
    answers = iter([True, False])
    one = begun("agent", tmp_path)
    monkeypatch.setattr(agent, "answers", lambda: next(answers, True))
    one.put_span(span("first"))
    until(lambda: "first" in fake_agent.calls, 10, "the first is sent")
    one._asked_at -= exporter.ASK_AGAIN_SECONDS
    one.put_span(span("second"))
    until(lambda: one._agent_answers is False, 10, "it did not answer")
    assert one._spans_in_doubt == 1

    def sent() -> bool:
        one.wake()
        return "second" in fake_agent.calls

    until(sent, 10, "it is asked again long before a minute is over")
    one.close(10)
