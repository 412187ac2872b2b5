"""Tells listeners of each call as it begins and ends: for markers and users' hooks, which are asked for.

A layer of its own around the counting wrappers, there only while somebody listens, because it costs some microseconds
a call.
"""

from __future__ import annotations

import functools
import inspect
from _thread import get_ident
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, Protocol

from ddtrace_pytorch.border import safely
from ddtrace_pytorch.collectives import sizes
from ddtrace_pytorch.collectives.surface import Kind, Operation
from ddtrace_pytorch.ledger import Group, Ledger


@dataclass(frozen=True)
class Call:
    """One call of an operation as it begins.

    `size` in bytes; None for operations made of others, which only know when they are over. `number` is what all ranks
    of the group know the call by (0: it has none); `root` the global rank of the root or peer, where there is one;
    `started` on the monotonic clock, in ns.
    """

    operation: Operation
    group: Group
    size: int | None
    number: int
    root: int | None
    deferred: bool
    started: int
    arguments: Mapping[str, Any]


class Listener(Protocol):
    """Its methods run on the thread that makes the call; what they raise is logged once and goes no further."""

    def begin(self, call: Call) -> None: ...

    def end(self, call: Call, result: Any) -> None:
        """The call came back with `result`; None where it raised."""


class Listening:
    """Makes the layer; `listeners` may change while it is there."""

    def __init__(self, ledger: Ledger) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self._ledger = ledger
        self._inside: set[int] = set()

    def around(self, operation: Operation) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What makes the layer around the function of `operation`."""
        size_of = compile(operation.size, f"<size of {operation.function}>", "eval")
        deferred = compile(operation.deferred, f"<{operation.function} is deferred>", "eval")

        def read(signature: inspect.Signature, args: Any, kwargs: Any) -> Call | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            group = self._ledger.group(arguments["group"])
            if group is None:
                return None
            names = {**vars(sizes), **arguments, "here": group}
            return Call(
                operation=operation,
                group=group,
                size=eval(size_of, names) if operation.kind not in (Kind.OBJECTS, Kind.COALESCING) else None,
                number=group.calls + 1 if operation.kind in (Kind.COLLECTIVE, Kind.OBJECTS) else 0,
                root=self._root(operation, arguments, group),
                deferred=bool(eval(deferred, names)),
                started=monotonic_ns(),
                arguments=arguments,
            )

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            read_safely = safely(f"look at a call of {operation.function}")(
                functools.partial(read, inspect.signature(original))
            )

            @functools.wraps(original)
            def listened(*args: Any, **kwargs: Any) -> Any:
                me = get_ident()
                listeners = self.listeners
                if me in self._inside or not listeners:
                    return original(*args, **kwargs)
                self._inside.add(me)
                result = None
                try:
                    call = read_safely(args, kwargs)
                    if call is None:
                        return original(*args, **kwargs)
                    for listener in listeners:
                        safely("tell of a collective")(listener.begin)(call)
                    try:
                        result = original(*args, **kwargs)
                    finally:
                        for listener in reversed(listeners):
                            safely("tell of a collective")(listener.end)(call, result)
                    return result
                finally:
                    self._inside.discard(me)

            return listened

        return around

    @staticmethod
    def _root(operation: Operation, arguments: Mapping[str, Any], group: Group) -> int | None:
        if operation.root is None:
            return None
        root = arguments.get(operation.root)
        within = arguments.get(f"group_{operation.root}")
        if root is None and within is not None:
            root = group.ranks[within]
        # 2.6 and later: neither given is the group's first rank, but for recv, where it is anybody.
        if root is None and operation.kind is not Kind.P2P:
            root = group.ranks[0]
        return root
