"""What a job died of: run logs in, a :class:`Diagnosis` of plain data out.

The field names of the classes below are the keys of ``diagnose --json`` (adding is free, renaming needs a release
note). Times are local, ISO 8601; what isn't known is null.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ddtrace_pytorch.cli.choice import jobs_in, meant_attempts
from ddtrace_pytorch.cli.starts import in_order
from ddtrace_pytorch.cli.summary import compact
from ddtrace_pytorch.collectives import dump_files
from ddtrace_pytorch.collectives.flight_recorder import Entry
from ddtrace_pytorch.runlog.fields import integer, text
from ddtrace_pytorch.runlog.reader import RankLog, Scan, read
from ddtrace_pytorch.stalls import agreement
from ddtrace_pytorch.stalls.doing import own_frame, short
from ddtrace_pytorch.stalls.history import TYPES, Ending, History, frames_of
from ddtrace_pytorch.stalls.inquest import NEAR, Cause, Failure, Finding, inquire, moments
from ddtrace_pytorch.stalls.last_words import LastWords
from ddtrace_pytorch.stalls.mates import as_found
from ddtrace_pytorch.stalls.roll import RankState

SECOND = 10**9
TIMELINE = 30 * SECOND
# Ways of ending that are told of in words.
ENDS_TOLD = 4
HOSTS_TOLD = 3
WORDS_LIMIT = 300
STALLS_TOLD = 3

EXIT = "exit"
STATUS_UNKNOWN = "With which status an exit was isn't known here: the launcher knows."

# Who was at the other end is another one on every rank.
_ADDRESS = re.compile(r"\[[^\]\s]*\]:\d+|\b\d+(?:\.\d+){3}(?::\d+)?")

LeftBehind = Callable[[str, str], Iterable[tuple[LastWords, bool]]]
"""Of a job and an incarnation: what its ranks left on this host, and whether each lives."""


@dataclass
class FirstFailure:
    """`cause`: a word, see :class:`~ddtrace_pytorch.stalls.inquest.Cause`. Of an exception: the `frames` that it came
    out of, innermost first, and in `where` the line of the user's code."""

    at: str | None
    ranks: list[int]
    cause: str
    what: str
    where: str | None
    frames: list[str]


@dataclass
class Reason:
    """The verdict. `found`: ``live``, by a rank while it happened, or ``afterwards``. `culprits` are as in the run
    log."""

    found: str
    at: str | None
    kind: str
    ranks: list[int]
    waiting: list[int]
    message: str
    culprits: list[dict[str, Any]]


@dataclass
class Rank:
    """How one rank ended. `was_in`: the collectives that it was last seen in; `where`: the line of the user's code. If
    that was seen before the rest, it was at `where_at`, in the step `where_step`; otherwise both are null."""

    rank: int
    host: str
    gpu: str | None
    ended: str
    ended_badly: bool
    named: bool
    last_beat: str | None
    was_in: str
    step: int | None
    where: str | None
    where_step: int | None
    where_at: str | None


@dataclass
class Row:
    """What happened to some `ranks` at about the same time."""

    at: str | None
    ranks: list[int]
    what: str


@dataclass
class Stall:
    """One that went on after so many `seconds`: for which `ranks`, and what was said of it while it lasted."""

    at: str | None
    seconds: float
    ranks: list[int]
    message: str


@dataclass
class Recorder:
    """What torch's own dumps say. `agrees`: null if there is no verdict to agree with."""

    agrees: bool | None
    ranks: list[int]
    message: str


@dataclass
class Attempt:
    """`last_seen`: when one of its ranks was last heard of; `ended`: none may still run. `reason_found` is true too
    where all `ended_well`: that says no more than that no failure was recorded where `status_unknown`. `ranks` has
    those named first."""

    number: int
    incarnation: str
    last_seen: str | None
    ended: bool
    world_size: int | None
    ranks_found: str
    ranks_missing: str
    ended_well: bool
    status_unknown: bool
    reason_found: bool
    what_happened: str
    first_failure: FirstFailure | None
    verdict: Reason | None
    flight_recorder: Recorder | None
    ranks: list[Rank]
    timeline: list[Row]
    stalls: list[Stall]


@dataclass
class Diagnosis:
    """`last_seen`: when the job was last heard of, and `ended`, whether it was over then; null and false where its last
    attempt is not among the `attempts`. `suspected`: why another job may be meant, null if nothing says so."""

    directory: str
    job: str
    last_seen: str | None
    ended: bool
    suspected: str | None
    attempts: list[Attempt]
    notes: list[str]


