"""The functions that users call: what each records, in which span, thread, task and step, and what never happens."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import gc
import inspect
import math
import pickle
import threading
import traceback
import warnings
import weakref
from _thread import start_new_thread
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

import numpy
import pytest
import torch
from harness.depth import rooms, with_room_for
from harness.interrupting import interrupted_everywhere

from ddtrace_pytorch import event, scalar, set_step, span, step_tag
from ddtrace_pytorch.records import here as here_now
from ddtrace_pytorch.records import recorder as recorders
from ddtrace_pytorch.records import scalars, switch
from ddtrace_pytorch.records.attributes import NAME_LIMIT
from ddtrace_pytorch.records.recorder import EVENT, SCALAR, SPAN, Recorder, Row
from ddtrace_pytorch.records.user_span import DEEPEST, Open, Span, current
from ddtrace_pytorch.training.progress import Progress, Step


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    progress = Progress()

    def begin_step(number: int, relative: int | None) -> None:
        progress.step = Step(number, relative)

    made = Recorder(progress, 100, begin_step, lambda: None)
    made.begin()
    monkeypatch.setattr(switch, "recorder", made)
    yield made
    assert current.get() is None


def rows(recorder: Recorder) -> list[Row]:
    return list(recorder.take()[0])


def by_name(recorder: Recorder) -> dict[str, Row]:
    return {row.name: row for row in rows(recorder)}


def parents(found: dict[str, Row]) -> dict[str, str | None]:
    """Of each span the name of the one around it."""
    names = {row.id: row.name for row in found.values()}
    return {name: None if row.parent is None else names.get(row.parent.id, "?") for name, row in found.items()}


def here(offset: int = 0) -> str:
    """``line:function`` of the caller, or some lines on."""
    frame = inspect.stack()[1]
    return f"{frame.lineno + offset}:{frame.function}"


def at(row: Row) -> str:
    from ddtrace_pytorch.source_lines import place_and_function

    assert not isinstance(row.code, str)
    file, line, function = place_and_function(row.code, row.instruction).rsplit(":", 2)
    assert file == __file__
    return f"{line}:{function.rpartition('.')[2]}"


def test_a_span_has_its_times_its_attributes_its_place_and_the_one_around_it(recorder: Recorder) -> None:
    with span("outer", size=3, where=torch.zeros(2)) as outer:
        place = here(1)
        with span("inner"):
            pass
    inner_row, outer_row = rows(recorder)
    assert (outer_row.kind, outer_row.name, outer_row.values) == (
        SPAN,
        "outer",
        {"size": 3, "where": "Tensor[2] float32"},
    )
    assert outer_row.started <= inner_row.started <= inner_row.at <= outer_row.at
    assert inner_row.number < outer_row.number
    assert at(inner_row) == place
    assert inner_row.parent is not None
    assert inner_row.parent.id == outer_row.id != inner_row.id
    assert inner_row.thread == threading.current_thread().name
    assert inner_row.task is None
    assert outer.__class__.__name__ == "Span"


def test_a_span_can_be_entered_again_also_while_it_is_open(recorder: Recorder) -> None:
    reused = span("reused")
    with reused, span("between"), reused:
        pass
    with reused:
        pass
    found = rows(recorder)
    assert [row.name for row in found] == ["reused", "between", "reused", "reused"]
    first, between, outer, last = found
    assert first.parent is not None
    assert between.parent is not None
    assert (first.parent.id, between.parent.id) == (between.id, outer.id)
    assert (outer.parent, last.parent) == (None, None)


def test_one_span_is_entered_by_many_threads_at_once(recorder: Recorder) -> None:
    shared = span("shared")
    together = threading.Barrier(8)

    def work() -> None:
        with span("own"):
            for _ in range(50):
                with shared:
                    together.wait()

    threads = [threading.Thread(target=work, name=f"worker {number}") for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rows(recorder)
    own = {row.id: row.thread for row in found if row.name == "own"}
    assert len(own) == 8
    inside = [row for row in found if row.name == "shared"]
    assert len(inside) == 400
    assert all(row.parent is not None and own[row.parent.id] == row.thread for row in inside)


def test_an_exception_is_recorded_and_passes_on_unchanged(recorder: Recorder) -> None:
    error = ValueError("no")
    with pytest.raises(ValueError, match="no") as caught, span("with"):
        raise error
    assert caught.value is error
    assert [entry.name for entry in traceback.extract_tb(error.__traceback__)] == [inspect.stack()[0].function]
    (row,) = rows(recorder)
    assert row.failed is not None
    assert (row.failed.type, row.failed.message) == ("ValueError", "no")
    assert row.failed.stack[-1][0] == __file__


@span("decorated")
def fails(error: BaseException) -> None:
    raise error


@span("coroutine")
async def fails_later(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


@span("generator")
def fails_in_between(error: BaseException) -> Generator[int, None, None]:
    yield 1
    raise error


@pytest.mark.parametrize(
    "call",
    [fails, lambda error: asyncio.run(fails_later(error)), lambda error: list(fails_in_between(error))],
)
def test_no_frame_of_ours_is_in_the_traceback_of_a_decorated_function(
    recorder: Recorder, call: Callable[[BaseException], object]
) -> None:
    error = KeyError("gone")
    with pytest.raises(KeyError) as caught:
        call(error)
    assert caught.value is error
    files = [entry.filename for entry in traceback.extract_tb(error.__traceback__)]
    assert not [file for file in files if "ddtrace_pytorch" in file.rpartition("/tests/")[2]]
    (row,) = rows(recorder)
    assert row.failed is not None
    assert row.failed.type == "KeyError"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_whose_text_raises_is_recorded_all_the_same(recorder: Recorder) -> None:
    with pytest.raises(Mute), span("mute"):
        raise Mute
    (row,) = rows(recorder)
    assert row.failed is not None
    assert row.failed.message == "(its text raised RuntimeError)"
    assert row.failed.type.endswith("test_records.Mute")


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration(), GeneratorExit(), SystemExit(0)])
def test_how_loops_and_programs_end_is_no_failure(recorder: Recorder, error: BaseException) -> None:
    with pytest.raises(type(error)), span("ends"):
        raise error
    (row,) = rows(recorder)
    assert row.failed is None


def test_nothing_that_an_exception_holds_is_kept(recorder: Recorder) -> None:
    class Big: ...

    big: Any = Big()
    gone = weakref.ref(big)
    try:
        with span("fails", it=big):
            raise ValueError(big)
    except ValueError:
        pass
    del big
    gc.collect()
    assert gone() is None
    assert len(rows(recorder)) == 1


def test_a_decorated_function_stays_what_it_was(recorder: Recorder) -> None:
    @span("plain")
    def function(a: int, *, b: int = 2) -> int:
        """Adds."""
        return a + b

    assert function(1) == 3
    assert function.__doc__ == "Adds."
    assert str(inspect.signature(function)) == "(a: 'int', *, b: 'int' = 2) -> 'int'"
    place = here(1)
    function(1)
    first, second = rows(recorder)
    assert first.name == second.name == "plain"
    assert at(second) == place


def test_a_decorator_may_be_shared_and_its_function_may_call_itself(recorder: Recorder) -> None:
    around = span("shared")

    @around
    def down(depth: int) -> int:
        return down(depth - 1) if depth else other()

    @around
    def other() -> int:
        return 5

    assert down(2) == 5
    found = rows(recorder)
    assert [row.name for row in found] == ["shared"] * 4
    assert [inner.parent.id if inner.parent else None for inner in found] == [*[row.id for row in found[1:]], None]


def test_methods_and_what_else_can_be_called(recorder: Recorder) -> None:
    class Model:
        @span("method")
        def method(self) -> str:
            return "method"

        @staticmethod
        @span("static")
        def static() -> str:
            return "static"

        @classmethod
        @span("class")
        def of_class(cls) -> str:
            return cls.__name__

        async def __call__(self) -> str:
            await asyncio.sleep(0)
            return "called"

    assert (Model().method(), Model.static(), Model.of_class()) == ("method", "static", "Model")
    assert asyncio.run(span("callable")(Model())()) == "called"
    assert list(by_name(recorder)) == ["method", "static", "class", "callable"]
    with pytest.raises(TypeError, match="callable"):
        span("x")(3)  # type: ignore[type-var]


def test_a_coroutine_is_awaited_in_its_span(recorder: Recorder) -> None:
    @span("co")
    async def work(number: int) -> int:
        async with span("inside"):
            await asyncio.sleep(0.01)
        event("done", number=number)
        return number

    async def main() -> list[int]:
        return list(await asyncio.gather(work(1), work(2)))

    assert inspect.iscoroutinefunction(work)
    with span("all"):
        assert asyncio.run(main()) == [1, 2]
    found = rows(recorder)
    around = next(row for row in found if row.name == "all")
    tasks = {row.task: [] for row in found if row.name == "co"}  # type: ignore[var-annotated]
    assert None not in tasks
    assert len(tasks) == 2
    for row in found:
        if row is not around:
            tasks[row.task].append(row)
    for inside, done, co in tasks.values():
        assert [inside.name, done.name, co.name] == ["inside", "done", "co"]
        assert inside.parent is not None
        assert inside.parent.id == done.parent.id == co.id
        assert co.parent.id == around.id
        assert co.at - co.started > 9_000_000


def test_the_place_of_what_a_loops_machinery_runs_is_its_own(recorder: Recorder) -> None:
    """ddtrace, too, has a frame of its own between asyncio and a task."""

    @span("co")
    async def work() -> int:
        return 7

    resume = "def resume(coroutine):\n    try:\n        coroutine.send(None)\n    except StopIteration:\n        pass\n"
    for module in ("asyncio.events", "ddtrace.contrib.internal.asyncio._context_switch", "ddtrace"):
        machinery: dict[str, Any] = {"__name__": module}
        exec(resume, machinery)
        machinery["resume"](work())
        assert at(rows(recorder)[-1]) == f"{inspect.unwrap(work).__code__.co_firstlineno}:work"


def test_a_generators_span_lasts_as_long_as_it_is_iterated_over(recorder: Recorder) -> None:
    @span("batches")
    def batches() -> Generator[int, str, str]:
        with span("read"):
            said = yield 1
            assert said == "go on"
        try:
            yield 2
        except LookupError:
            event("told")
            yield 3
        return "end"

    def all_of_it() -> Generator[int, str, None]:
        assert (yield from batches()) == "end"

    assert inspect.isgeneratorfunction(batches)
    generator = all_of_it()
    assert next(generator) == 1
    with span("train"):
        assert generator.send("go on") == 2
    assert generator.throw(LookupError()) == 3
    with pytest.raises(StopIteration):
        next(generator)
    found = by_name(recorder)
    assert list(found) == ["read", "train", "told", "batches"]
    assert parents(found) == {"read": "batches", "train": None, "told": "batches", "batches": None}
    assert found["batches"].failed is None


def test_a_generator_that_is_left_ends_its_span(recorder: Recorder) -> None:
    ended = []

    @span("batches")
    def batches() -> Generator[int, None, None]:
        try:
            yield 1
        finally:
            ended.append(True)

    for _ in batches():
        break
    gc.collect()
    assert ended == [True]
    (row,) = rows(recorder)
    assert row.failed is None


def test_an_asynchronous_generator_too(recorder: Recorder) -> None:
    @span("stream")
    async def stream() -> AsyncGenerator[int, str]:
        async with span("connect"):
            await asyncio.sleep(0)
            said = yield 1
        assert said == "more"
        try:
            yield 2
        except LookupError:
            yield 3

    async def main() -> None:
        generator = stream()
        assert await generator.asend(None) == 1  # type: ignore[arg-type]
        with span("use"):
            assert await generator.asend("more") == 2
        assert await generator.athrow(LookupError()) == 3
        with pytest.raises(StopAsyncIteration):
            await generator.asend("")

    assert inspect.isasyncgenfunction(stream)
    asyncio.run(main())
    found = by_name(recorder)
    assert parents(found) == {"connect": "stream", "use": None, "stream": None}


def test_a_generator_that_wants_to_go_on_is_heard_as_it_would_be_without_us(recorder: Recorder) -> None:
    def stubborn() -> Generator[int, None, str]:
        try:
            yield 1
        except GeneratorExit:
            yield 2
        return "end"

    def obedient() -> Generator[int, None, str]:
        try:
            yield 1
        except GeneratorExit:
            pass
        return "end"

    for function in (stubborn, obedient):
        heard = []
        for generator in (function(), span("wrapped")(function)()):
            said = [next(generator)]
            try:
                said.append(generator.throw(GeneratorExit))
                generator.close()
            except (StopIteration, GeneratorExit) as error:
                said.append(repr(error))  # type: ignore[arg-type]
            heard.append(said)
        assert heard[0] == heard[1]
    ignoring = span("wrapped")(stubborn)()
    next(ignoring)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        ignoring.close()
    assert [row.name for row in rows(recorder)] == ["wrapped"] * 2


def test_one_span_is_entered_as_deep_as_code_may_call_itself(recorder: Recorder) -> None:
    again = span("again")

    def down(depth: int) -> None:
        with again:
            if depth:
                down(depth - 1)

    down(400)
    found = rows(recorder)
    assert len(found) == 401
    assert [row.parent.id if row.parent else None for row in found] == [*[row.id for row in found[1:]], None]
    assert [row.started for row in found] == sorted((row.started for row in found), reverse=True)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_span_that_was_used_can_be_copied_and_pickled(recorder: Recorder, make: Callable[[Any], Any]) -> None:
    used = span("used", size=1)
    with used:
        other = make(used)
    with other:
        pass
    first, second = rows(recorder)
    assert (first.name, first.values) == (second.name, second.values) == ("used", {"size": 1})
    assert first.id != second.id


def test_a_span_that_another_thread_ended_is_no_parent_any_more(recorder: Recorder) -> None:
    with span("outer"):
        handed = span("handed over")
        handed.__enter__()
        thread = threading.Thread(target=handed.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        with span("next"):
            pass
    assert parents(by_name(recorder)) == {"handed over": "outer", "next": "outer", "outer": None}
    assert current.get() is None


def test_a_span_may_end_in_another_context_than_it_began_in(recorder: Recorder) -> None:
    across = span("across")
    context = contextvars.copy_context()
    context.run(across.__enter__)
    with span("meanwhile"):
        across.__exit__(None, None, None)
    across.__exit__(None, None, None)
    assert parents(by_name(recorder)) == {"across": None, "meanwhile": None}


def test_spans_that_are_never_ended_keep_nothing_and_the_next_are_right(recorder: Recorder) -> None:
    with span("around"):
        kept = [span("lost").__enter__() for _ in range(10_000)]
        depth, opened = 0, current.get()
        while opened is not None:
            depth, opened = depth + 1, opened.parent
        assert depth == DEEPEST
        kept.clear()
        gc.collect()
        assert sum(type(one) in (Open, Span) for one in gc.get_objects()) < 2 * DEEPEST
        with span("inside"):
            pass
    with span("after"):
        pass
    assert parents(by_name(recorder)) == {"inside": "around", "around": None, "after": None}


def test_a_thread_that_python_did_not_start_is_in_the_span_of_the_main_thread(recorder: Recorder) -> None:
    done = threading.Event()

    def hook() -> None:
        with span("hook"):
            event("gradient")
        done.set()

    with span("backward"):
        start_new_thread(hook, ())
        assert done.wait(10)
    other = threading.Thread(target=lambda: event("elsewhere"), name="other")
    with span("later"):
        other.start()
        other.join()
    found = by_name(recorder)
    assert found["hook"].thread.startswith("thread ")
    assert found["elsewhere"].thread == "other"
    assert parents(found) == {
        "gradient": "hook", "hook": "backward", "backward": None, "elsewhere": None, "later": None,
    }  # fmt: skip


def test_a_context_that_is_copied_takes_the_span_along(recorder: Recorder) -> None:
    with span("outer"):
        context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(event, "inside"))
    thread.start()
    thread.join()
    assert parents(by_name(recorder)) == {"outer": None, "inside": "outer"}


def test_an_event_has_its_attributes_and_its_place(recorder: Recorder) -> None:
    place = here(1)
    event("best", name="model", loss=math.nan, model=torch.nn.Linear(1, 1))
    (row,) = rows(recorder)
    assert (row.kind, row.name, at(row)) == (EVENT, "best", place)
    assert row.values["name"] == "model"
    assert math.isnan(row.values["loss"])
    assert row.values["model"] == "Linear"


def test_every_record_has_the_step_and_its_number_since_the_training_was_resumed(recorder: Recorder) -> None:
    event("before")
    set_step(1_001, relative_step=1)
    with span("in"):
        set_step(1_002, relative_step=2)
        set_step(1_003, relative_step=3)
    scalar({"loss": 1.0})
    before, around, loss = rows(recorder)
    assert (before.step.number, before.step.relative) == (None, None)
    assert (around.step.number, around.step.relative, around.within) == (1_001, 1, False)
    assert (loss.step.number, loss.step.relative) == (1_003, 3)


def test_a_tag_is_on_what_follows_in_the_step_in_all_threads(recorder: Recorder) -> None:
    set_step(1)
    event("before")
    step_tag("gc")
    step_tag("gc")
    step_tag("eval")
    thread = threading.Thread(target=lambda: event("thread"))
    thread.start()
    thread.join()
    set_step(2)
    event("next")
    assert {name: row.tags for name, row in by_name(recorder).items()} == {
        "before": (), "thread": ("gc", "eval"), "next": (),
    }  # fmt: skip


def test_a_tasks_tags_are_its_own_and_those_of_the_tasks_that_it_starts(recorder: Recorder) -> None:
    async def started() -> None:
        event("started")

    async def actor(word: str) -> None:
        step_tag(word)
        await asyncio.sleep(0)
        await asyncio.create_task(started())
        event(word)
        set_step(2) if word == "b" else await asyncio.sleep(0.01)
        event(f"{word} later")

    async def main() -> None:
        await asyncio.gather(actor("a"), actor("b"))
        event("main")

    set_step(1)
    step_tag("global")
    asyncio.run(main())
    found = rows(recorder)
    assert sorted(row.tags for row in found if row.name == "started") == [("global", "a"), ("global", "b")]
    assert {row.name: row.tags for row in found if row.name != "started"} == {
        "a": ("global", "a"), "b": ("global", "b"), "a later": (), "b later": (), "main": (),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        (1, 1),
        (2.5, 2.5),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (True, True),
        (numpy.float32(0.5), 0.5),
        (numpy.array(3), 3),
        (numpy.array([4.0]), 4.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([[7]]), 7),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(0.75, requires_grad=True), 0.75),
        (torch.nn.Parameter(torch.tensor(0.5)), 0.5),
        (torch.tensor(float("-inf")), -math.inf),
    ],
)
def test_a_scalar_is_taken_at_once(recorder: Recorder, value: Any, recorded: float) -> None:
    place = here(1)
    scalar({"x": value})
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.zero_()
    (row,) = rows(recorder)
    assert (row.kind, at(row)) == (SCALAR, place)
    assert (row.values, row.types) == ({"x": recorded}, None)
    assert type(row.values["x"]) in (int, float)


def test_nan_survives(recorder: Recorder) -> None:
    scalar({"python": math.nan, "torch": torch.tensor(math.nan), "numpy": numpy.float32("nan")})
    (row,) = rows(recorder)
    assert all(map(math.isnan, row.values.values()))
    assert len(row.values) == 3


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        ("text", "text"),
        (None, None),
        (torch.zeros(3), "Tensor[3] float32"),
        (torch.tensor(1j), "Tensor[] complex64"),
        (torch.zeros(1, device="meta"), "Tensor[1] float32"),
        ([1.0], "list[1]"),
    ],
)
def test_of_what_is_no_number_the_type_is_recorded_and_said_once(
    recorder: Recorder, value: Any, type_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(scalars, "warn_once", said.append)
    monkeypatch.setattr(scalars, "_warned", set())
    for _ in range(2):
        scalar({"bad": value, "good": 1})
    for row in rows(recorder):
        assert (row.values, row.types) == ({"good": 1}, {"bad": type_})
    assert len(said) == 1
    assert "'bad'" in said[0]


def test_of_far_too_many_scalars_in_one_call_some_are_left_out_with_a_mark(recorder: Recorder) -> None:
    scalar({str(number): number for number in range(scalars.MOST + 7)})
    (row,) = rows(recorder)
    assert len(row.values) == scalars.MOST
    assert row.types == {"…": "+7 scalars"}


def test_a_scalar_may_be_of_another_step(recorder: Recorder) -> None:
    set_step(10)
    scalar({"val": 1.0}, step=7)
    scalar({"val": 1.0}, step=numpy.int64(8))
    assert [row.of_step for row in rows(recorder)] == [(7, None), (8, None)]


def test_no_graph_and_no_tensor_is_kept(recorder: Recorder) -> None:
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * 2).sum()
    gone = weakref.ref(loss)
    scalar({"loss": loss})
    event("x", loss=loss)
    with span("y", loss=loss):
        pass
    del loss
    assert gone() is None


def test_modes_of_the_users_see_nothing_of_it(recorder: Recorder) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counts.seen += 1
            return function(*args, **(kwargs or {}))

    loss = torch.tensor(3.0)
    with Counts():
        scalar({"loss": loss})
    assert Counts.seen == 0
    assert rows(recorder)[0].values == {"loss": 3.0}


CALLS: list[Callable[[], object]] = [
    lambda: span(3),  # type: ignore[arg-type]
    lambda: span(None),  # type: ignore[arg-type]
    lambda: event(b"bytes"),  # type: ignore[arg-type]
    lambda: scalar({1: 1.0}),  # type: ignore[dict-item]
    lambda: scalar([("a", 1)]),  # type: ignore[arg-type]
    lambda: scalar({"a": 1}, step="five"),  # type: ignore[arg-type]
    lambda: set_step(1.5),  # type: ignore[arg-type]
    lambda: set_step(1, relative_step="x"),  # type: ignore[arg-type]
    lambda: step_tag(1),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("on", [True, False])
def test_a_name_that_is_no_text_is_a_type_error_at_the_call(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], on: bool
) -> None:
    if not on:
        monkeypatch.setattr(switch, "recorder", None)
    with pytest.raises(TypeError):
        call()
    assert rows(recorder) == []


def test_switched_off_nothing_happens_and_what_was_decorated_then_is_recorded_later(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "recorder", None)

    @span("early")
    def early() -> int:
        return 1

    with span("off"):
        event("off")
        scalar({"off": 1})
        set_step(5)
        step_tag("off")
        assert early() == 1
    assert rows(recorder) == []
    assert recorder.progress.step.number is None
    monkeypatch.setattr(switch, "recorder", recorder)
    assert early() == 1
    assert list(by_name(recorder)) == ["early"]


def test_what_does_not_fit_is_counted_exactly(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "HELD", 100)
    recorder.begin()
    for _ in range(130):
        event("x")
    taken, refused = recorder.take()
    assert (len(list(taken)), refused) == (100, 30)
    for number in range(3):
        event(str(number))
    taken, refused = recorder.take()
    found = list(taken)
    assert ([row.name for row in found], refused) == (["0", "1", "2"], 0)
    assert found[0].number == 131  # the numbers show what is missing


def test_threads_that_record_at_once_lose_and_mix_up_nothing(recorder: Recorder) -> None:
    def work(thread: int) -> None:
        for number in range(2_000):
            event(f"{thread}", number=number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found: list[Row] = []
    while any(thread.is_alive() for thread in threads):
        found += rows(recorder)
    found += rows(recorder)
    assert sorted(row.number for row in found) == list(range(1, 8_001))
    for number in range(4):
        mine = [row.values["number"] for row in found if row.name == str(number)]
        assert mine == list(range(2_000))


def test_a_fault_of_ours_is_said_once_and_never_reaches_the_user(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*ignored: Any) -> None:
        raise OSError("broken")

    monkeypatch.setattr(Recorder, "add", broken)
    monkeypatch.setattr(Recorder, "set_step", broken, raising=False)
    for _ in range(2):
        with span("x"):
            event("y")
        scalar({"z": 1})
    assert sorted(record.message.partition("could not ")[2].partition(";")[0] for record in caplog.records) == [
        "record a scalar", "record a span", "record an event",
    ]  # fmt: skip


def test_long_names_are_cut_off_where_they_are_taken(recorder: Recorder) -> None:
    long, short = "n" * 1_000_000, "n" * NAME_LIMIT + f"…(+{1_000_000 - NAME_LIMIT} chars)"
    step_tag(long)
    scalar({long: 1.0})
    scalar({long: "no number"})
    event("x", **{long: 1})
    number, none, attributes = rows(recorder)
    assert (number.values, none.types, attributes.values) == ({short: 1.0}, {short: "no number"}, {short: 1})
    assert number.tags == (short,)


def test_function_modes_of_the_users_see_nothing_of_it(recorder: Recorder) -> None:
    from torch.overrides import TorchFunctionMode

    seen = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    loss, many = torch.tensor(3.0), torch.zeros(2)
    with Sees():
        scalar({"loss": loss, "many": many})
    assert seen == []
    assert rows(recorder)[0].values == {"loss": 3.0}


def test_a_tensor_that_is_being_traced_has_no_number_and_nothing_is_warned_of_or_traced(recorder: Recorder) -> None:
    def model(x: torch.Tensor, records: bool = True) -> torch.Tensor:
        loss = x.sum()
        if records:
            scalar({"loss": loss})
            event("traced", loss=loss, x=x)
        return loss * 2

    inputs = torch.ones(3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        traced = torch.jit.trace(model, (inputs,), check_trace=False)
    assert not [one for one in warned if issubclass(one.category, torch.jit.TracerWarning)]
    without = torch.jit.trace(lambda x: model(x, False), (inputs,), check_trace=False)
    kinds = [[node.kind() for node in one.graph.nodes()] for one in (traced, without)]
    assert kinds[0] == kinds[1]
    number, _ = rows(recorder)
    assert (number.values, number.types) == ({}, {"loss": "Tensor"})


@span("decorated")
def decorated() -> None:
    event("in a function")


@span("generator")
def generated() -> Iterator[int]:
    yield 1
    yield 2


def everything() -> None:
    with span("outer", size=1) as _:
        with span("inner"):
            event("in a span", where="here")
        decorated()
        for _number in generated():
            scalar({"loss": 1.0, "other": torch.ones(1)}, step=3)


@pytest.mark.once
def test_whatever_is_interrupted_the_users_code_hears_of_it_and_the_next_span_is_right(recorder: Recorder) -> None:
    ours = tuple(f"ddtrace_pytorch/records/{name}.py" for name in ("user_span", "decorating", "notes", "scalars"))
    many = 0
    for number in interrupted_everywhere(everything, *ours, "ddtrace_pytorch/api.py"):
        recorder.take()
        with span("around"), span("next"):
            decorated()
        found = by_name(recorder)
        expected = {"in a function": "decorated", "decorated": "next", "next": "around", "around": None}
        assert (number, parents(found)) == (number, expected)
        assert current.get() is None
        assert here_now.local.here.innermost is None
        many = number
    assert many > 500


def in_a_handler() -> None:
    with span("in a handler"):
        pass


@pytest.mark.once
def test_what_a_signals_handler_records_can_be_told_wherever_it_came(recorder: Recorder) -> None:
    met = 0
    for _ in interrupted_everywhere(everything, "ddtrace_pytorch/records/user_span.py", handler=in_a_handler):
        for row in rows(recorder):
            outer = row.parent
            while outer is not None:
                assert [name for name in Open.__slots__ if not hasattr(outer, name)] == []
                outer = outer.parent
            met += row.name == "in a handler" and row.parent is not None
    assert met > 100


def test_the_users_code_may_be_as_deep_as_it_may_go(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("theirs")
    for room in rooms():
        opened = span("open")
        with_room_for(room, opened.__enter__)
        with_room_for(room, functools.partial(opened.__exit__, ValueError, error, None))
        del opened
        with_room_for(room, lambda: event("x", one=1, two="two"))
        with_room_for(room, lambda: scalar({"loss": 1.0}, step=1))
        with_room_for(room, lambda: set_step(1))
        with_room_for(room, lambda: step_tag("x"))
        with_room_for(room, lambda: span("x", one=1))
    with span("after"):
        pass
    assert parents(by_name(recorder))["after"] is None


class Meta(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise SystemError("no module")

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise SystemError("no name")

    def __hash__(cls) -> int:
        raise SystemError("no hash")

    def __eq__(cls, other: object) -> bool:
        raise SystemError("never the same")


class Hostile(metaclass=Meta):
    """Raises whatever it is asked."""

    @property
    def __class__(self) -> Any:
        raise SystemError("no class")

    def _raises(self, *_: object) -> Any:
        raise KeyboardInterrupt

    __float__ = __int__ = __index__ = __len__ = __bool__ = __eq__ = __hash__ = __getattr__ = _raises  # type: ignore[assignment]
    __str__ = __repr__ = __format__ = _raises  # type: ignore[assignment]


class Liar(float):
    __module__ = "numpy"


# A class without a `__module__`.
Homeless = eval("type('Homeless', (), {})", {})


class Numeric(numpy.float64):
    __module__ = "numpy"

    def item(self, *_: Any) -> Any:
        raise ValueError("no item")


class Mine(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise ValueError("no items")


def test_nothing_that_a_value_is_or_does_reaches_the_user(recorder: Recorder) -> None:
    # Not one test for each: pytest itself asks what they are.
    for value in (Hostile(), Liar(1.0), Homeless(), Homeless, Hostile, Numeric(1.0)):
        with span("span", value=value):
            event("event", value=value)
            scalar({"scalar": value})
        assert [row.kind for row in rows(recorder)] == [EVENT, SCALAR, SPAN]
    scalar(Mine(a=1))


class Name(str):
    """Text of the user's own kind."""

    def __len__(self) -> int:
        raise ValueError("no length")


