"""The parts of a diagnosis as cells of text, for whoever shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtrace_pytorch.cli.diagnosis import Attempt, Rank, alike
from ddtrace_pytorch.stalls.history import frames_of
from ddtrace_pytorch.stalls.telling import ranges

FRAMES_OF = 3
HOSTS_SHOWN = 2


def rank_rows(ranks: list[Rank]) -> tuple[list[str], list[tuple[list[str], bool]]]:
    """The columns that there is something in, and a row for ranks that ended alike in the same place, which may be
    bad."""
    groups = ended_alike(ranks)
    columns = ("Ranks", "Host", "Ended", "Last beat", "Was in", "Step", "At")
    kept = [name for name in columns if name not in ("Step", "At") or any(_cell(name, several) for several in groups)]
    return kept, [
        ([_cell(name, several) for name in kept], any(one.ended_badly for one in several)) for several in groups
    ]


def ended_alike(ranks: list[Rank]) -> list[list[Rank]]:
    """Ranks that ended alike in the same place, together."""
    groups: dict[tuple[object, ...], list[Rank]] = {}
    for one in ranks:
        key = (one.named, alike(one.ended), one.was_in, one.step, one.where, one.where_step, one.where_at is None)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _cell(column: str, several: list[Rank]) -> str:
    one = several[0]
    hosts = sorted({rank.host for rank in several if rank.host})
    return {
        "Ranks": _ranges([rank.rank for rank in several]),
        "Host": ", ".join(hosts) if len(hosts) <= HOSTS_SHOWN else f"{len(hosts)} hosts",
        "Ended": alike(one.ended),
        "Last beat": max((rank.last_beat[11:19] for rank in several if rank.last_beat), default="?"),
        "Was in": one.was_in,
        "Step": "" if one.step is None else str(one.step),
        "At": _sight(one),
    }[column]


def _sight(one: Rank) -> str:
    """Where its code was; with the step and the time, if it went on after that."""
    if one.where is None or one.where_at is None:
        return one.where or ""
    step = "" if one.where_step is None else f"step {one.where_step}, "
    return f"{one.where} ({step}{one.where_at[11:19]})"


def _ranges(numbers: list[int]) -> str:
    return ranges(numbers).replace(",", ", ")


def end_rows(attempt: Attempt, many: int) -> list[tuple[str, str, str]]:
    """What happened last, the `many` most important in order of time: when, to whom, what."""
    named = {rank.rank for rank in attempt.ranks if rank.named}

    def importance(at: int) -> tuple[bool, bool, int]:
        one = attempt.timeline[at]
        return not named & {*one.ranks}, one.what == "last beat", -at

    kept = sorted(sorted(range(len(attempt.timeline)), key=importance)[:many])
    return [
        (one.at[11:23] if one.at else "?", f"rank{'' if len(one.ranks) == 1 else 's'} {_ranges(one.ranks)}", one.what)
        for one in map(attempt.timeline.__getitem__, kept)
    ]


def stacks(attempt: Attempt) -> Iterator[tuple[str, Sequence[str]]]:
    """Where the exception came from, and where those were that everybody waited for."""
    first = attempt.first_failure
    if first is not None and first.frames:
        yield f"Where rank {first.ranks[0]} raised, innermost first", first.frames
    raised = first.ranks if first is not None and first.frames else []
    culprits = attempt.verdict.culprits if attempt.verdict is not None else []
    culprits = [one for one in culprits if one.get("rank") not in raised]
    for one in [culprit for culprit in culprits if frames_of(culprit)][:FRAMES_OF]:
        yield f"Where rank {one.get('rank')} was, innermost first", frames_of(one)