def diagnose(found: Scan, job: str | None, attempt: str, left_behind: LeftBehind) -> Diagnosis:
    """Of one job in `found`: `job`, or the newest; `attempt` as in
    :func:`~ddtrace_pytorch.cli.choice.meant_attempts`.

    Raises:
        Refused: there is nothing to read, or no such job or attempt.
    """
    here = jobs_in(found)
    chosen = here.meant(job)
    order = in_order(here.logs_of(chosen))
    incarnations = [start.incarnation for start in order.all]
    notes = list(found.notes)
    dumps = dumps_in(found, notes)
    attempts = []
    for at in meant_attempts(attempt, incarnations, chosen, len(order.beside)):
        incarnation, logs = order.all[at]
        histories = _read(logs), left_behind(chosen, incarnation)
        attempts.append(of_attempt(at + 1, incarnation, logs, *histories, dumps, notes))
    notes += [note for log in found.logs if log.job == chosen or log.damaged for note in log.notes]
    last = next((one for one in attempts if one.number == len(order.training or order.beside)), None)
    return Diagnosis(
        directory=os.path.abspath(found.directory),
        job=chosen,
        last_seen=None if last is None else last.last_seen,
        ended=last is not None and last.ended,
        suspected=None,
        attempts=attempts,
        notes=notes,
    )


def of_attempt(
    number: int,
    incarnation: str,
    logs: Iterable[RankLog],
    histories: Iterable[History],
    left: Iterable[tuple[LastWords, bool]],
    dumps: Mapping[int, Sequence[Entry]],
    notes: list[str],
) -> Attempt:
    """What became of one attempt, out of the `histories` that its `logs` tell, one of each, what ranks `left` behind,
    and flight recorders' `dumps`. Adds to `notes` what was not used."""
    by_rank = _by_rank(histories, left, notes)
    return _attempt(number, incarnation, by_rank, inquire(by_rank), min(log.began for log in logs), dumps)


def _read(logs: Iterable[RankLog]) -> Iterator[History]:
    for log in logs:
        history = History(log.rank, log.identity)
        for record in read(log, TYPES):
            history.add(record)
        yield history


def _by_rank(
    histories: Iterable[History], left: Iterable[tuple[LastWords, bool]], notes: list[str]
) -> dict[int, History]:
    found: dict[int, History] = {}
    for history in histories:
        other = found.get(history.rank)
        if other is not None:
            history = max(other, history, key=lambda one: one.last)
            notes.append(f"of the logs of rank {history.rank}, the one that goes on longest is used: {history.host}'s")
        found[history.rank] = history
    for words, alive in left:
        whose = words.identity
        one = found.setdefault(whose.rank, History(whose.rank, {"host": whose.host, "world_size": whose.world_size}))
        if one.host == whose.host:
            ending = Ending(words.end_reason, words.state.as_of) if words.ended else None
            one.look(as_found(words, alive), ending)
    return found


def dumps_in(scan: Scan, notes: list[str]) -> dict[int, list[Entry]]:
    """What the flight recorder dumped that lies beside the run logs, by rank. Adds to `notes` what can't be read."""
    found: dict[int, list[Entry]] = {}
    for path in scan.beside:
        try:
            entries = dump_files.read(path)
        except ValueError as error:
            notes.append(f"{os.path.basename(path)} could not be read as a flight recorder's dump: {error}")
            continue
        rank = dump_files.rank_of(path)
        # A process has a recorder for NCCL and one for all others, and may have dumped both.
        found.setdefault(rank, []).extend(entries)
    return found


def _attempt(
    number: int,
    incarnation: str,
    histories: Mapping[int, History],
    finding: Finding,
    began: int,
    dumps: Mapping[int, Sequence[Entry]],
) -> Attempt:
    size = max((integer(one.identity, "world_size") or 0 for one in histories.values()), default=0)
    verdict = finding.verdict
    # Of other attempts there may be dumps in the same place.
    these = {
        rank: entries
        for rank, entries in dumps.items()
        if entries and began - NEAR <= max(one.created for one in entries) <= finding.end + NEAR
    }
    compared = agreement.compare(these, verdict)
    return Attempt(
        number=number,
        incarnation=incarnation,
        last_seen=_iso(finding.end),
        ended=not any(fate.open for fate in finding.fates.values()),
        world_size=size or None,
        ranks_found=compact(histories),
        ranks_missing=compact(finding.missing),
        ended_well=finding.well,
        status_unknown=_exited(finding),
        reason_found=finding.well or finding.first is not None or verdict is not None,
        what_happened=_what_happened(finding),
        first_failure=_first_failure(finding.first),
        verdict=_reason(finding),
        flight_recorder=None if compared is None else Recorder(compared.agrees, list(compared.ranks), compared.message),
        ranks=_ranks(histories, finding),
        timeline=_timeline(histories, finding),
        stalls=[Stall(_iso(one.at), one.seconds, list(one.ranks), one.message) for one in finding.overcome],
    )


