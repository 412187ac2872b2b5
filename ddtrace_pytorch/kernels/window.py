"""One window of torch's own profiler: begun, started and ended on one thread, at the borders of steps.

Not `torch.profiler.profile`: to prepare that one imports the compiler, and on older releases it reads all events on the
thread that trains.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtrace_pytorch.kernels import gloo, teardown
from ddtrace_pytorch.kernels.memory import MemoryHistory
from ddtrace_pytorch.kernels.reading import Recorded
from ddtrace_pytorch.kernels.symbols import functions
from ddtrace_pytorch.kernels.trace_file import metadata

# What is on stderr for each window; Kineto reads it once. The user's own word stands.
_QUIET = ("KINETO_LOG_LEVEL", "6")

# By what other clients of CUPTI are loaded, which has room for one.
_INJECTIONS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
NATIVE_TRACER = "dd_set_global_parent_context"

# Seconds for gloo's threads, at a step's end, at so many of them; and where the window has to end now.
_PATIENCE, _POSTPONED, _LAST_PATIENCE = 0.05, 8, 1.0


@dataclass(frozen=True)
class Options:
    """What is recorded; `gpu` and `cpu`: what ran there."""

    cpu: bool
    gpu: bool
    shapes: bool = False
    stacks: bool = False
    memory: bool = False

    @property
    def activity(self) -> str:
        return "+".join(word for word, on in (("gpu", self.gpu), ("cpu", self.cpu)) if on)


def gpu_is_there(torch: Any) -> bool:
    """Whether there is one to profile: that the user's code has initialised, for we don't."""
    cuda = getattr(torch.autograd.ProfilerActivity, "CUDA", None)
    return cuda in torch.autograd._supported_activities() and bool(torch.cuda.is_initialized())


def prepare_environment(torch: Any, first: bool) -> None:
    """Before a window, and as early as it is known that there will be one; `first`: no profiler was there before."""
    os.environ.setdefault(*_QUIET)
    if first:
        teardown.ask_for(torch)


def in_the_way(torch: Any, gpu: bool, environ: Mapping[str, str]) -> str | None:
    """Why there can be no window now, on this thread; None if there can."""
    if getattr(torch._C, "_current_graph_task_id", lambda: -1)() != -1:
        return "an optimizer steps in the midst of a backward pass"
    if not gpu:
        return None
    for name in _INJECTIONS:
        if environ.get(name):
            return f"another profiler is there ({name})"
    if functions(NATIVE_TRACER) is not None:
        return "Datadog's native GPU tracer is there"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


class Window:
    """From :meth:`prepare` by :meth:`start` to :meth:`end`, or to :meth:`cancel` at any time."""

    # Only the thread that began it can end it: a profiler that begins on another one is not given way to.
    ends_anywhere = is_spoilt = False

    def __init__(self, torch: Any, options: Options) -> None:
        self._torch = torch
        self._options = options
        self._is_prepared = self._started = False
        self._prepared = time.time_ns()
        self._postponed, self._alone = 0, False
        self._memory = MemoryHistory(torch) if options.memory and options.gpu else None
        # `use_cpu` chooses nothing here: what does is the set of activities, the same on all releases.
        self._profiler = torch.autograd.profiler.profile(
            use_cpu=True,
            use_kineto=True,
            record_shapes=options.shapes,
            with_stack=options.stacks,
            profile_memory=options.memory,
        )
        kinds = torch.autograd.ProfilerActivity
        self._profiler.kineto_activities = {
            kind for kind, on in ((getattr(kinds, "CUDA", None), options.gpu), (kinds.CPU, options.cpu)) if on
        }

    def prepare(self) -> None:
        """Warm up: what it costs to begin is spent, and nothing is kept."""
        self._profiler._prepare_trace()
        self._is_prepared = True

    def start(self, rank: int, world_size: int, backend: str | None) -> None:
        """Record, from here on."""
        self._started = True
        self._profiler._start_trace()
        if self._memory is not None:
            self._memory.begin()
        add = self._torch.autograd._add_metadata_json
        place = {"rank": rank, "world_size": world_size, "backend": backend or "none"}
        text = metadata(backend=place["backend"])
        # Viewers of many ranks' traces tell them apart by this.
        add("distributedInfo", json.dumps(place | text))
        for name, on in (
            ("record_shapes", self._options.shapes),
            ("with_stack", self._options.stacks),
            ("profile_memory", self._options.memory),
        ):
            if on:
                add(name, "1")

    def may_end(self) -> bool:
        """Whether it can be switched off: not while another thread is to end a range of it. That is waited for a
        little, at each of some steps."""
        self._alone = self._others_are_done(_PATIENCE)
        self._postponed += 1
        return self._alone or self._postponed > _POSTPONED

    def _others_are_done(self, patience: float) -> bool:
        return not self._options.cpu or gloo.is_done(self._torch, self._prepared, patience)

    def must_wait(self) -> bool:
        """Whether this is no time to start or to end: whoever waits for the GPU now would break a graph's capture."""
        return self._options.gpu and bool(self._torch.cuda.is_current_stream_capturing())

    def settle(self) -> None:
        """Wait until the GPU has done what was asked of it: what isn't over isn't recorded; and gloo's threads, as far
        as they will."""
        if not self._alone:
            self._others_are_done(_LAST_PATIENCE)
        if self._options.gpu and not self.must_wait():
            self._torch.cuda.synchronize()

    def memory(self) -> Any:
        """What the GPU's allocator did since the start, if that is wanted, before the :meth:`end`; otherwise None."""
        return None if self._memory is None else self._memory.end()

    def end(self) -> Recorded:
        """Record no more; gives the results."""
        if self._memory is not None:
            self._memory.leave()
        threads = teardown.threads(self._torch)
        try:
            return Recorded(self._torch.autograd._disable_profiler())
        finally:
            teardown.wait(self._torch, threads)
            stopped = getattr(sys.modules["torch.autograd.profiler"], "_run_on_profiler_stop", None)
            if stopped is not None:
                stopped()

    def give_way(self) -> None:
        """From any thread: a profiler begins."""

    def cancel(self) -> None:
        """End, without results."""
        if not self._is_prepared:
            return
        if not self._started:
            self._profiler._start_trace()
        self._others_are_done(_LAST_PATIENCE)
        self.end()
