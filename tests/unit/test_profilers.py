"""Whose profiler is on, and which ranges outlive it, as torch's own classes have it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from ddtrace_pytorch.kernels.profilers import Profilers
from ddtrace_pytorch.kernels.ranges import Ranges

CPU = [ProfilerActivity.CPU]


@pytest.fixture
def profilers() -> Iterator[Profilers]:
    """Watching; and torch's classes are as they were, once that is undone."""
    kinds = (profile, torch.autograd.profiler.profile, torch.autograd.profiler.emit_itt)
    before = [{name: (one, getattr(one, "__code__", None)) for name, one in vars(kind).items()} for kind in kinds]
    watching = Profilers()
    undo = watching.watch(torch)
    yield watching
    for give_back in undo:
        give_back()
    assert before == [
        {name: (one, getattr(one, "__code__", None)) for name, one in vars(kind).items()} for kind in kinds
    ]


def test_a_profiler_is_there_in_each_state_of_its_schedule(profilers: Profilers) -> None:
    assert not profilers.of_the_user(torch)
    one = profile(activities=CPU, schedule=schedule(wait=1, warmup=1, active=1, repeat=1))
    with one:
        for _ in range(4):
            assert profilers.of_the_user(torch)
            one.step()
    assert not profilers.of_the_user(torch)
    with torch.autograd.profiler.profile():
        assert profilers.of_the_user(torch)
    assert not profilers.of_the_user(torch)
    forgotten = profile(activities=CPU, schedule=schedule(wait=1, warmup=1, active=1))
    forgotten.start()
    assert profilers.of_the_user(torch)
    del forgotten
    gc.collect()
    assert not profilers.of_the_user(torch)


def test_one_that_was_on_before_or_is_on_another_thread_is_seen(profilers: Profilers) -> None:
    begun, over = threading.Event(), threading.Event()

    def elsewhere() -> None:
        one = torch.autograd.profiler.profile(use_kineto=True)
        one._prepare_trace()
        one._start_trace()
        begun.set()
        over.wait(30)
        torch.autograd._disable_profiler()
        torch.autograd.profiler._run_on_profiler_stop()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert begun.wait(30)
    assert profilers.of_the_user(torch)
    over.set()
    thread.join()
    assert not profilers.of_the_user(torch)


class Ours:
    gave_way = 0

    def give_way(self) -> None:
        self.gave_way += 1


def test_ours_gives_way_before_the_users_begins_and_what_fails_to_begin_is_none(profilers: Profilers) -> None:
    ours = Ours()
    profilers.ours = ours
    with profile(activities=CPU):
        assert ours.gave_way == 1
        second = torch.autograd.profiler.emit_itt()
        with pytest.raises(RuntimeError):
            second.__enter__()
        assert ours.gave_way == 2
    profilers.ours = None
    assert not profilers.of_the_user(torch)
    twice = torch.autograd.profiler.profile()
    with twice:
        with pytest.raises(RuntimeError):
            twice.__enter__()
        assert profilers.of_the_user(torch)
    assert not profilers.of_the_user(torch)


def test_ranges_that_are_open_when_a_window_ends_are_never_closed() -> None:
    ranges = Ranges()
    methods = record_function.__enter__, record_function.__exit__
    before = record_function("opened before")
    closed, step, opened = (
        record_function("closed"),
        record_function("Optimizer.step#SGD.step"),
        record_function("open"),
    )
    with before:
        ranges.begin(torch)
        with closed:
            pass
        step.__enter__()
        opened.__enter__()
        ranges.end()
        assert methods == (record_function.__enter__, record_function.__exit__)
    assert [one.run_callbacks_on_exit for one in (before, closed, step, opened)] == [True, True, True, False]
    opened.__exit__(None, None, None)
    step.__exit__(None, None, None)


def test_a_range_that_the_users_profiler_left_open_is_waited_for(profilers: Profilers) -> None:
    one = profile(activities=CPU)
    one.start()
    with record_function("mine"):
        one.stop()
        assert profilers.of_the_user(torch)
    assert not profilers.of_the_user(torch)
