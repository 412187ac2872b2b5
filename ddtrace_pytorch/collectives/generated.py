"""Functions made of source text, with the signature and the place of the function that they stand for."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, cast


def signature_of(original: Callable[..., Any]) -> tuple[str, str, list[Any]]:
    """The parameters of `original` as source, where their defaults are in ``_defaults``; as arguments; the defaults."""
    parameters = inspect.signature(original).parameters
    written = ", ".join(
        name if one.default is one.empty else f"{name}=_defaults[{position}]"
        for position, (name, one) in enumerate(parameters.items())
    )
    return written, ", ".join(parameters), [one.default for one in parameters.values()]


def maker(source: str, file: str, line: int, namespace: dict[str, Any]) -> Callable[..., Any]:
    """The function `make` that `source` defines in `namespace`, as if all of it stood in one line of `file`."""
    exec(_compiled(source, file, line), namespace)
    return cast(Callable[..., Any], namespace.pop("make"))  # not left there, or the two would hold each other


@functools.lru_cache(maxsize=128)  # one for each operation: a process may open many sessions
def _compiled(source: str, file: str, line: int) -> CodeType:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
    return compile(tree, file, "exec")
