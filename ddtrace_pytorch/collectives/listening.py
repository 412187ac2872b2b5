"""Tells listeners of each call as it begins and ends: for markers and users' hooks, which are asked for.

A layer of its own around the counting wrappers, there only while somebody listens, because it costs some microseconds
a call.
"""

from __future__ import annotations

import functools
import inspect
import uuid
from _thread import get_ident
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from time import monotonic_ns
from typing import Any, Protocol

from ddtrace_pytorch.border import leave_no_trace, pass_on, safely
from ddtrace_pytorch.collectives import sizes
from ddtrace_pytorch.collectives.surface import Kind, Operation
from ddtrace_pytorch.ledger import Group, Ledger

# Heard, not counted: its transfers are calls of isend and irecv, each of which is counted and heard by itself.
BATCH = Operation("batch_isend_irecv", "p2p_op_list", kind=Kind.P2P, deferred="True")

# What a thread is inside of: a call, or a batch of that correlation id.
_CALL = ""


@dataclass(frozen=True)
class Call:
    """One call of an operation as it begins.

    `size` in bytes; None where it isn't known: operations made of others only know when they are over. `number` is what
    all ranks of the group know the call by (0: it has none); `root` the global rank of the root or peer, where there is
    one; `started` on the monotonic clock, in ns; `batch` what :data:`BATCH` and its transfers have in common.
    """

    operation: Operation
    group: Group
    size: int | None
    number: int
    root: int | None
    deferred: bool
    started: int
    arguments: Mapping[str, Any]
    batch: str | None = None

    @property
    def transfers(self) -> Sequence[Any]:
        """The P2POps of a batch."""
        found: Sequence[Any] = self.arguments["p2p_op_list"] if self.operation is BATCH else ()
        return found

    @property
    def device(self) -> Any:
        """Where the data is: the device of the first tensor; None where there is none, or it isn't known yet."""
        if self.operation.kind is Kind.OBJECTS:
            return None
        for value in (*(one.tensor for one in self.transfers), *self.arguments.values()):
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            if (device := getattr(first, "device", None)) is not None:
                return device
        return None


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
        self._inside: dict[int, str] = {}

    def around(self, operation: Operation) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What makes the layer around the function of `operation`."""
        read = self._read_batch if operation is BATCH else self._reader(operation)

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(original)

            @safely(f"look at a call of {operation.function}")
            def look(args: Any, kwargs: Any, batch: str | None) -> Call | None:
                try:
                    bound = signature.bind(*args, **kwargs)
                except TypeError:
                    return None  # torch will say what is wrong with it
                bound.apply_defaults()
                return read(bound.arguments, batch)

            @functools.wraps(original)
            def listened(*args: Any, **kwargs: Any) -> Any:
                me, inside = get_ident(), self._inside
                listeners, outer = self.listeners, inside.get(me)
                result = None
                try:
                    if outer == _CALL or not listeners:
                        return original(*args, **kwargs)
                    inside[me] = _CALL
                    call = look(args, kwargs, outer)
                    if call is None:
                        return original(*args, **kwargs)
                    for listener in listeners:
                        safely("tell of a collective")(listener.begin)(call)
                    if call.operation is BATCH:
                        inside[me] = call.batch or _CALL
                    try:
                        result = original(*args, **kwargs)
                    finally:
                        for listener in reversed(listeners):
                            safely("tell of a collective")(listener.end)(call, result)
                    return result
                except BaseException as error:
                    leave_no_trace(error)
                    raise
                finally:
                    if outer is None:
                        inside.pop(me, None)
                    else:
                        inside[me] = outer

            return listened

        return around

    def _reader(self, operation: Operation) -> Callable[[Mapping[str, Any], str | None], Call | None]:
        size_of = compile(operation.size, f"<size of {operation.function}>", "eval")
        deferred = compile(operation.deferred, f"<{operation.function} is deferred>", "eval")

        def read(arguments: Mapping[str, Any], batch: str | None) -> Call | None:
            group = self._ledger.group(arguments["group"])
            if group is None:
                return None
            names = {**vars(sizes), **arguments, "here": group}
            try:
                size = None if operation.kind is Kind.OBJECTS else eval(size_of, names)
            except Exception as error:
                pass_on(error)
                size = None  # no tensor: torch will say so, or has its reasons
            return Call(
                operation=operation,
                group=group,
                size=size,
                number=group.calls + 1 if operation.numbered else 0,
                root=self._root(operation, arguments, group),
                deferred=bool(eval(deferred, names)),
                started=monotonic_ns(),
                arguments=arguments,
                batch=batch,
            )

        return read

    def _read_batch(self, arguments: Mapping[str, Any], batch: str | None) -> Call | None:
        transfers = arguments["p2p_op_list"]
        whole = isinstance(transfers, list) and all(hasattr(p, "peer") and hasattr(p, "tensor") for p in transfers)
        if not whole or not transfers:
            return None  # torch will say what is wrong with it
        group = self._ledger.group(transfers[0].group)
        if group is None:
            return None
        return Call(
            operation=BATCH,
            group=group,
            size=sizes.total([one.tensor for one in transfers]),
            number=0,
            root=None,
            deferred=True,
            started=monotonic_ns(),
            arguments=arguments,
            batch=str(uuid.uuid4()),
        )

    @staticmethod
    def _root(operation: Operation, arguments: Mapping[str, Any], group: Group) -> int | None:
        if operation.root is None:
            return None
        root = arguments.get(operation.root)
        within = arguments.get(f"group_{operation.root}")
        if root is None and within is not None:
            root = group.ranks[within]
        # 2.6 and later: neither given is the group's first rank, but for recv, where it is anybody.
        if root is None and operation.kind is not Kind.P2P and "recv" not in operation.function:
            root = group.ranks[0]
        return int(root) if isinstance(root, Integral) else root  # NumPy's integers can't be written as JSON
