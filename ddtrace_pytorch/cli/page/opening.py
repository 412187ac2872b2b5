"""The top of an attempt: what happened, in words, and the few numbers that matter. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ddtrace_pytorch.cli import diagnosis
from ddtrace_pytorch.cli.collective_tables import blame
from ddtrace_pytorch.cli.diagnosis_tables import end_rows, rank_rows, stacks
from ddtrace_pytorch.cli.page.html import Html, join, tag
from ddtrace_pytorch.cli.page.parts import card, facts, fold, more, say, section, table
from ddtrace_pytorch.cli.step_tables import BOUNDS, SHARES, shares, slow_in_words, untimed_in_words
from ddtrace_pytorch.cli.steps import AllSteps, Steps
from ddtrace_pytorch.cli.summary import Attempt, Report, gpus_by_name
from ddtrace_pytorch.cli.tables import duration, known, span
from ddtrace_pytorch.identity.introduction import GENERATED
from ddtrace_pytorch.runlog.reader import TRAINER

SENTENCES = 3
HOSTS_SHOWN = 8
ROWS = 40
END_ROWS = 60


def status(found: diagnosis.Attempt) -> tuple[str, str]:
    """How it ended, as a kind and in words."""
    if found.ended_well:
        return ("open", "no failure recorded") if found.status_unknown else ("good", "ended well")
    return ("bad", "failed") if found.reason_found else ("open", "no end recorded")


def heading(report: Report, attempt: Attempt, found: diagnosis.Attempt) -> Html:
    """One line that says which job, how it ended and why."""
    kind, words = status(found)
    said = join(found.what_happened)
    if found.flight_recorder is not None:
        said = join(said, f" {found.flight_recorder.message}.")
    return join(
        tag("header", tag("h1", f"Job {report.job.id}"), tag("span", words, class_=f"chip {kind}")),
        say(_who(report, attempt), "soft"),
        tag("p", said, class_=f"verdict {kind}"),
        *(tag("p", sentence, class_="slow") for sentence in _slow(attempt)),
    )


def _slow(attempt: Attempt) -> Iterator[str]:
    """Who makes the others wait, in a sentence each."""
    for one in attempt.steps.slow[:1]:
        yield slow_in_words(one)
    yield from islice(blame(attempt), SENTENCES)


def _who(report: Report, attempt: Attempt) -> str:
    of = f"attempt {attempt.number} of {report.job.attempts}"
    if attempt.source != TRAINER:
        of = f"{attempt.source}, beside the training"
    ranks = f"{attempt.ranks_seen:,} of {known(attempt.world_size)} rank{'' if attempt.world_size == 1 else 's'}"
    hosts = f"{len(attempt.hosts):,} host{'' if len(attempt.hosts) == 1 else 's'}"
    return " · ".join((of, ranks, hosts, f"began {attempt.started or '?'}", f"{duration(attempt.duration_s)} long"))


def numbers(attempt: Attempt, found: diagnosis.Attempt) -> Html:
    """Cards."""
    steps = attempt.steps.all
    bad = sum(rank.ended_badly for rank in found.ranks)
    unended = sum(rank.end_reason is None for rank in attempt.ranks)
    lost = sum(attempt.dropped.values())
    stalls = len(attempt.stalls)
    cards = [] if steps is None else [
        card(f"{steps.per_second:.3g}", "steps a second"),
        card(span(steps.p50_ms), "step, median"),
        card(span(steps.p95_ms), "step, p95"),
        card(span(steps.max_ms), "step, longest"),
    ]  # fmt: skip
    cards += [
        card(f"{bad:,} of {len(found.ranks):,}", "ranks ended badly", "bad" if bad else "")
        if bad or not unended
        else card(f"{unended:,} of {len(found.ranks):,}", "ranks without an end", "bad"),
        card(f"{stalls:,}", "stall" if stalls == 1 else "stalls", "bad" if stalls else ""),
        card(f"{lost:,}", "record dropped" if lost == 1 else "records dropped", "bad" if lost else ""),
    ]
    if steps is not None:
        cards.append(tag("div", "Where the time of the steps went", *_shares(steps, attempt.steps), class_="card wide"))
    return tag("div", *cards, class_="cards")


def _shares(together: AllSteps, steps: Steps) -> Iterator[Html]:
    """A bar, and what its colours are."""
    at, pieces, names = 0.0, [], []
    for (part, name), said in zip(SHARES.items(), shares(together, steps.untimed, BOUNDS), strict=True):
        share = getattr(together, f"share_{part}")
        pieces.append(tag("rect", x=at * 100, y=0, width=share * 100, height=10, class_=part))
        names.append(tag("span", tag("i", "■ ", class_=part), f"{name} {said}"))
        at += share
    yield tag("svg", *pieces, viewBox="0 0 100 10", preserveAspectRatio="none", class_="bar", aria_hidden="true")
    yield tag("div", *names, class_="legend")
    if steps.untimed is not None:
        yield say(untimed_in_words(steps.untimed, len(steps.ranks)))


def ends(found: diagnosis.Attempt) -> Html | None:
    """How ranks ended, and what happened last."""
    columns, rows = rank_rows(found.ranks)
    shown = rows[:ROWS]
    drawn = table(columns, [cells for cells, _ in shown], ("Step",), [bad for _, bad in shown])
    last = end_rows(found, END_ROWS) if not found.ended_well else []
    frames = [join(tag("h3", title), tag("pre", "\n".join(lines))) for title, lines in stacks(found)]
    return section(
        "How the ranks ended",
        drawn,
        more(len(shown), len(rows), "ways to end"),
        fold("Where in the code", *frames, open_=True),
        fold("The last 30 seconds", table(("At", "Ranks", "What"), last)),
    )


def identity(report: Report, attempt: Attempt) -> Html | None:
    """Who it was."""
    job = report.job
    source = "made up by its ranks" if job.source == GENERATED else job.source and f"from {job.source}"
    hosts = attempt.hosts[:HOSTS_SHOWN]
    rest = len(attempt.hosts) - len(hosts)
    told = facts((
        ("Job id", ", ".join(part for part in (source, job.launcher and f"launched by {job.launcher}") if part)),
        ("Incarnation", attempt.incarnation),
        ("Launcher's attempt", "" if attempt.attempt is None else str(attempt.attempt)),
        ("Hosts", ", ".join(hosts) + (f" and {rest:,} more" if rest > 0 else "")),
        ("Versions", ", ".join(f"{name} {version}" for name, version in attempt.versions.items())),
        ("GPUs", gpus_by_name(attempt)),
    ))  # fmt: skip
    starts = [
        (str(one.number), one.started or "?", duration(one.duration_s), f"{one.ranks_seen:,}",
         ("" if one.source == TRAINER else f"{one.source}: ")
         + ", ".join(f"{many:,} {end}" for end, many in one.ends.items()))
        for one in report.starts
    ]  # fmt: skip
    several = table(("No.", "Started", "Duration", "Ranks", "Ended"), starts, ("No.", "Duration", "Ranks"))
    return section(
        "Which job",
        told,
        fold(f"All {len(starts):,} attempts", several) if len(starts) > 1 else None,
    )
