"""Checkpoints: `torch.save` and `torch.load`, and `torch.distributed.checkpoint`.

Only the outermost counts: `torch.distributed.checkpoint` saves by `torch.save`, and `async_save` by `save`, on another
thread. What is needed only once there is one is imported where it begins: this module is imported by `patch()`.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddtrace_pytorch import autoload, in_place
from ddtrace_pytorch.border import leave_no_trace, safely
from ddtrace_pytorch.compiler import leave_uncompiled
from ddtrace_pytorch.stack import calls_of, code_in

if TYPE_CHECKING:
    from ddtrace_pytorch.lifecycle import Lifecycle
    from ddtrace_pytorch.session import Session
    from ddtrace_pytorch.training.checkpoint_running import Running

Undo = Callable[[], None]

_SERIALIZATION = "torch.serialization"
_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_LOADER = "torch.distributed.checkpoint.state_dict_loader"
_SAVERS_PROCESS = "torch.distributed.checkpoint._async_process_executor"


@dataclass(frozen=True)
class Operation:
    """One row: calling `function` of `module` is the operation `name`.

    `parameters`: the first of the function's, by which its positional arguments are told.
    """

    name: str
    module: str
    function: str
    parameters: tuple[str, ...]

    @property
    def kind(self) -> str:
        return "load" if self.name.endswith("load") else "save"

    @property
    def of_one_file(self) -> bool:
        return self.module == _SERIALIZATION

    @property
    def is_async(self) -> bool:
        return self.function == "async_save"


_SAVED = ("state_dict", "storage_writer", "process_group", "coordinator_rank", "no_dist")
_LOADED = ("state_dict", "storage_reader", "process_group", "coordinator_rank", "no_dist")

OPERATIONS: tuple[Operation, ...] = (
    Operation("torch.save", _SERIALIZATION, "save", ("obj", "f")),
    Operation("torch.load", _SERIALIZATION, "load", ("f",)),
    Operation("dcp.save", _SAVER, "save", _SAVED),
    Operation("dcp.save", _SAVER, "save_state_dict", _SAVED),
    Operation("dcp.async_save", _SAVER, "async_save", _SAVED),
    Operation("dcp.load", _LOADER, "load", _LOADED),
    Operation("dcp.load", _LOADER, "load_state_dict", _LOADED),
)

# What `load` calls with the state dicts of the Stateful objects it was given; older releases have no such function.
_PART_OF_LOAD = "_load_state_dict"


def is_savers_process() -> bool:
    """Whether this process is the one that `async_save` runs beside each rank on demand, with a group of their own.

    Asked where it makes that group: it has the rank's number, and is none.
    """
    frame = sys._getframe() if multiprocessing.parent_process() is not None else None
    while frame is not None:
        if frame.f_code.co_name == "_checkpointing_subprocess" and frame.f_globals.get("__name__") == _SAVERS_PROCESS:
            return True
        frame = frame.f_back
    return False


def watch(lifecycle: Lifecycle, undo: list[Undo]) -> None:
    """Tell of each checkpoint, also by functions that are imported later; what undoes it goes into `undo`."""
    checkpoints = _Checkpoints(lifecycle)
    for module in dict.fromkeys(operation.module for operation in OPERATIONS):
        undo.append(autoload.after_import(module, functools.partial(_watch_module, checkpoints, undo)))


@safely("watch for checkpoints")
def _watch_module(checkpoints: _Checkpoints, undo: list[Undo], module: ModuleType) -> None:
    arounds: dict[str, in_place.Around] = {
        operation.function: functools.partial(checkpoints.around, operation)
        for operation in OPERATIONS
        if operation.module == module.__name__
    }
    if module.__name__ == _LOADER:
        arounds[_PART_OF_LOAD] = checkpoints.around_part
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for name, around in arounds.items():
        # Where it can't be done in place, the package has the function to be replaced too.
        holders = [one for one in (package, module) if one is not None and name in vars(one)]
        if holders:
            undo += in_place.place_in(holders, name, around)[0]


class _Checkpoints:
    """Sees operations begin and end, on any thread."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._here = threading.local()

    def around(self, operation: Operation, original: Callable[..., Any]) -> Callable[..., Any]:
        begin = _uncompiled(safely("note that a checkpoint begins")(self._begin))
        end = _uncompiled(safely("tell of a checkpoint")(self._end))

        @functools.wraps(original)
        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            running = begin(operation, args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                leave_no_trace(error)
                if running is not None:
                    end(running, error=error)
                raise
            if running is not None:
                end(running, result)
            return result

        return checkpoint

    _CALL = code_in(around, "checkpoint")

    def around_part(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = _uncompiled(safely("find how much is loaded")(self._note_loaded))

        @functools.wraps(original)
        def part(*args: Any, **kwargs: Any) -> Any:
            note(args, kwargs)
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_trace(error)
                raise

        return part

    def _begin(self, operation: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Running | None:
        session = self._lifecycle.current
        inside = getattr(self._here, "running", None) is not None and calls_of(self._CALL) > 1
        # A data set that loads tensors loads data.
        if session is None or inside or self._lifecycle.loaders.fetch():
            return None
        from ddtrace_pytorch.training.checkpoint_running import Running
        from ddtrace_pytorch.training.checkpoint_target import File, Storage

        given = {**dict(zip(operation.parameters, args, strict=False)), **kwargs}
        ids = (given.get("checkpoint_id"), given.get("storage_writer", given.get("storage_reader")))
        running = Running(
            operation=operation,
            session=session,
            thread=threading.get_ident(),
            began=time.monotonic_ns(),
            under=session.span.piece,
            # What is loaded on a resume is loaded before anybody knows which step that is.
            step=self._lifecycle.progress.step.number if self._lifecycle.steps.known else None,
            target=File(given.get("f")) if operation.of_one_file else Storage(*ids),
            ids=ids,
            rank=0 if operation.of_one_file else _rank(given),
            behind=_is_behind(session, ids),
        )
        self._here.running = running
        if operation.is_async:
            session.checkpoints.in_background.append(running)
        return running

    def _end(self, running: Running, result: Any = None, error: BaseException | None = None) -> None:
        from ddtrace_pytorch.training.checkpoint_spans import LONG
        from ddtrace_pytorch.training.checkpoint_target import File, size_of_saved

        self._here.running = None
        if running.behind:
            return
        ended = time.monotonic_ns()
        if isinstance(running.target, File):
            # Many libraries make bytes of tensors that way, or give them to other processes.
            if running.target.in_memory and ended - running.began < LONG:
                return
            if error is None:
                running.size = running.target.size(running.operation.kind)
        elif running.operation.kind == "save":
            running.size = size_of_saved(result, running.rank)
        steps = self._lifecycle.steps
        if steps.known and running.thread in steps.trains_on:
            self._lifecycle.progress.tag("checkpoint")
        # Newer releases give two futures, where staging goes on in the background too.
        future = getattr(result, "upload_completion", result)
        if running.operation.is_async:
            running.more |= {"checkpoint.async": "true", "checkpoint.blocked_ms": (ended - running.began) / 1e6}
        if running.operation.is_async and hasattr(future, "add_done_callback"):
            running.goes_on(future)
        else:
            running.tell(ended, error)

    def _note_loaded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        running: Running | None = getattr(self._here, "running", None)
        if running is not None and running.operation.name == "dcp.load":
            from ddtrace_pytorch.training.checkpoint_target import size_of_tensors

            state = args[0] if args else kwargs.get("state_dict")
            running.size = size_of_tensors(sys.modules["torch"], state)


def _is_behind(session: Session, ids: tuple[Any, Any]) -> bool:
    from ddtrace_pytorch.training.checkpoint_running import Running

    here = threading.get_ident()
    return any(
        isinstance(one, Running) and one.ids[0] is ids[0] and one.ids[1] is ids[1] and one.thread != here
        for one in tuple(session.checkpoints.in_background)
    )


def _rank(given: Mapping[str, Any]) -> int:
    distributed = sys.modules["torch"].distributed
    if given.get("no_dist") or not (distributed.is_available() and distributed.is_initialized()):
        return 0
    return int(distributed.get_rank(given.get("process_group")))


def _uncompiled(function: Any) -> Any:
    leave_uncompiled(function.__code__, to_the_end=True)
    return function