def _first_failure(first: Failure | None) -> FirstFailure | None:
    if first is None:
        return None
    return FirstFailure(
        _iso(first.at), list(first.ranks), first.cause.value, first.what, _line(first.frames), list(first.frames)
    )


def _line(frames: Sequence[str]) -> str | None:
    """The innermost that is the user's, in short."""
    frame = own_frame(frames)
    return short(frame) if frame is not None else None


def _reason(finding: Finding) -> Reason | None:
    verdict = finding.verdict
    if verdict is None:
        return None
    return Reason(
        found="afterwards" if finding.rebuilt else "live",
        at=_iso(verdict["ts"]),
        kind=text(verdict, "kind"),
        ranks=verdict["ranks"],
        waiting=verdict["waiting"],
        message=text(verdict, "message"),
        culprits=verdict["culprits"],
    )


def _what_happened(finding: Finding) -> str:
    """A paragraph."""
    first, verdict = finding.first, finding.verdict
    told = []
    if finding.well and _exited(finding):
        told.append(f"No failure was recorded ({_ends(finding, ())}). {STATUS_UNKNOWN}")
    elif finding.well:
        told.append(f"All ranks ended well ({_ends(finding, ())}).")
    elif first is None and verdict is None:
        opened = [rank for rank, fate in finding.fates.items() if fate.open]
        told.append(
            f"Nothing that failed was found. The logs of {who(opened)} have no end and stop together, at "
            f"{clock(finding.end)}: the job still runs, or all of it was killed at once."
        )
    if first is not None:
        all_of_them = set(first.ranks) == finding.fates.keys() and len(first.ranks) > 1
        subject = f"all ranks ({compact(first.ranks)})" if all_of_them else who(first.ranks)
        raised_at = _line(first.frames)
        what = first.what + (f", at {raised_at}" if raised_at is not None else "")
        # Of who is killed, the last beat is known.
        when = f"{'soon after' if first.cause is Cause.KILLED else 'at'} {clock(first.at)}"
        told.append(f"The first failure, {when}: {subject}{_place(finding, first.ranks)}: {what}.")
        if verdict is None and (first.cause is Cause.SIGNAL or (all_of_them and first.cause is Cause.KILLED)):
            told.append("That came from outside: the launcher, the scheduler, the host or a person.")
    if verdict is not None:
        told.append(f"{text(verdict, 'message').rstrip('.')}.")
    if finding.interrupted is not None and not finding.broken:
        told.append(f"That lasted until it was ended from outside, at {clock(finding.interrupted)}.")
    if finding.broken:
        told.append(f"gloo ended {who(finding.broken)}, because a peer sent something else.")
    for one in finding.overcome[:STALLS_TOLD]:
        said = one.message.rstrip(".")
        told.append(f"A stall that went on, at {clock(one.at)} and for {one.seconds:.0f} s: {said}.")
    more = len(finding.overcome) - STALLS_TOLD
    if more > 0:
        told.append(f"{more} more stalls went on.")
    others = _ends(finding, first.ranks if first is not None else ())
    if others and not finding.well:
        told.append(f"{'The others: ' if first is not None else 'How ranks ended: '}{others}.")
    if finding.missing:
        many = "is" if len(finding.missing) == 1 else "are"
        told.append(f"There {many} no log{'' if len(finding.missing) == 1 else 's'} of {who(finding.missing)}.")
    return " ".join(told)


def _exited(finding: Finding) -> bool:
    """Whether a rank ended with its script: Python's exit functions aren't told the status of `sys.exit`."""
    return any(fate.ended == EXIT for fate in finding.fates.values())


def _place(finding: Finding, ranks: Sequence[int]) -> str:
    """The hosts of `ranks`, and the GPU of a single one, as far as known and few."""
    states = [finding.states[rank] for rank in ranks if rank in finding.states]
    hosts = sorted({state.host for state in states} - {""})
    at = f" on {', '.join(hosts)}" if 0 < len(hosts) <= HOSTS_TOLD else ""
    return at + (f" ({states[0].gpu})" if len(states) == 1 and states[0].gpu else "")


