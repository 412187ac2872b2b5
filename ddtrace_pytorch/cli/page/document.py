"""The page as a whole: what a :class:`~ddtrace_pytorch.cli.summary.Report` and its diagnosis say, and the pictures.

Nothing in it can be fetched or run but its own style sheet and script, which the policy in its head names by their
hashes; what comes from logs is text (:mod:`~ddtrace_pytorch.cli.page.html`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

from ddtrace_pytorch import __version__
from ddtrace_pytorch.cli import diagnosis
from ddtrace_pytorch.cli.page import gaps, heat, opening, pace, said, talk, traffic
from ddtrace_pytorch.cli.page.gathering import View
from ddtrace_pytorch.cli.page.html import Html, data, join, own, tag
from ddtrace_pytorch.cli.summary import Attempt, Report


class Seen(NamedTuple):
    """An attempt, what became of it, and what its pictures are drawn from."""

    attempt: Attempt
    found: diagnosis.Attempt
    view: View


def page(report: Report, attempts: Sequence[Seen], notes: Sequence[str]) -> str:
    """The attempts are in order of time: the last comes first."""
    pictures: dict[str, Any] = {}
    newest_first = [_attempt(report, one, notes, pictures) for one in reversed(attempts)]
    css, script = own(_asset("page.css")), own(_asset("page.js"))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(css)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{_title(attempts)} – job {report.job.id}"),
        tag("style", css),
    )
    body = tag(
        "body",
        tag("main", *newest_first, tag("footer", f"ddtrace-pytorch {__version__} · {report.directory}")),
        tag("script", data(pictures), type="application/json", id="pictures"),
        tag("script", script),
    )
    return join(own("<!doctype html>\n"), tag("html", head, body, lang="en"), own("\n"))


def _title(attempts: Sequence[Seen]) -> str:
    return opening.status(attempts[-1].found)[1] if attempts else "report"


def _attempt(report: Report, one: Seen, notes: Sequence[str], pictures: dict[str, Any]) -> Html:
    attempt, view = one.attempt, one.view
    warm, talking = heat.draw(view.rows), traffic.draw(view.traffic)
    heat_name, matrix_name = f"heat-{attempt.number}", f"matrix-{attempt.number}"
    if warm is not None:
        pictures[heat_name] = pace.heat_data(attempt, warm)
    if talking is not None and talking.anything:
        pictures[matrix_name] = talk.matrix_data(talking)
    return join(
        opening.heading(report, attempt, one.found),
        opening.numbers(attempt, one.found),
        opening.ends(one.found) if not one.found.ended_well else None,
        pace.heat(heat_name, warm, attempt.steps.slow or attempt.steps.hiccups),
        pace.slow(attempt),
        talk.collectives(attempt),
        talk.matrix(matrix_name, talking, attempt),
        said.scalars(attempt.recorded, view.series),
        *said.others(attempt.recorded),
        gaps.stalls(attempt),
        gaps.left_out(attempt, notes),
        pace.ranks(attempt),
        opening.identity(report, attempt),
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
