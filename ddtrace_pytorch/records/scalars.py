"""The numbers that a user gives: which of them are at hand, which are still to come from a GPU, which are none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from ddtrace_pytorch.border import complain, pass_on, warn_once
from ddtrace_pytorch.records.attributes import NAME_LIMIT, as_number, given, one, short_name

# Of one call.
MOST = 1_000
# So many names of scalars that are no numbers are warned of.
WARNINGS = 20

try:
    from ddtrace_pytorch.records._at_hand import reader
except ImportError:
    reader = None  # type: ignore[assignment]

_NOTHING = nullcontext()

_tensors: tuple[type, ...] = ()
# Whether `torch.jit.trace` notes what is done with a tensor.
_tracing: Callable[[], bool] = bool

_warned: set[str] = set()


# The numbers; the tensors on a GPU, and the types of what is no number: each None where there are none.
Split = tuple[dict[str, int | float], list[tuple[str, Any]] | None, dict[str, Any] | None]


def mapped(values: object) -> dict[str, object]:
    """`values` as a dict, where it is a mapping of the user's own kind.

    Raises:
        TypeError: it is none.
    """
    try:
        is_mapping = issubclass(type(values), Mapping)
    except Exception as error:
        pass_on(error)
        is_mapping = False
    if not is_mapping:
        raise TypeError(f"scalar() takes a dict of numbers by their names, not {given(values)}")
    try:
        return dict(values.items())  # type: ignore[attr-defined]
    except Exception as error:
        complain("read the mapping that scalars were given in", error)
        return {}


def split(values: Mapping[str, object]) -> Split | None:
    """Of `values` the numbers that are at hand, the tensors of one element on a GPU, and what isn't a number, as its
    type; None where a name is no text."""
    numbers: dict[str, int | float] = {}
    on_gpu: list[tuple[str, Any]] | None = None
    others: dict[str, Any] | None = None
    tensor, parameter = _tensors or _find_tensors()
    for name, value in values.items():
        if type(name) is not str or len(name) > NAME_LIMIT:
            if not issubclass(type(name), str):
                return None
            name = short_name(name)
        kind = type(value)
        if kind is float:
            numbers[name] = value  # type: ignore[assignment]
            continue
        number: int | float | None
        if kind is tensor or kind is parameter:
            try:
                number = _read(value)
            except Exception as error:
                pass_on(error)
                number = None  # there are several
            if type(number) is float:
                numbers[name] = number
                continue
            if number is not None:
                number = as_number(number)
            elif not _tracing() and _is_on_gpu(value):
                on_gpu = on_gpu or []
                on_gpu.append((name, value))
                continue
        else:
            number = as_number(value)
            if number is None:
                number = _in_array(value)
        if number is None:
            others = others or {}
            others[name] = one(value)
        else:
            numbers[name] = int(number) if number is True or number is False else number
    if len(values) > MOST:
        numbers, on_gpu, others = _fewer(numbers, on_gpu or [], others or {})
    if others is not None:
        _warn(others)
    return numbers, on_gpu, others


def without_dispatch(torch: Any) -> Any:
    """While it lasts, no mode of the user's sees what is done with a tensor."""
    inside = torch._C
    if inside._len_torch_function_stack():
        return _without_any(inside)
    return inside._DisableTorchDispatch() if inside._len_torch_dispatch_stack() else _NOTHING


@contextmanager
def _without_any(inside: Any) -> Iterator[None]:
    with inside.DisableTorchFunction(), inside._DisableTorchDispatch():
        yield


def _find_tensors() -> tuple[type, ...]:
    """The classes of tensors behind which there is no code of the user's; two that nothing is of without torch."""
    global _tensors, _tracing, _read
    torch = sys.modules.get("torch")
    if torch is not None:
        _tensors = (torch.Tensor, torch.nn.Parameter)
        inside = torch._C
        _tracing = inside._is_tracing
        if reader is not None:
            # Modes of the user's, of either kind, see what is done with a tensor.
            watched = _tracing, inside._len_torch_dispatch_stack, inside._len_torch_function_stack
            _read = reader(carefully, torch.Tensor.item, *watched)
    return _tensors or (Mapping, Mapping)


def carefully(value: Any) -> int | float | None:
    """The one element of a tensor in this host's memory, of which no mode of the user's is to see anything."""
    if _tracing():
        return None  # it has none yet, and torch would warn
    with without_dispatch(sys.modules["torch"]):
        return value.item() if value.is_cpu else None


# The same, faster where that can be.
_read: Callable[[Any], int | float | None] = carefully


def _in_array(value: Any) -> int | float | None:
    """The one element of an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and value.size == 1:
        return as_number(value.item())
    return None


def _is_on_gpu(value: Any) -> bool:
    try:
        with without_dispatch(sys.modules["torch"]):
            return bool(value.is_cuda) and value.numel() == 1 and not value.is_complex()
    except Exception as error:
        pass_on(error)
        return False


def _fewer(numbers: dict[str, int | float], on_gpu: list[tuple[str, Any]], others: dict[str, Any]) -> Split:
    left = MOST - len(others)
    over = len(numbers) + len(on_gpu) + len(others) - MOST
    kept = dict([*numbers.items()][: max(left - len(on_gpu), 0)])
    return kept, on_gpu[:left], {**dict([*others.items()][:MOST]), "…": f"+{over} scalars"}


def _warn(others: Mapping[str, Any]) -> None:
    for name, what in others.items():
        if name not in _warned and len(_warned) < WARNINGS:
            _warned.add(name)
            warn_once(f"the scalar {name[:80]!r} is no number; what is recorded of it is {str(what)[:80]!r}")
