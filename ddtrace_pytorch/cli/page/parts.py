"""What the sections of the page are made of. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddtrace_pytorch.cli.page.html import Child, Html, escaped, join, tag

# Characters; such a cell gets room for a few words on each line.
LONG = 30


def section(title: str, *children: Child) -> Html | None:
    """None where there is nothing in it."""
    return tag("section", tag("h2", title), *children) if any(children) else None


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), bad: Sequence[bool] = ()
) -> Html | None:
    """Cells are text. It scrolls by itself where it is too wide; None where there are no rows. Rows that are `bad` are
    marked."""
    sides = ["right" if name in right else None for name in columns]
    body = [
        tag(
            "tr",
            *(
                tag("td", cell, class_=side or ("long" if len(cell) > LONG else None))
                for cell, side in zip(cells, sides, strict=True)
            ),
            class_="bad" if at < len(bad) and bad[at] else None,
        )
        for at, cells in enumerate(rows)
    ]
    if not body:
        return None
    head = tag("tr", *(tag("th", name, class_=side) for name, side in zip(columns, sides, strict=True)))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll", tabindex="0")


def fold(title: str, *children: Child, open_: bool = False) -> Html | None:
    """Shown when one asks for it."""
    return tag("details", tag("summary", title), *children, open=open_) if any(children) else None


def say(text: str, kind: str = "soft small") -> Html:
    """A paragraph."""
    return tag("p", text, class_=kind)


def more(shown: int, there: int, what: str) -> Html | None:
    return say(f"… {there - shown:,} more {what} (report --json lists all)") if there > shown else None


def facts(told: Iterable[tuple[str, str]]) -> Html:
    """Names and values; what is empty is left out."""
    return tag("dl", *(join(tag("dt", name), tag("dd", value)) for name, value in told if value))


def card(value: str, what: str, kind: str = "") -> Html:
    return tag("div", tag("b", value, class_=kind or None), escaped(what), class_="card")


NO_SCRIPT = tag("noscript", say("The page's script draws this picture, and scripts are off here."))
