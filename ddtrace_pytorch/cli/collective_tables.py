"""Draws the part of a report that says what the ranks said to each other, and who waited for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from ddtrace_pytorch.cli.collectives import Group, Operation, Unseen
from ddtrace_pytorch.cli.single_calls import SingleCall
from ddtrace_pytorch.cli.slow_groups import SlowGroup
from ddtrace_pytorch.cli.stragglers import Lateness, Stragglers
from ddtrace_pytorch.cli.summary import Attempt
from ddtrace_pytorch.cli.tables import line, row, show, size, span, speed, table
from ddtrace_pytorch.cli.window_tables import COUNTED, PROFILED, late_in_words
from ddtrace_pytorch.collectives.surface import ALL_WAIT_FOR_ALL
from ddtrace_pytorch.stalls.telling import in_words

GROUPS_SHOWN = 6
OPERATIONS_SHOWN = 12
RANKS_SHOWN = 8

# Less waiting than this part of the attempt's time is nothing to tell of.
WORTH_TELLING = 0.01
# And this much of a group's waiting has to be because of one rank for a sentence that names it.
CLEARLY = 2 / 3
TOO_FEW = "Too few of them to tell whether any rank is late: this may be chance."

MEANING = "Calls are one rank's, bytes and total the mean of the ranks, mean, p50 and p99 of all calls; GB/s."
ISSUED = "* time to issue the call; when it was complete isn't known"


def render_collectives(attempt: Attempt, console: Console) -> None:
    """A table for each group, those that took longest first."""
    off = attempt.collectives_setting == "off"
    if not attempt.collectives and not off:
        return
    line(console, "")
    line(console, "Collectives", style="bold")
    if off:
        line(console, "They were not counted: DD_PYTORCH_COLLECTIVES was off.")
    if any(group.operations for group in attempt.collectives[:GROUPS_SHOWN]):
        line(console, MEANING)
    for group in attempt.collectives[:GROUPS_SHOWN]:
        line(console, "")
        _render_group(group, console)
    if len(attempt.collectives) > GROUPS_SHOWN:
        line(console, f"… {len(attempt.collectives) - GROUPS_SHOWN:,} more groups (--json lists all)")


def _render_group(group: Group, console: Console) -> None:
    line(console, title_of(group))
    for unseen in group.unseen:
        line(console, torchs_own(unseen, group.ranks_told))
    if not group.operations:
        return
    drawn = table("Operation", *FIGURES, right=FIGURES, yielding=("Operation",), gap=1)
    shown = group.operations[:OPERATIONS_SHOWN]
    for one in shown:
        row(drawn, *cells_of(one))
    show(console, drawn)
    if len(group.operations) > len(shown):
        line(console, f"… {len(group.operations) - len(shown)} more operations (--json lists all)")
    for said in said_of(shown):
        line(console, said)


def title_of(group: Group) -> str:
    """Who it is, and how much of what it did was seen."""
    where = {True: ", across nodes", False: ", on one node", None: ""}[group.cross_node]
    ranks = "" if group.size is None else f"{group.size:,} rank{'' if group.size == 1 else 's'}, "
    return f"{group.group}: {ranks}{group.backend}{where}; {_coverage(group)}"


FIGURES = ("Calls", "Bytes", "Total", "Mean", "p50", "p99", "Algbw", "Busbw")


def cells_of(one: Operation) -> list[str]:
    """Its name, and the :data:`FIGURES`."""
    return [
        one.operation + ("*" if _is_issue(one) else ""),
        f"{one.calls_most:,}" if one.calls_least == one.calls_most else f"{one.calls_least:,}-{one.calls_most:,}",
        size(one.bytes / one.ranks),
        *_times(one),
        speed(one.algbw_gbps),
        speed(one.busbw_gbps),
    ]


def said_of(shown: Sequence[Operation]) -> Iterator[str]:
    """What there is to say below a table of them."""
    if any(_is_issue(one) for one in shown):
        yield ISSUED
    for one in shown:
        if one.waits:
            yield f"waited for {one.operation}*: {span(one.wait_ms / one.ranks)}"
    for one in shown:
        if one.time_ms is not None and one.slowest_at:
            longest = span(one.time_ms.max)
            yield f"slowest {one.operation}: {longest} on rank {one.slowest_rank} at {one.slowest_at}"


def torchs_own(unseen: Unseen, ranks: int) -> str:
    """What DistributedDataParallel, functional or compiled code launched, for one rank."""
    calls = round(unseen.calls / ranks)
    if unseen.sized == unseen.calls:
        known = f", {size(unseen.bytes / ranks)}"
    elif unseen.sized:
        known = f", {size(unseen.bytes / ranks)} in the {round(unseen.sized / ranks):,} whose size is known"
    else:
        known = ""
    return f"not seen, torch's own: {calls:,} {unseen.recorded_as or 'of unknown kind'}{known} (how long isn't known)"


def _times(one: Operation) -> list[str]:
    times = one.time_ms
    if times is None:
        return [span(None)] * 4
    return [span(ms) for ms in (times.total / one.ranks, times.mean, times.p50, times.p99)]


def _is_issue(one: Operation | SingleCall) -> bool:
    return one.time_source in ("issue", "mixed")


def _coverage(group: Group) -> str:
    if group.launched is None:
        return "torch doesn't count what it launched"
    if group.coverage == 1:
        return f"all {group.launched:,} launched were seen" if group.launched != 1 else "the one launched was seen"
    return f"{group.seen:,} of {group.launched:,} launched were seen"


def render_single_calls(attempt: Attempt, console: Console) -> None:
    """A line for each of the slowest, over all groups."""
    shown = attempt.slowest_calls
    if not shown:
        return
    several = "" if len(shown) == attempt.single_calls else f"the {len(shown):,} slowest of "
    line(console, "")
    line(console, f"Calls told of one by one: {several}{attempt.single_calls:,}", style="bold")
    drawn = table(*CALL_COLUMNS, right=CALL_FIGURES, yielding=("Group", "At"))
    for one in shown:
        row(drawn, *cells_of_call(one))
    show(console, drawn)
    if any(_is_issue(one) for one in shown):
        line(console, ISSUED)


CALL_COLUMNS = ("Rank", "Operation", "Group", "Key", "Time", "Bytes", "At")
CALL_FIGURES = ("Rank", "Key", "Time", "Bytes")


def cells_of_call(one: SingleCall) -> list[str]:
    return [
        str(one.rank),
        one.operation + ("*" if _is_issue(one) else ""),
        one.group,
        "–" if one.key is None else str(one.key),
        span(one.time_ms),
        size(one.bytes),
        one.at or "?",
    ]


def render_stragglers(attempt: Attempt, console: Console) -> None:
    """Who waited for whom, where that cost something; who is to blame, if one is, comes last."""
    told = [one for one in attempt.stragglers if worth_telling(one, attempt)]
    for one in told[:GROUPS_SHOWN]:
        line(console, "")
        line(console, f"Who waited for whom in {one.calls:,} sampled calls of {one.group}", style="bold")
        figures = ("Rank", "Made the others wait", "Waited for the others", "Last in")
        drawn = table(*figures, right=figures)
        ranks = sorted(one.ranks, key=lambda rank: (-rank.made_others_wait_ms, rank.rank))
        for rank in ranks[:RANKS_SHOWN]:
            row(
                drawn,
                str(rank.rank),
                span(rank.made_others_wait_ms),
                span(rank.waited_for_others_ms),
                f"{rank.late_calls:,}",
            )
        show(console, drawn)
        if len(ranks) > RANKS_SHOWN:
            line(console, f"… {len(ranks) - RANKS_SHOWN:,} more ranks (--json lists all)")
        if _points_to_one(one) and not one.are_enough:
            line(console, TOO_FEW)
    for said in blame(attempt):
        line(console, said, style="red")


def blame(attempt: Attempt) -> Iterator[str]:
    """Who comes late to collectives, and which groups talk slowly; nothing where nobody clearly does."""
    for one in attempt.stragglers:
        if is_clear(one, attempt):
            yield _sentence(one)
    for windows, of in ((attempt.windows, PROFILED), (attempt.kernels, COUNTED)):
        if windows.late is not None:
            yield late_in_words(windows.late, of)
    for slow in attempt.slow_groups[:GROUPS_SHOWN]:
        yield slow_in_words(slow)


def hides_waiting(attempt: Attempt) -> bool:
    """Whether ranks wait for each other, about once a step or more, where nobody takes the time."""
    steps = max((one.steps for one in attempt.steps.ranks), default=0)
    if len(attempt.steps.ranks) < 2 or attempt.windows.late is not None or attempt.kernels.late is not None:
        return False
    calls = sum(
        sum(one.calls for one in group.unseen)
        + sum(one.calls for one in group.operations if one.time_source == "none" and one.operation in ALL_WAIT_FOR_ALL)
        for group in attempt.collectives
        if group.size != 1
    )
    return calls >= max(steps, 1) * len(attempt.steps.ranks) / 2


def is_clear(one: Stragglers, attempt: Attempt) -> bool:
    """Whether there is somebody who the waiting in a group is because of."""
    return _points_to_one(one) and one.are_enough and worth_telling(one, attempt)


def _points_to_one(one: Stragglers) -> bool:
    return one.late_share is not None and one.late_share >= CLEARLY


def _sentence(one: Stragglers) -> str:
    late = _late(one)
    return (
        f"rank {late.rank} is late: it made the others wait {span(late.typical_wait_ms)}, typically, "
        f"in {late.late_calls:,} of {one.calls:,} sampled calls of {one.group}"
    )


def _late(one: Stragglers) -> Lateness:
    return next(rank for rank in one.ranks if rank.rank == one.late_rank)


def slow_in_words(slow: SlowGroup) -> str:
    return (
        f"{in_words(slow.ranks)} talk slowly to each other: a call of their group {slow.group} takes "
        f"{span(slow.call_ms)}, one of the {slow.alike:,} groups like it {span(slow.usual_ms)}"
    )


def worth_telling(one: Stragglers, attempt: Attempt) -> bool:
    """Whether the waiting, were all calls like the sampled ones, took enough of the attempt's time."""
    calls = sum(
        operation.calls_most
        for group in attempt.collectives
        if group.name == one.name
        for operation in group.operations
        if operation.time_source == "completion" and operation.operation in ALL_WAIT_FOR_ALL
    )
    waited = sum(rank.made_others_wait_ms for rank in one.ranks) / 1e3 * max(1.0, calls / one.calls)
    return waited > 0 and waited >= WORTH_TELLING * (attempt.duration_s or 0.0)
