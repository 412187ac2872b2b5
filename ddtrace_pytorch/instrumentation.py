"""What is switched on in torch, and how it is given back. The one place that knows whether we are on."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddtrace_pytorch import autoload, in_place
from ddtrace_pytorch.border import leave_no_trace, safely, warn_once
from ddtrace_pytorch.collectives import group_lives
from ddtrace_pytorch.patch import SUPPORTED_TORCH, get_version, supports
from ddtrace_pytorch.spans import End
from ddtrace_pytorch.training import checkpoint, collector, dataloader, engines, watching

if TYPE_CHECKING:
    from ddtrace_pytorch.session import Session

Undo = Callable[[], None]

_lock = threading.RLock()
_switched_on: Instrumentation | None = None
_at_fork_registered = False


def switch_on() -> None:
    """What :func:`ddtrace_pytorch.patch` does; where it fails, nothing stays instrumented."""
    if is_on() or not _torch_is_supported():
        return
    autoload.install("explicit")
    # Not under the lock: a thread that is importing torch comes here too, and has the lock of that import.
    import torch

    with _lock:
        if is_on():
            return
        _retire_the_built_in(torch)
        _begin(lambda instrumentation: instrumentation.install(torch))


def listen() -> None:
    """Take the user's records, where ddtrace calls :func:`ddtrace_pytorch.patch` once torch is imported: that may never
    be. All else follows then."""
    with _lock:
        if _switched_on is None:
            _begin(Instrumentation.listen)


def _begin(how: Callable[[Instrumentation], None]) -> None:
    global _switched_on
    _register_at_fork()
    _switched_on = _switched_on or Instrumentation()
    try:
        how(_switched_on)
    except BaseException:
        switch_off()
        raise


@safely("give torch back")
def switch_off() -> None:
    """What :func:`ddtrace_pytorch.unpatch` does."""
    global _switched_on
    with _lock:
        instrumentation, _switched_on = _switched_on, None
        if instrumentation is not None:
            instrumentation.remove()


def current_session() -> Session | None:
    """The one that is open in this process."""
    return _switched_on.lifecycle.current if _switched_on is not None else None


def is_on() -> bool:
    """Whether torch is instrumented."""
    return _switched_on is not None and _switched_on.has_torch


def _torch_is_supported() -> bool:
    version = get_version()
    if not version:
        warn_once(f"torch is not installed; ddtrace-pytorch instruments nothing (it needs torch {SUPPORTED_TORCH})")
        return False
    supported = supports(version)
    if not supported:
        warn_once(
            f"torch {version} is not supported; ddtrace-pytorch instruments nothing (it needs torch {SUPPORTED_TORCH})"
        )
    return supported


def _retire_the_built_in(torch: Any) -> None:
    # It can only be on if it was patched before either door opened.
    if getattr(torch, "_datadog_patch", False):
        autoload.retire_built_in()


def _register_at_fork() -> None:
    # Python has no way to take such a registration back, so it is made once and asks whether we are on.
    global _at_fork_registered
    if _at_fork_registered:
        return
    _at_fork_registered = True

    def in_child() -> None:
        global _lock
        _lock = threading.RLock()
        if _switched_on is not None:
            _switched_on.lifecycle.after_fork_in_child()

    os.register_at_fork(
        before=lambda: _switched_on.lifecycle.before_fork() if _switched_on is not None else None,
        after_in_parent=lambda: _switched_on.lifecycle.after_fork() if _switched_on is not None else None,
        after_in_child=in_child,
    )


class Instrumentation:
    """Everything that is instrumented in one process, from :meth:`install` or :meth:`listen` to :meth:`remove`."""

    def __init__(self) -> None:
        from ddtrace_pytorch.lifecycle import Lifecycle

        self.lifecycle = Lifecycle()
        self._torch: Any = None
        self._listens = False
        self._undo: list[Undo] = []

    @property
    def has_torch(self) -> bool:
        return self._torch is not None

    def listen(self) -> None:
        """Without torch: the user's records alone."""
        self._listens = True
        self.lifecycle.record()
        atexit.register(self.lifecycle.at_exit)

    def install(self, torch: Any) -> None:
        self._torch = torch
        distributed = torch.distributed
        if distributed.is_available():
            self._instrument("init_process_group", self._around_init)
            self._instrument("destroy_process_group", self._around_destroy)
            self._watch_groups(distributed.distributed_c10d)
        watching.watch(self.lifecycle.used, self._undo)
        self._undo.append(self.lifecycle.steps.watch())
        engines.watch(self.lifecycle.steps, self._undo)
        dataloader.watch(self.lifecycle, self._undo)
        checkpoint.watch(self.lifecycle, self._undo)
        self._undo.append(collector.watch(self.lifecycle))
        self._undo += self.lifecycle.profilers.watch(torch)
        if self._listens:
            self.lifecycle.meet_torch(torch)
        else:
            self.listen()
        self._torch._datadog_patch = True
        self._undo.append(functools.partial(delattr, self._torch, "_datadog_patch"))
        if distributed.is_available() and distributed.is_initialized():
            self.lifecycle.group_made(distributed)

    def remove(self) -> None:
        self.lifecycle.end()
        atexit.unregister(self.lifecycle.at_exit)
        while self._undo:
            self._undo.pop()()

    def _watch_groups(self, c10d: Any) -> None:
        lives = self.lifecycle.lives
        for name in group_lives.makers(c10d):
            self._instrument(name, functools.partial(lives.around_maker, c10d, name))
        if hasattr(c10d, "_abort_process_group"):
            self._instrument("_abort_process_group", functools.partial(lives.around_ender, c10d))
        self._undo.append(lives.follow(self._made))

    @safely("tell of a process group")
    def _made(self, process_group: Any) -> None:
        # By `init_process_group`, or in place of a default group that shrank.
        if process_group is self._torch.distributed.group.WORLD:
            self.lifecycle.group_made(self._torch.distributed)
        # Not imported, nobody has registered any.
        hooks = sys.modules.get("ddtrace_pytorch.hooks")
        if hooks is not None:
            from ddtrace_pytorch.collectives.groups import name_of

            hooks.tell_of(process_group, name_of(process_group, self._torch.distributed.distributed_c10d))

    def _instrument(self, name: str, around: in_place.Around) -> None:
        undo, how = in_place.place(self._torch.distributed, name, around)
        self._undo += undo
        if how == "wrapt":
            self.lifecycle.instrument = how

    def _around_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        lifecycle, distributed = self.lifecycle, self._torch.distributed

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            self._make_room_in_recorder()
            over = threading.Event()
            try:
                self._watch_waiting(over, original, args, kwargs)
                with lifecycle.rendezvous():
                    result = original(*args, **kwargs)
            except BaseException as error:
                leave_no_trace(error)
                lifecycle.group_failed(distributed, error, _arguments(original, args, kwargs))
                raise
            finally:
                over.set()
            lifecycle.lives.made(distributed.group.WORLD)
            return result

        return init_process_group

    @safely("give torch's flight recorder a buffer")
    def _make_room_in_recorder(self) -> None:
        """Torch looks at the variable once, when the first process group is made."""
        from ddtrace_pytorch import opening
        from ddtrace_pytorch.collectives import flight_recorder, surface

        settings = opening.wanted_settings()
        if settings is None or settings.collectives == "off":
            return
        for name, value in flight_recorder.buffer_for(surface.release_of(self._torch.__version__), os.environ).items():
            os.environ[name] = value
            self._undo.append(functools.partial(_unset, name, value))

    @safely("watch who waits in init_process_group")
    def _watch_waiting(
        self, over: threading.Event, init: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        from ddtrace_pytorch import opening, waiting_room

        settings = opening.wanted_settings()
        rank, world_size = opening.place_hint(_arguments(init, args, kwargs))
        if settings is not None and settings.stall_seconds and rank is not None and world_size is not None:
            waiting_room.watch(rank, world_size, settings.stall_seconds, over)

    def _around_destroy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        lifecycle, distributed = self.lifecycle, self._torch.distributed

        @functools.wraps(original)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            group = args[0] if args else kwargs.get("group")
            is_default = group is None or group is distributed.group.WORLD
            on_its_way = sys.exc_info()[1]
            if is_default:
                lifecycle.lives.going(None)
                lifecycle.group_going()
            elif isinstance(group, distributed.ProcessGroup):
                lifecycle.lives.going(group)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                leave_no_trace(error)
                raise
            if is_default:
                lifecycle.close(End("destroyed") if on_its_way is None else End("exception", on_its_way))
            return result

        return destroy_process_group


def _unset(name: str, value: str) -> None:
    """Take `name` out of the environment, unless it has been given another value than `value`."""
    if os.environ.get(name) == value:
        del os.environ[name]


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return kwargs
