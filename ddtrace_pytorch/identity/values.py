"""What the text of an environment variable is worth: a short line, or a number."""

from __future__ import annotations

LONGEST_VALUE = 200


def clean(raw: str) -> str:
    """`raw` as one line of printable characters, at most :data:`LONGEST_VALUE` long; blank runs become one blank."""
    head = raw.strip()[: 8 * LONGEST_VALUE]
    printable = "".join(letter if letter.isprintable() else " " for letter in head)
    return " ".join(printable.split())[:LONGEST_VALUE].rstrip()


def whole_number(raw: str) -> int | None:
    """The number that `raw` is, of at most nine digits, or None."""
    text = raw.strip()
    return int(text) if len(text) <= 9 and text.isascii() and text.isdigit() else None
