"""A user's values as plain data: text, numbers, truth values and None are kept, of all else the type and shape.

No code of the user's runs for that: no ``repr``, ``str`` or ``len`` of a class of theirs, which might also wait for a
GPU. And nothing of theirs is held on to.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import index
from typing import Any

from ddtrace_pytorch.border import pass_on
from ddtrace_pytorch.classes import module_of, name_of

Plain = str | int | float | bool | None

# Characters of one text.
TEXT_LIMIT = 4_000
# Characters of the name of a span, event, scalar or attribute, and of a step's tag.
NAME_LIMIT = 200
# Bits: a longer number is no number anybody reads, and takes its time to be written.
NUMBER_LIMIT = 1_024
MOST = 64
# Characters of a value that is shown in a message.
SHOWN = 40
# Functions of ours that are decorators too.
DECORATORS = ("span",)
# Characters of what is said of an array's type, which may have hundreds of fields.
KIND_LIMIT = 200

_CONTAINERS = (dict, list, tuple, set, frozenset, bytes, bytearray)
_SHOWN = (int, float, bool, complex, bytes, type(None))
NOTHING: dict[str, Plain] = {}


def plain(attributes: Mapping[str, object]) -> dict[str, Plain]:
    """All of `attributes` as plain data; of too many, the first, and how many more there were."""
    if len(attributes) > MOST:
        kept = {short_name(name): one(value) for name, value in [*attributes.items()][:MOST]}
        kept["…"] = f"+{len(attributes) - MOST} attributes"
        return kept
    return {short_name(name): one(value) for name, value in attributes.items()}


def one(value: object) -> Plain:
    """`value` as plain data."""
    kind = type(value)
    if kind is str:
        return short(value)  # type: ignore[arg-type]
    if kind is float or kind is bool or value is None:
        return value  # type: ignore[return-value]
    number = as_number(value)
    if number is not None:
        return number
    if issubclass(kind, str):
        return short(str.__str__(value))
    return described(value)


def text(value: object, function: str, what: str) -> str:
    """`value` as a plain name, which that `function` of ours was given as `what`.

    Raises:
        TypeError: it is no text.
    """
    kind = type(value)
    if not issubclass(kind, str):
        hint = f': use @{function}("name")' if function in DECORATORS and callable(value) else ""
        raise TypeError(f"{function}() takes {what} as a str, not {given(value)}{hint}")
    return str.__str__(value)


def whole(value: object, function: str, what: str) -> int:
    """`value` as a whole number, likewise.

    Raises:
        TypeError: it is none.
    """
    if type(value) is int:
        return value
    try:
        return int(index(value))  # type: ignore[arg-type]
    except Exception as error:
        pass_on(error)
        cause = None if isinstance(error, TypeError) else error
        raise TypeError(f"{function}() takes {what} as an int, not {given(value)}") from cause


def given(value: object) -> str:
    """`value` as a message can have it."""
    kind = type(value)
    if _is_one(kind, _SHOWN):
        shown = repr(value)
        if len(shown) <= SHOWN:
            return shown
    return f"{'an' if name_of(kind)[0] in 'aeiouAEIOU' else 'a'} {short_name(name_of(kind))}"


def short(value: str) -> str:
    """`value`, cut off with a mark where it is long."""
    if len(value) <= TEXT_LIMIT:
        return value
    return f"{value[:TEXT_LIMIT]}…(+{len(value) - TEXT_LIMIT} chars)"


def short_name(name: str) -> str:
    """`name` as plain text, cut off with a mark where it is long. Not for one that was cut off before."""
    if type(name) is not str:
        name = str.__str__(name)
    if len(name) <= NAME_LIMIT:
        return name
    return f"{name[:NAME_LIMIT]}…(+{len(name) - NAME_LIMIT} chars)"


def as_number(value: object) -> int | float | bool | None:
    """`value`, where it is a number of Python's or NumPy's, or a subclass of Python's; else None."""
    kind = type(value)
    if kind is float or kind is bool:
        return value  # type: ignore[return-value]
    if issubclass(kind, int):
        number = int.__int__(value)  # type: ignore[arg-type]
        return number if number.bit_length() <= NUMBER_LIMIT else None
    if issubclass(kind, float):
        return float.__float__(value)  # type: ignore[arg-type]
    if module_of(kind) == "numpy":
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(kind, (numpy.number, numpy.bool_)):
            try:
                found = value.item()  # type: ignore[attr-defined]
            except Exception as error:
                pass_on(error)
                return None  # a class of the user's that says to be NumPy's
            return found if type(found) in (int, float, bool) else None
    return None


def described(value: Any) -> str:
    """The type of `value`, with the shape of a tensor or array and the length of a container."""
    kind = type(value)
    name = short_name(name_of(kind))
    if _is_one(kind, _CONTAINERS):
        return f"{name}[{len(value)}]"
    root = module_of(kind).partition(".")[0]
    try:
        if root == "torch" and issubclass(kind, sys.modules["torch"].Tensor):
            inside = sys.modules["torch"]._C
            if inside._get_tracing_state() is not None:
                return name  # to ask for its shape would be traced
            # A subclass of torch's own (DTensor) would be asked in Python what its shape is, and so would a mode.
            with inside.DisableTorchFunction():
                return _array(name, value)
        if root == "numpy" and issubclass(kind, sys.modules["numpy"].ndarray):
            return _array(name, value)
    except Exception as error:
        pass_on(error)  # else it is a tensor without a shape, such as a nested one
    return name


def _is_one(kind: type, of: tuple[type, ...]) -> bool:
    """Whether `kind` is one of these itself: a metaclass of the user's might say so of another."""
    return any(kind is one for one in of)


def _array(name: str, value: Any) -> str:
    # A size that is still a symbol must not be asked for its value.
    shape = ", ".join([str(size) if type(size) is int else "?" for size in value.shape])
    return f"{name}[{shape}] {str(value.dtype).removeprefix('torch.')[:KIND_LIMIT]}"
