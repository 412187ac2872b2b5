"""Text of somebody else's, as it can be shown in a line."""

from __future__ import annotations


def visible(text: str) -> str:
    """`text` with everything that a terminal would act on, or hide, as its escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
