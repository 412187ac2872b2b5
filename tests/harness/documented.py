"""Which tags and metrics docs/spans.md says that each span has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "spans.md"

TAG, METRIC = "tag", "metric"
UNITS = frozenset(("number", "share", "bytes", "ms", "s", "1/s", "GB/s"))

# Of one span: by name, or its pattern, whether that is a tag, a metric, or now this and now that.
Names = dict[str, frozenset[str]]


def documented() -> dict[str, Names]:
    """By span, what is said of it; under the empty name, what is said of all."""
    found: dict[str, Names] = {}
    for section in DOCUMENT.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        span = "" if heading == "On every span" else heading
        assert span not in found
        names = found[span] = {}
        for name, kinds in _rows(body):
            assert name not in names, f"{name} of {heading} is there twice"
            names[name] = kinds
    return found


def _rows(body: str) -> Iterator[tuple[str, frozenset[str]]]:
    for table in re.findall(r"(?:^\|.*\n?)+", body, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" |")] for line in table.splitlines())
        for row in rows:
            if head[1] == "is":
                kinds = frozenset(METRIC if word in UNITS else word for word in row[1].split(", "))
                assert kinds <= {TAG, METRIC}, row
                named = row[0]
            else:
                assert head[0] == "launcher", head
                kinds, named = frozenset((TAG,)), " ".join(row[1:])
            for name in re.findall(r"`([^`]+)`", named):
                yield from ((one, kinds) for one in _spelled_out(name))


def _spelled_out(name: str) -> list[str]:
    """``a.{b,c}`` is ``a.b`` and ``a.c``."""
    before, brace, rest = name.partition("{")
    if not brace:
        return [name]
    words, _, after = rest.partition("}")
    return [f"{before}{word}{after}" for word in words.split(",")]


def entry(names: Iterable[str], name: str) -> str | None:
    """Which of `names` stands for `name`: the one that leaves least open."""
    fitting = [one for one in names if re.fullmatch(_pattern(one), name, re.DOTALL)]
    return max(fitting, key=lambda one: (one == name, len(one)), default=None)


def _pattern(name: str) -> str:
    return "".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))


def undocumented(names: Names, tags: Iterable[str], metrics: Iterable[str]) -> list[str]:
    """What of these isn't in `names`, or isn't there as what it is."""
    wrong = []
    for kind, found in ((TAG, tags), (METRIC, metrics)):
        for name in found:
            one = entry(names, name)
            if one is None or kind not in names[one]:
                wrong.append(f"{name} ({kind})")
    return sorted(wrong)
