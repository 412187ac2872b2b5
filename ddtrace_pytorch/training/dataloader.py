"""How long the training waits for data, and from how many workers it gets them.

Whatever is fetched by another thread, a prefetching one, is no wait of the training's: that shows where the training
waits for it. And in a loader's worker process there is no session, hence nothing of ours.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddtrace_pytorch import autoload, in_place
from ddtrace_pytorch.border import leave_no_trace, safely
from ddtrace_pytorch.compiler import leave_uncompiled
from ddtrace_pytorch.spans import Fact
from ddtrace_pytorch.stack import calls_of, code_in
from ddtrace_pytorch.training.steps import Steps

if TYPE_CHECKING:
    from ddtrace_pytorch.lifecycle import Lifecycle

Undo = Callable[[], None]

# Module -> class and method, of what a training waits in, and the attribute that has what its batches come from. An
# iterator's start, which starts the workers, is one. What subclasses, those of Accelerate among them, do beside is left
# out: they call these.
WAITS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "torch.utils.data.dataloader": (
        ("DataLoader", "__iter__", "dataset"),
        ("_BaseDataLoaderIter", "__next__", "_dataset"),
    ),
    "torchdata.stateful_dataloader.stateful_dataloader": (("StatefulDataLoader", "__iter__", "dataset"),),
    "torchdata.nodes.loader": (("LoaderIterator", "next", "loader"),),
}


class _Here(threading.local):
    """`fetches`: this thread waits for data, unless that was interrupted."""

    fetches = False


class Loaders:
    """The loaders that were iterated in this process since the last session ended. `facts`: of the one with the most
    workers."""

    def __init__(self) -> None:
        self.here = _Here()
        self.begin_anew()

    def begin_anew(self) -> None:
        # A worker is forked in the midst of its loader's start.
        self.here.fetches = False
        self.facts: dict[str, Fact] = {}
        self._most = -1

    def fetch(self) -> bool:
        """Whether this thread waits for data, and a training for that."""
        return self.here.fetches and calls_of(WAIT, sys._getframe(1)) > 0

    def iterates(self, loader: Any) -> bool:
        """`loader`, a DataLoader, is iterated; whether that changed the facts."""
        workers = int(loader.num_workers)
        if workers <= self._most:
            return False
        self._most = workers
        self.facts = {"pytorch.dataloader.workers": workers}
        if workers:
            self.facts["pytorch.dataloader.prefetch_factor"] = int(loader.prefetch_factor)
            self.facts["pytorch.dataloader.persistent_workers"] = str(bool(loader.persistent_workers)).lower()
        return True


def watch(lifecycle: Lifecycle, undo: list[Undo]) -> None:
    """Tell of each wait, also in what is imported later; what undoes it goes into `undo`."""
    for code in (Steps.fetched.__code__, calls_of.__code__):
        leave_uncompiled(code, to_the_end=True)
    for module in WAITS:
        undo.append(autoload.after_import(module, functools.partial(_watch_module, lifecycle, undo)))


@safely("time what fetches data")
def _watch_module(lifecycle: Lifecycle, undo: list[Undo], module: ModuleType) -> None:
    for class_name, method, source in WAITS[module.__name__]:
        around = functools.partial(_around, lifecycle, source, method == "__iter__")
        undo += in_place.place_in([getattr(module, class_name)], method, around)[0]


def _around(lifecycle: Lifecycle, source: str, starts: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    """`starts`: it is a loader that `original` is called of, and not its iterator. `source`: its attribute."""
    here, steps = lifecycle.loaders.here, lifecycle.steps
    thread, now = threading.get_ident, time.monotonic_ns

    @functools.wraps(original)
    def wait(self: Any) -> Any:
        # A dataset may have a loader of its own.
        inside = (here.fetches and calls_of(WAIT) > 1) or lifecycle.current is None or thread() not in steps.trains_on
        if starts:
            lifecycle.loader_starts(self)
        exhausted = False
        started = now()
        try:
            if not inside:
                here.fetches = True
            return original(self)
        except BaseException as error:
            exhausted = isinstance(error, StopIteration)
            leave_no_trace(error)
            raise
        finally:
            if not inside:
                here.fetches = False
                steps.fetched(started, now(), self.__dict__.get(source), exhausted)

    return wait


WAIT = code_in(_around, "wait")
