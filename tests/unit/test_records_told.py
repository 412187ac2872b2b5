"""What a session tells of the user's records: each in the run log, some spans to Datadog, the others in totals."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from harness.exporter import KeepingExporter

from ddtrace_pytorch import event, scalar, span, step_tag
from ddtrace_pytorch.clock import Clock
from ddtrace_pytorch.rank_span import RankSpan
from ddtrace_pytorch.records import observer, switch
from ddtrace_pytorch.records.observer import Records
from ddtrace_pytorch.records.recorder import Recorder
from ddtrace_pytorch.records.totals import MOST_NAMES, Said, SpanTotals, named
from ddtrace_pytorch.spans import SpanRecord
from ddtrace_pytorch.training.progress import Progress, Step


class Exporter(KeepingExporter):
    """The run log has the user's spans as records of their own."""

    def put_span(self, span: SpanRecord, logged: bool = True) -> None:
        assert not logged
        super().put_span(span, logged)


class Told:
    """A session's records, by hand."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.recorder = Recorder(self.progress, 10, lambda *ignored: None, lambda: None)
        self.exporter: Any = Exporter()
        self.rank = RankSpan(service="pytorch", rank=0, start=Clock().now(), facts={})
        self.records = Records(self.recorder, Clock(), self.rank, self.exporter)
        self.records.open()

    def step(self, number: int | None) -> Step:
        step = self.progress.step = Step(number, number)
        return step

    def spans(self) -> dict[str, SpanRecord]:
        """What was sent by itself, by name."""
        self.records.beat()
        return {one.resource: one for one in self.exporter.spans if one.name == "pytorch.span"}

    def log(self, kind: str) -> list[dict[str, Any]]:
        self.records.beat()
        return [record for record in self.exporter.records if record["type"] == kind]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    # Spans of any length are sent, but where a test says otherwise.
    monkeypatch.setattr(observer, "SHORTEST", 0)
    found = Told()
    monkeypatch.setattr(switch, "recorder", found.recorder)
    return found


def test_the_run_log_has_each_record_in_full(told: Told) -> None:
    told.step(5)
    with span("outer", size=1, where=None):
        step_tag("gc")
        event("now", x=math.inf)
        scalar({"loss": math.nan, "n": 2, "bad": "x"}, step=4)
    now, numbers, outer = told.log("event") + told.log("scalar") + told.log("user_span")
    assert (now["name"], now["attributes"], now["step"], now["relative_step"]) == ("now", {"x": "Infinity"}, 5, 5)
    assert now["step_tags"] == ["gc"]
    assert now["parent"] == outer["id"]
    assert math.isnan(numbers["metrics"].pop("loss"))
    assert (numbers["metrics"], numbers["types"], numbers["step"]) == ({"n": 2}, {"bad": "x"}, 4)
    assert "relative_step" not in numbers
    assert (outer["name"], outer["attributes"], outer["thread"]) == ("outer", {"size": 1, "where": None}, "MainThread")
    assert outer["start"] + outer["duration"] == outer["ts"] >= now["ts"] >= outer["start"]
    assert [record["seq"] for record in (now, numbers, outer)] == [1, 2, 3]
    for record in (now, numbers, outer):
        file, line, function = record["at"].rsplit(":", 2)
        assert file == __file__
        assert int(line) > 0
        assert function.endswith("test_the_run_log_has_each_record_in_full")
        assert "task" not in record


def test_a_failed_span_says_with_what(told: Told) -> None:
    with pytest.raises(KeyError), span("fails"):
        raise KeyError("x")
    (record,) = told.log("user_span")
    assert record["error"]["type"] == "KeyError"
    assert record["error"]["message"] == "'x'"
    assert record["error"]["stack"].endswith("KeyError: 'x'")
    sent = told.spans()["fails"]
    assert sent.error
    assert sent.tags["error.type"] == "KeyError"
    assert sent.tags["error.message"] == "'x'"
    assert sent.tags["error.stack"] == record["error"]["stack"]


def test_text_that_is_no_text_is_written_all_the_same(told: Told) -> None:
    event("lone \ud800", **{"k\udfff": "\ud800"})
    (record,) = told.log("event")
    assert record["name"] == "lone \\ud800"
    assert record["attributes"] == {"k\\udfff": "\\ud800"}


def test_the_spans_of_a_sampled_step_are_sent_once_it_is_known(told: Told) -> None:
    step = told.step(7)
    with span("outer"), span("inner"):
        pass
    assert told.spans() == {}
    step.sampled = True
    sent = told.spans()
    assert list(sent) == ["inner", "outer"]
    assert sent["outer"].parent_id == step.span_id
    assert sent["inner"].parent_id == sent["outer"].span_id
    assert {one.trace_id for one in sent.values()} == {told.rank.piece.trace_id}
    assert sent["outer"].metrics["step"] == 7
    assert sent["outer"].tags["span.at"].rpartition(":")[2].endswith("once_it_is_known")


def test_of_a_step_that_is_not_sampled_the_failed_ones_are_sent(told: Told) -> None:
    step = told.step(7)
    with span("good"), pytest.raises(KeyError), span("bad"), span("worse"):
        raise KeyError
    step.sampled = False
    sent = told.spans()
    assert list(sent) == ["worse", "bad"]
    assert sent["worse"].parent_id == sent["bad"].span_id
    assert sent["bad"].parent_id == told.rank.piece.span_id


def test_a_span_around_steps_is_no_parent_of_theirs_and_sent_like_one_outside(told: Told) -> None:
    steps = []
    with span("epoch"):
        for number in range(3):
            steps.append(told.step(number))
            with span(f"in {number}"):
                pass
    for step in steps:
        step.sampled = True
    sent = told.spans()
    assert [sent[f"in {number}"].parent_id for number in range(3)] == [step.span_id for step in steps]
    assert sent["epoch"].parent_id == told.rank.piece.span_id


def test_a_span_around_the_end_of_a_step_is_in_that_step(told: Told) -> None:
    step = told.step(1)
    with span("step"):
        with span("forward"):
            pass
        told.step(2)  # by the optimizer
    step.sampled = True
    sent = told.spans()
    assert sent["step"].parent_id == step.span_id
    assert sent["forward"].parent_id == sent["step"].span_id


def test_short_spans_are_not_sent_unless_they_failed(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "SHORTEST", 10**12)
    step = told.step(1)
    with pytest.raises(KeyError), span("failed"):
        raise KeyError
    for _ in range(3):
        with span("short"):
            pass
    step.sampled = True
    assert list(told.spans()) == ["failed"]
    told.records.summarise()
    (short,) = [one for one in told.exporter.spans if one.resource == "short"]
    assert short.name == "pytorch.spans"
    assert short.metrics["span.count"] == 3


def test_of_too_many_spans_in_a_step_the_number_of_those_not_sent_is_told(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "HELD_OF_STEP", 10)
    step = told.step(1)
    for number in range(13):
        with span("many", number=number):
            pass
    step.sampled = True
    told.records.beat()
    assert len(told.exporter.spans) == 10
    told.records.summarise()
    assert told.exporter.spans[-1].metrics["span.not_sent"] == 3
    assert len(told.log("user_span")) == 13


def test_outside_of_steps_the_first_of_a_name_is_sent_and_then_one_in_so_many(told: Told) -> None:
    for number in range(19):  # so few that none is slow yet, however busy the machine
        with span("often", number=number):
            pass
    with span("once"):
        pass
    told.records.beat()
    assert [one.metrics.get("number") for one in told.exporter.spans] == [0, 10, None]


def test_outside_of_steps_a_span_hangs_on_the_next_one_around_it_that_is_sent(told: Told) -> None:
    for number in range(2):
        with span("twice"), span(f"inner {number}"):
            pass
    sent = told.spans()
    assert list(sent) == ["inner 0", "twice", "inner 1"]
    assert sent["inner 0"].parent_id == sent["twice"].span_id
    assert sent["inner 1"].parent_id == told.rank.piece.span_id


def test_outside_of_steps_what_takes_far_longer_than_usual_is_sent() -> None:
    totals = SpanTotals()
    for _ in range(19):
        totals.add(1_000_000, False, "")
    assert not totals.is_slow(10**12)
    totals.add(1_000_000, False, "")
    assert totals.is_slow(4_000_000)
    assert not totals.is_slow(2_000_000)


def test_a_span_is_in_the_piece_of_the_rank_span_in_which_it_began(told: Told) -> None:
    old = told.rank.piece
    with span("across"):
        with span("before"):
            pass
        told.records.beat()
        told.rank.rotate(Clock().now())
        with span("after"):
            pass
    sent = told.spans()
    new = told.rank.piece
    assert (sent["across"].trace_id, sent["across"].parent_id) == (old.trace_id, old.span_id)
    assert (sent["before"].trace_id, sent["before"].parent_id) == (old.trace_id, sent["across"].span_id)
    assert (sent["after"].trace_id, sent["after"].parent_id) == (new.trace_id, new.span_id)


def test_attributes_are_tags_and_metrics_and_none_takes_the_place_of_ours(told: Told) -> None:
    values = {"text": "x", "number": 2, "flag": True, "none": None, "nan": math.nan, "large": 2**60}
    with span("s", **values, step=3, env="prod", **{"dotted.name": 1, "_dd.p": "x"}):  # type: ignore[arg-type]
        pass
    sent = told.spans()["s"]
    tags = {"text": "x", "flag": "true", "nan": "NaN", "large": str(2**60), "attributes.env": "prod"}
    assert {**sent.tags, **tags, "attributes._dd.p": "x"} == sent.tags
    assert {**sent.metrics, "number": 2, "attributes.step": 3, "attributes.dotted.name": 1} == sent.metrics
    assert not {"none", "env", "step", "_dd.p"} & {*sent.tags, *sent.metrics}


def test_totals_say_how_often_how_long_and_where_the_slowest_was(told: Told) -> None:
    with pytest.raises(KeyError), span("work"):
        raise KeyError
    for _ in range(4):
        with span("work"):
            pass
    told.records.summarise()
    (record,) = told.log("summary")
    assert (record["name"], record["resource"]) == ("pytorch.spans", "work")
    metrics = record["metrics"]
    assert (metrics["span.count"], metrics["span.errors"]) == (5, 1)
    assert metrics["span.time_ms.total"] == pytest.approx(5 * metrics["span.time_ms.mean"])
    assert metrics["span.time_ms.p50"] <= metrics["span.time_ms.p95"] <= metrics["span.time_ms.p99"]
    assert metrics["span.time_ms.p99"] <= metrics["span.time_ms.max"]
    assert sum(record["buckets"].values()) == 5
    assert record["tags"]["span.slowest_at"].startswith(__file__)
    told.records.summarise()
    assert len(told.log("summary")) == 1  # nothing since


def test_names_beyond_so_many_are_counted_together() -> None:
    totals: dict[str, SpanTotals] = {}
    for number in range(MOST_NAMES + 50):
        named(totals, str(number), SpanTotals).add(1, False, "")
    assert len(totals) == MOST_NAMES + 1
    assert totals["(other)"].count == 50
    said = Said()
    for number in range(MOST_NAMES + 50):
        said.event(str(number))
        said.scalar(str(number), 1.0)
    assert len(said.events) == len(said.scalars) == MOST_NAMES + 1


def test_a_steps_span_has_its_scalars_and_events(told: Told) -> None:
    step = told.step(3)
    for loss in (3.0, 1.0, 2.0):
        scalar({"loss": loss, "lr": math.nan})
    scalar({"val": 9.0}, step=1)
    event("best")
    event("best")
    step.sampled = True
    facts = told.records.facts_of_step(step)
    assert facts == {"scalar.loss": 2.0, "scalar.lr": "NaN", "event.best.count": 2}
    assert told.records.facts_of_step(step) == {}
    summary = told.records.facts_of_summary()
    assert summary == {
        "scalar.loss.last": 2.0, "scalar.loss.min": 1.0, "scalar.loss.max": 3.0, "scalar.lr.last": "NaN",
        "scalar.val.last": 9.0, "scalar.val.min": 9.0, "scalar.val.max": 9.0, "event.best.count": 2,
    }  # fmt: skip
    assert told.records.facts_of_summary() == {}


def test_what_is_kept_of_steps_is_bounded(told: Told) -> None:
    for number in range(2_000):
        step = told.step(number)
        scalar({"loss": number})
        step.sampled = None if number % 2 else False
    told.records.beat()
    assert len(told.records._of_steps) <= observer.STEPS_KEPT
    assert told.records.facts_of_step(step) == {"scalar.loss": 1_999}


def test_what_was_not_recorded_is_told_exactly(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtrace_pytorch.records import recorder

    monkeypatch.setattr(recorder, "HELD", 10)
    told.recorder.begin()
    for _ in range(17):
        event("x")
    (drop,) = told.log("drop")
    assert (drop["reason"], drop["count"]) == ("user records", 7)


def test_at_the_end_all_is_told_and_the_step_under_way_is_not_sampled(told: Told) -> None:
    told.step(1)
    with span("unknown"):
        pass
    with pytest.raises(KeyError), span("failed"):
        raise KeyError
    told.records.close()
    assert [one.resource for one in told.exporter.spans if one.name == "pytorch.span"] == ["failed"]
    assert len(told.log("user_span")) == 2
    assert not told.recorder.attended


def test_tasks_have_numbers(told: Told) -> None:
    async def work() -> None:
        event("in task")
        await asyncio.sleep(0)
        event("in task")

    async def main() -> None:
        await asyncio.gather(work(), work())

    asyncio.run(main())
    tasks = [record["task"] for record in told.log("event")]
    assert tasks[0] == tasks[2] != tasks[1] == tasks[3]


def test_a_record_that_cannot_be_told_costs_only_itself(told: Told) -> None:
    event("before")
    for _ in range(2):
        event("broken")
        # Where in the code: the last but eleven of the values of a row.
        told.recorder._raw[-12] = None
    event("after")
    found = told.log("event")
    assert [record["name"] for record in found] == ["before", "after"]
    (drop,) = told.log("drop")
    assert (drop["reason"], drop["count"]) == ("record that can't be told", 2)


def test_a_step_of_thousands_of_digits_costs_no_other_record(told: Told) -> None:
    huge = told.step(10**5000)
    with span("in huge"):
        pass
    last = told.step(3)
    with span("in 3"):
        pass
    huge.sampled = last.sampled = True
    sent = told.spans()
    assert (sent["in huge"].tags["step"], sent["in 3"].metrics["step"]) == ("int", 3)
    assert [record["name"] for record in told.log("user_span")] == ["in huge", "in 3"]