def _ends(finding: Finding, but: Sequence[int]) -> str:
    ways: dict[str, list[int]] = {}
    for rank, fate in finding.fates.items():
        if rank not in but:
            ways.setdefault(alike(fate.ended), []).append(rank)
    most = sorted(ways.items(), key=lambda one: (-len(one[1]), one[1]))
    told = [f"{who(ranks)} {way}" for way, ranks in most[:ENDS_TOLD]]
    return "; ".join(told) + (f"; {len(most) - ENDS_TOLD} more ways" if len(most) > ENDS_TOLD else "")


def _named(finding: Finding) -> set[int]:
    """The ranks that are the reason."""
    verdict, first = finding.verdict or {}, finding.first
    return {*verdict.get("ranks", ()), *(first.ranks if first is not None else ())}


def _ranks(histories: Mapping[int, History], finding: Finding) -> list[Rank]:
    verdict, named = finding.verdict or {}, _named(finding)
    culprits = {one["rank"]: one for one in verdict.get("culprits", ())}
    found = []
    for rank, fate in finding.fates.items():
        state, said = finding.states[rank], culprits.get(rank, {})
        if not fate.bad and not fate.open:
            # It was there a while before.
            state = replace(state, groups={}, frames=(), step=None)
        frames, step, at = _sight(state, said)
        is_older = bool(frames) and (at != state.as_of or state.frames_at is not None)
        found.append(
            Rank(
                rank=rank,
                host=histories[rank].host or state.host,
                gpu=state.gpu,
                ended=fate.ended,
                ended_badly=fate.bad,
                named=rank in named,
                last_beat=_iso(state.as_of or None),
                was_in=_was_in(state),
                step=state.step,
                where=_line(frames),
                where_step=step if is_older else None,
                where_at=_iso(at) if is_older else None,
            )
        )
    return sorted(found, key=lambda one: (not one.named, not one.ended_badly, one.rank))


def _sight(state: RankState, said: Mapping[str, Any]) -> tuple[Sequence[str], int | None, int]:
    """The newest frames of its code that its own state has or a verdict `said`, in which step, and when."""
    seen, step = (state.as_of, state.step) if state.frames_at is None else (state.frames_at, state.frames_step)
    told, at, number = frames_of(said), integer(said, "frames_at"), integer(said, "frames_step")
    if at is None:
        at, number = integer(said, "as_of") or 0, integer(said, "step")
    if told and (not state.frames or seen < at):
        return told, number, at
    return state.frames, step, seen


def _was_in(state: RankState) -> str:
    calls = [
        f"{here.current.operation}{f' #{here.current.key}' if here.current.key else ''} of {here.label}"
        for here in state.groups.values()
        if here.current is not None
    ]
    return ", ".join(calls)


def _timeline(histories: Mapping[int, History], finding: Finding) -> list[Row]:
    """From 30 s before the end on, or from the first failure; what is alike and near is one row."""
    since = finding.end - TIMELINE
    if finding.first is not None:
        since = min(since, finding.first.at - NEAR)
    named = _named(finding)
    open_rows: dict[tuple[bool, str], tuple[int, Row]] = {}
    rows: list[tuple[int, Row]] = []
    for rank, moment in moments(histories, finding):
        if moment.at < since:
            continue
        what = alike(moment.what)
        key = rank in named, what
        began, row = open_rows.get(key, (0, None))
        if row is None or moment.at > began + NEAR:
            row = Row(_iso(moment.at), [], what)
            open_rows[key] = moment.at, row
            rows.append(open_rows[key])
        if rank not in row.ranks:
            row.ranks.append(rank)
    for _, row in rows:
        row.ranks.sort()
    return [row for _, row in rows]


def alike(words: str) -> str:
    """`words` as they would be on any rank."""
    told = _ADDRESS.sub("…", words)
    return told if len(told) <= WORDS_LIMIT else told[: WORDS_LIMIT - 1] + "…"


def who(ranks: Iterable[int]) -> str:
    several = list(ranks)
    return f"rank{'' if len(several) == 1 else 's'} {compact(several)}"


def clock(ns: int) -> str:
    moment = _local(ns)
    return moment.strftime("%H:%M:%S.%f")[:-3] if moment is not None else "?"


def _local(ns: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(ns / SECOND).astimezone()
    except (OverflowError, ValueError, OSError):
        return None


def _iso(ns: int | None) -> str | None:
    moment = _local(ns) if ns is not None else None
    return moment.isoformat(timespec="milliseconds") if moment is not None else None
