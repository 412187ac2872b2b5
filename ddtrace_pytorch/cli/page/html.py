"""HTML that is escaped by construction: text becomes :class:`Html` in here and nowhere else. Pure.

What elements are made of is either `Html` already, or escaped. Names of elements and attributes are the page's own.
"""

from __future__ import annotations

import html
import json
from typing import Any

from ddtrace_pytorch.visible import visible


class Html(str):
    """Text that a browser may take as it is. Only this module makes it, and :func:`own` of what is our own."""

    __slots__ = ()


Child = str | None

_VOID = frozenset({"meta", "br", "input"})


def own(text: str) -> Html:
    """`text` that was written by us: a part of the page, a style sheet, a script. Never what comes from a log."""
    return Html(text)


def escaped(text: str) -> Html:
    """`text` of somebody else's: what would act, hide, or turn the direction of what follows is shown as its escape."""
    return Html(html.escape("\n".join(visible(line) for line in text.split("\n")), quote=True))


def join(*children: Child) -> Html:
    """One after the other."""
    return Html("".join(one if isinstance(one, Html) else escaped(one) for one in children if one is not None))


def tag(element: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. Attributes: ``class_`` is class, ``data_of`` is data-of; None and False: not there."""
    told = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if element in _VOID:
        return Html(f"<{element}{told}>")
    return Html(f"<{element}{told}>{join(*children)}</{element}>")


def _attribute(key: str, value: str | float | bool) -> str:
    name = key.rstrip("_").replace("_", "-")
    if isinstance(value, bool):
        return f" {name}" if value else ""
    if isinstance(value, float):
        value = f"{value:.6g}"
    return f' {name}="{escaped(str(value))}"'


def data(value: Any) -> Html:
    """`value` as JSON for a ``script`` element of the type ``application/json``: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
