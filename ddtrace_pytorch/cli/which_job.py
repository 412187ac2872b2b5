"""Whether the job that a command tells of is the one that is meant: how long ago it was, and who else is here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime

from ddtrace_pytorch.runlog.fields import mapping, text
from ddtrace_pytorch.runlog.reader import Scan
from ddtrace_pytorch.runlog.writer import log_directory
from ddtrace_pytorch.stalls.last_words import Identity
from ddtrace_pytorch.stalls.recovery import Fate, Found
from ddtrace_pytorch.stalls.telling import in_words

SECOND = 10**9
# Of a job that was over for as long, somebody who names none may have meant another.
OLD_SECONDS = 600


def when(last_seen: str | None, ended: bool, now: int, newest_in: str | None = None) -> str:
    """What a heading says behind the job's name: that it `ended`, or was last heard of, at `last_seen` (ISO 8601).
    `newest_in`: the directory that it was taken from for being the newest there."""
    if last_seen is None:
        return ""
    moment = datetime.fromisoformat(last_seen).timestamp()
    old = now / SECOND - moment > OLD_SECONDS
    newest = f" (the newest that has a log in {newest_in})" if newest_in and old else ""
    return f", {'which ended' if ended else 'last heard of'} {past(moment, now)}{newest}"


def past(moment: float, now: int) -> str:
    """``3 h ago, at 2026-11-28 12:26:48``: of seconds, and of ns, since the epoch."""
    seconds = now / SECOND - moment
    # A clock that is ahead makes a riddle of "ago".
    long = f"{ago(seconds)} ago, " if seconds >= 0 else ""
    return f"{long}at {datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"


def ago(seconds: float) -> str:
    """As much as people want to know of it: ``40 s``, ``3 h``."""
    for unit, size, below in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < below:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def own_logs(whose: Identity) -> str | None:
    """The directory of the job's run logs, as far as it is still where the rank had its own; None if it has none."""
    log = log_directory(whose.log_root, whose.job, whose.incarnation)
    return os.path.dirname(log) if whose.log_root and os.path.isdir(log) else None


def suspected(there: Iterable[Found], logs: Scan, told: str, last_seen: str | None, now: int) -> str | None:
    """Why another job than `told`, the newest that has one of the `logs`, or an attempt of that without a log may be
    meant: ranks of it are `there` that live or were heard of later."""
    last = datetime.fromisoformat(last_seen).timestamp() * SECOND if last_seen else now
    # As the ranks say it: which start those are of that couldn't agree on one is found out only from their logs.
    mine = [log for log in logs.logs if log.job == told]
    known = {text(mapping(log.identity, "job"), "incarnation") or log.incarnation for log in mine}
    others: dict[str, list[Found]] = {}
    for one in there:
        job, incarnation = one.words.identity.job, one.words.identity.incarnation
        if (job != told or incarnation not in known) and (one.fate is Fate.ALIVE or one.words.state.as_of > last):
            name = f"job {job}" if job != told else f"attempt {incarnation} of it"
            others.setdefault(name, []).append(one)
    if not others:
        return None
    name, ranks = max(others.items(), key=lambda other: max(map(_place, other[1])))
    more = len(others) - 1
    and_more = f"; {more} more {'are' if more > 1 else 'is'} newer, too" if more else ""
    here = {log.job for log in logs.logs if not log.damaged} - {told}
    return f"Is {name} meant? {_signs(ranks, now)}; {_where(ranks, here)}{and_more}"


def _place(one: Found) -> tuple[bool, int]:
    return one.fate is Fate.ALIVE, one.words.state.as_of


def _signs(ranks: Sequence[Found], now: int) -> str:
    alive, newest = max(map(_place, ranks))
    these = sorted({one.words.identity.rank for one in ranks if (one.fate is Fate.ALIVE) == alive})
    several = in_words(these).capitalize()
    if alive:
        return f"{several} of it live{'' if len(these) > 1 else 's'} on this host"
    hosts = {one.words.identity.host for one in ranks if one.fate is Fate.ELSEWHERE}
    where = f"on {', '.join(sorted(hosts))}" if hosts else "on this host"
    were = "were" if len(these) > 1 else "was"
    return f"{several} of it {were} last heard of {where} {ago(max(now - newest, 0) / SECOND)} ago"


def _where(ranks: Sequence[Found], here: Collection[str]) -> str:
    job = ranks[0].words.identity.job
    if job in here:
        return f"--job {shlex.quote(job)} tells of it"
    own = next(filter(None, (own_logs(one.words.identity) for one in ranks)), None)
    if own is not None:
        return f"its run log is in {own}"
    return "no run log of it was found (DD_PYTORCH_EXPORT=both has one beside the Agent)"