def test_every_name_is_cut_off(recorder: Recorder) -> None:
    long = "n" * 1_000_000
    for name in (long, Name(long)):
        step_tag(name)
        with span(name):
            event(name)
            scalar({name: 1.0})
    for row in rows(recorder):
        for one in (row.name, *row.values, *row.tags):
            assert type(one) is str
            assert len(one) < 2 * NAME_LIMIT
    assert len(recorder.progress.step.tags) == 1


SAID: list[tuple[Callable[[], object], str]] = [
    (lambda: span(3), "span() takes its name as a str, not 3"),  # type: ignore[arg-type]
    (lambda: span(everything), 'span() takes its name as a str, not a function: use @span("name")'),  # type: ignore[arg-type]
    (lambda: span(Hostile()), "span() takes its name as a str, not a Hostile"),  # type: ignore[arg-type]
    (lambda: span("x")(3), "span() decorates a callable, not 3"),  # type: ignore[type-var]
    (lambda: event(b"bytes"), "event() takes its name as a str, not b'bytes'"),  # type: ignore[arg-type]
    (lambda: event(b"b" * 99), "event() takes its name as a str, not a bytes"),  # type: ignore[arg-type]
    (lambda: scalar({1: 1.0}), "scalar() takes names of numbers as a str, not 1"),  # type: ignore[dict-item]
    (lambda: scalar(("a", 1)), "scalar() takes a dict of numbers by their names, not a tuple"),  # type: ignore[arg-type]
    (lambda: scalar(Hostile()), "scalar() takes a dict of numbers by their names, not a Hostile"),  # type: ignore[arg-type]
    (lambda: scalar({"a": 1}, step=1.5), "scalar() takes step as an int, not 1.5"),  # type: ignore[arg-type]
    (lambda: set_step("five"), "set_step() takes the step's number as an int, not a str"),  # type: ignore[arg-type]
    (
        lambda: set_step(1, relative_step=[]),  # type: ignore[arg-type]
        "set_step() takes relative_step as an int, not a list",
    ),
    (lambda: step_tag(None), "step_tag() takes a word as a str, not None"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "said"), SAID, ids=[said for _, said in SAID])
def test_a_type_error_says_what_was_given_and_what_is_expected(
    recorder: Recorder, call: Callable[[], object], said: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == said
    assert rows(recorder) == []


class Uncertain:
    def __index__(self) -> int:
        raise ValueError("no number")


def test_a_number_that_can_not_be_told_is_a_type_error_too(recorder: Recorder) -> None:
    with pytest.raises(TypeError, match="not an Uncertain") as caught:
        set_step(Uncertain())  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, ValueError)
    set_step(numpy.int64(7))  # type: ignore[arg-type]
    assert recorder.progress.step.number == 7
