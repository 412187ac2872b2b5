"""Ordinary calls of collectives counted in C (``native/counting.c``), where this installation has that part.

It is built with the wheel where there is a C compiler. Without it the generated wrappers do the same in Python, at
nearly twice the cost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ddtrace_pytorch.collectives import sizes
from ddtrace_pytorch.collectives.generated import signature_of
from ddtrace_pytorch.collectives.in_flight import InFlight, Slot
from ddtrace_pytorch.collectives.surface import BYTES_OF_ONE, Operation
from ddtrace_pytorch.compiler import leave_uncompiled
from ddtrace_pytorch.ledger import Cell, Group, Line, times_of
from ddtrace_pytorch.plain_numbers import exist

if exist:
    from ddtrace_pytorch.collectives import _counting

# What sums up the times of cells.
times: Callable[[dict[Cell, None]], int] = _counting.times if exist else times_of

# What makes a function that follows Works; None without that part.
tracker = _counting.tracker if exist else None

_NOTHING = (-1, "")


def prepare(torch: Any) -> None:
    """Once, before the first :func:`instrument`."""
    if exist:
        _counting.lay_out(Cell, Line, Group, Slot, torch.Tensor, dtypes(torch))


def dtypes(torch: Any) -> tuple[Any, ...]:
    """Torch's types of numbers, as a position numbers them from 1 on."""
    return tuple(sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str))


def instrument(
    operation: Operation,
    original: FunctionType,
    careful: FunctionType,
    waited: Line,
    issued: Line,
    in_flight: InFlight,
    track: Callable[[Any, Cell], object],
) -> tuple[FunctionType, Callable[[], None]]:
    """A copy of `original` whose calls are counted, and what makes it one that only passes them on.

    `careful` gets the calls that are out of the ordinary. The copy has the code of `original`: who asks what a
    function is made of, as Dynamo does, finds torch's.
    """
    parameters = inspect.signature(original).parameters
    at = {name: (position, name) for position, name in enumerate(parameters)}
    one = BYTES_OF_ONE.fullmatch(operation.size)
    has_size_of_its_own = one is None and operation.size != "0"
    copy = FunctionType(
        original.__code__, original.__globals__, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__qualname__ = original.__qualname__
    copy.__module__ = original.__module__
    copy.__doc__ = original.__doc__
    copy.__annotations__ = original.__annotations__
    copy.__dict__.update(original.__dict__)
    _counting.instrument(
        copy,
        original,
        careful,
        waited,
        issued,
        in_flight.local,
        track,
        _size_function(operation, original) if has_size_of_its_own else None,
        parameters["group"].default,
        next(iter(at.values())),
        at["group"],
        at.get(operation.deferred, _NOTHING),
        at[one[1]] if one is not None else _NOTHING,
        operation.deferred == "True",
        operation.numbered,
    )
    return copy, lambda: _counting.release(copy)


def _size_function(operation: Operation, original: FunctionType) -> Callable[..., int]:
    """Takes the group and then what `original` takes; gives the bytes of the message."""
    parameters, _, defaults = signature_of(original)
    names = {name: getattr(sizes, name) for name in sizes.__all__} | {"_defaults": defaults}
    made: Callable[..., int] = eval(f"lambda here, {parameters}: {operation.size}", names)
    leave_uncompiled(made.__code__)
    return made
