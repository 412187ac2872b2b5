"""The doors by which ddtrace's `pytorch` slot becomes ours.

ddtrace offers third parties no way to register an integration, so two doors lead here, each enough by itself:

* the wheel's ``.pth`` file calls :func:`install` when the interpreter starts;
* torch (2.5 and later) calls :func:`torch_backend` at the end of ``import torch``.

Either puts a :class:`Finder` first on ``sys.meta_path``. When ddtrace imports its built-in integration, the
functions named in :data:`SLOT` are replaced by ours as soon as the module has run. Nothing is instrumented by
that: only ddtrace, asked by the user, calls them. :func:`after_import` serves other rooms with the same finder.

This module runs at every interpreter start and imports only ``sys``.
"""

from __future__ import annotations

import sys

if False:  # typing.TYPE_CHECKING, without importing typing at every start
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_BUILT_IN = "ddtrace.contrib.internal.pytorch"

# Module of the built-in integration -> the function of ours that stands for each of its functions. The second row
# is the net for a `patch` module that was already running when the door opened.
SLOT: dict[str, dict[str, str]] = {
    f"{_BUILT_IN}.patch": {
        "patch": "patch",
        "unpatch": "unpatch",
        "get_version": "get_version",
        "_supported_versions": "_supported_versions",
    },
    f"{_BUILT_IN}._distributed": {"install": "patch", "uninstall": "unpatch"},
}

# Which door opened first, for `doctor`: "pth", "torch.backends" or "explicit".
opened_by: str | None = None

_built_in: dict[tuple[str, str], Callable[..., Any]] = {}
_after_import: dict[str, list[Callable[[ModuleType], object]]] = {}


def install(door: str = "pth") -> None:
    """Open the door: from now on the slot is ours, in modules already loaded and in those still to come."""
    global opened_by
    if opened_by is None:
        opened_by = door
        sys.meta_path.insert(0, Finder())
    for name in SLOT:
        after_import(name, take_slot)


def torch_backend() -> None:
    """Entry point of group ``torch.backends``. An exception here would make ``import torch`` fail."""
    try:
        install("torch.backends")
    except Exception as error:
        sys.stderr.write(f"WARNING ddtrace_pytorch: could not take ddtrace's pytorch slot: {error!r}\n")


def after_import(name: str, call: Callable[[ModuleType], object]) -> Callable[[], None]:
    """Call `call` with the module `name`: now if it is loaded, and as soon as it has run when it is imported later.

    Gives what takes the callback back.
    """
    calls = _after_import.setdefault(name, [])
    if call not in calls:
        calls.append(call)
    module = sys.modules.get(name)
    if module is not None:
        call(module)

    def forget() -> None:
        if call in calls:
            calls.remove(call)
        if not calls and _after_import.get(name) is calls:
            del _after_import[name]

    return forget


def take_slot(module: ModuleType) -> None:
    """Replace the functions of one built-in module by ours; those it has not defined yet stay for later."""
    ours = sys.modules["ddtrace_pytorch.patch"]
    for theirs, name in SLOT[module.__name__].items():
        function = getattr(module, theirs, None)
        replacement = getattr(ours, name)
        if function is not None and function is not replacement:
            _built_in[module.__name__, theirs] = function
            setattr(module, theirs, replacement)


def retire_built_in() -> None:
    """Switch the built-in integration off, if it was loaded, by its own functions."""
    unpatch = _built_in.get((f"{_BUILT_IN}.patch", "unpatch"))
    if unpatch is None:
        return
    loaded = [module for module in map(sys.modules.get, SLOT) if module is not None]
    for (name, theirs), function in _built_in.items():
        setattr(sys.modules[name], theirs, function)
    try:
        unpatch()
    finally:
        for module in loaded:
            take_slot(module)


class Finder:
    """Lets the other finders find a module that somebody waits for, and tells them when it has run."""

    def __init__(self) -> None:
        self._looking_for: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if sys.meta_path and sys.meta_path[0] is not self:
            # Somebody got in front; pytest's assertion rewriter would answer for ddtrace's modules before us.
            sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder is not self)]
        # ddtrace's own finder asks all finders again, while it answers us.
        if name not in _after_import or name in self._looking_for:
            return None
        self._looking_for.add(name)
        try:
            spec = self._found_by_others(name, path, target)
        finally:
            self._looking_for.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = TellingLoader(spec.loader)  # type: ignore[assignment]
        return spec

    def _found_by_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path[1:]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                return spec
        return None


class TellingLoader:
    """Another loader, followed by the callback of :func:`after_import`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for call in tuple(_after_import.get(module.__name__, ())):
            call(module)
