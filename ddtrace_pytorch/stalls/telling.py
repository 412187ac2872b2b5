"""A verdict in words, and as facts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddtrace_pytorch.spans import Fact
from ddtrace_pytorch.stalls.doing import own_frame, short
from ddtrace_pytorch.stalls.mismatch import Detail
from ddtrace_pytorch.stalls.roll import Call, Life
from ddtrace_pytorch.stalls.verdict import Culprit, Kind, Verdict, Where
from ddtrace_pytorch.stalls.watch import Pending

STALL = "pytorch.stall"

# Of many culprits so many are described one by one in words, and so many have their frames in a span; the run log has
# room for more.
DESCRIBED = 3
WITH_FRAMES = 8
RECORDED = 256

# What is said of many ranks is cut off after so many ranges.
RANGES = 8

_DOING = {
    "data": "data loading",
    "compile": "compiling",
    "checkpoint": "at a checkpoint",
    "optimizer": "in the optimizer",
    "collective": "in a collective",
}

_WRONG = {Detail.SKIPPED: "skipped a call: ", Detail.EXTRA: "made a call too many: "}


def ranges(ranks: Iterable[int], limit: int = RANGES) -> str:
    """``0-2,5,8-9``, with the number of further ranks after `limit` ranges."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    shown = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found[:limit])
    more = sum(last - first + 1 for first, last in found[limit:])
    return f"{shown} and {more} more" if more else shown


def message(verdict: Verdict) -> str:
    """One line a person can act on: what waits, for whom, where that rank is, and who else waits."""
    alike: dict[tuple[Any, ...], list[Culprit]] = {}
    for one in verdict.culprits:
        alike.setdefault(_likeness(one), []).append(one)
    clauses = [_clause(verdict, several) for several in alike.values()]
    waiting = (
        [f"{in_words(verdict.waiting)} {'waits' if len(verdict.waiting) == 1 else 'wait'}"] if verdict.waiting else []
    )
    return f"{_call(verdict.where)} has waited {_seconds(verdict.waited)}: {'; '.join([*clauses, *waiting])}"


def ended(own: Pending, said: Where, how: str | None, took: int) -> str:
    """What was said to be waited for is over, in the same words: `own`, in which this rank waited for somebody who
    waited there, came to its end in that way (None: nobody knows) after `took` ns."""
    number = f" #{own.key}" if own.key else ""
    same = (own.group, own.operation) == (said.group, said.operation)
    how = how or ("is no longer waited for" if same else "ended")
    end = f"{own.operation}{number} of group `{own.label}` {how} after {took / 1e9:.0f} s"
    return end if same else f"{_call(said)} is no longer waited for: {end}"


def _likeness(culprit: Culprit) -> tuple[Any, ...]:
    own = culprit.call if culprit.kind is Kind.MISMATCH else None
    return culprit.kind, culprit.detail, culprit.where, own and _made(own, culprit.detail), culprit.error, culprit.life


def _clause(verdict: Verdict, alike: list[Culprit]) -> str:
    """What is wrong with culprits of one kind, and where they are."""
    one, many = alike[0], len(alike) > 1
    here = "it" if one.where == verdict.where else _call(one.where)
    what = f"{_who(alike)} {_fault(verdict, one, many, here)}"
    if one.kind is Kind.UNREACHABLE and verdict.store_host is not None and one.host == verdict.store_host:
        what += ", which holds the job's store"
    if one.kind in (Kind.STUCK, Kind.UNREACHABLE):
        return what
    places = [place for culprit in alike[:DESCRIBED] if (place := _place(verdict, culprit, many))]
    return "; ".join([what, *places])


def _who(alike: list[Culprit]) -> str:
    one = alike[0]
    if len(alike) > 1:
        return in_words(culprit.rank for culprit in alike)
    facts = [one.host, (one.state.gpu if one.state is not None else None) or ""]
    known = ", ".join(fact for fact in facts if fact)
    return f"rank {one.rank} ({known})" if known else f"rank {one.rank}"


def _fault(verdict: Verdict, one: Culprit, many: bool, here: str) -> str:
    has, is_ = ("have", "are") if many else ("has", "is")
    if one.kind is Kind.ABSENT:
        return f"{has} not entered {here}"
    if one.kind is Kind.FROZEN:
        return f"{is_} frozen: alive, but without a beat, stopped or held by the interpreter's lock"
    if one.kind is Kind.UNREACHABLE:
        hosts = _hosts(verdict, one)
        return (
            f"{is_} unreachable: nothing answers on {hosts}" if hosts else f"{is_} unreachable: nothing answers there"
        )
    if one.kind is Kind.STUCK:
        return f"{has} entered {here}, as all have, and it does not end: the network, or a GPU"
    if one.kind is Kind.GONE:
        return _gone(one, has, here)
    return _mismatch(verdict, one, f"{has} made" if one.detail is Detail.SIZE else f"{is_} in", is_, here)


def _hosts(verdict: Verdict, one: Culprit) -> str:
    """The hosts of the culprits of the same kind, as far as known."""
    return ", ".join(sorted({other.host for other in verdict.culprits if other.kind is one.kind and other.host}))


def _gone(one: Culprit, has: str, here: str) -> str:
    if one.error is not None:
        return f"{has} left {here} by {one.error}"
    why = f" ({one.state.end_reason})" if one.state is not None and one.state.end_reason else ""
    return f"{has} {'ended' if one.life is Life.ENDED else 'died'}{why}"


def _mismatch(verdict: Verdict, one: Culprit, is_in: str, is_: str, here: str) -> str:
    if one.detail is Detail.ORDER:
        return (
            f"{is_} waited for in {here}, and in turn wait{'s' if is_ == 'is' else ''} elsewhere for those who wait: "
            "calls in another order, or one left out"
        )
    if one.call is None and one.detail is Detail.SKIPPED:
        return f"{'has' if is_ == 'is' else 'have'} left {here} out, and {is_} in a later step than who waits for it"
    if one.call is None:
        return f"{is_} alone in {here}: the others ended without it"
    what = _WRONG.get(one.detail, "") if one.detail is not None else ""
    mine = f"{what}{is_in} {_made(one.call, one.detail)}"
    if verdict.usual is None:
        return mine
    return f"{mine}, the others {'' if one.detail is Detail.SIZE else 'in '}{_made(verdict.usual, one.detail)}"


def _made(call: Call, detail: Detail | None) -> str:
    """A call with what matters of it."""
    known = [f"#{call.key}"] if call.key else []
    if detail is Detail.SIZE:
        return " ".join([call.operation, *known, f"of {call.bytes:,} bytes"])
    if call.shape is not None and detail is not Detail.ROOT:
        known.append(f"of shape {list(call.shape)}")
    if call.dtype is not None and detail is not Detail.ROOT:
        known.append(call.dtype)
    if detail is Detail.ROOT:
        known.append(f"with root {call.peer}")
    return " ".join([call.operation, *known])


def _place(verdict: Verdict, culprit: Culprit, named: bool) -> str:
    """Where the rank is, or was last seen; empty if nothing is known."""
    state = culprit.state
    if state is None:
        return ""
    frame = own_frame(state.frames)
    in_ = "in " if frame is None else ""
    step = state.step if state.frames_at is None else state.frames_step
    facts = [short(frame) if frame is not None else "", f"{in_}step {step}" if step is not None else ""]
    facts.append(_DOING.get(state.doing, ""))
    gone = state.life is not Life.ALIVE
    beat = f"last beat {_seconds(verdict.at - state.as_of)} ago" if state.as_of and verdict.at >= state.as_of else ""
    known = ", ".join(fact for fact in [*facts, beat] if fact)
    who = f"rank {culprit.rank}" if named else "it"
    at = "at " if frame is not None else ""
    return f"{who} {'was last' if gone else 'is'} {at}{known}" if any(facts) else (f"{who}: {beat}" if beat else "")


def _call(where: Where) -> str:
    if where.between_two:
        rank, peer = where.ranks
        return f"{where.operation} between ranks {rank} and {peer} of group `{where.label}`"
    number = f" #{where.key}" if where.key else ""
    return f"{where.operation}{number} of group `{where.label}`"


def in_words(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    several = list(ranks)
    return f"rank{'s' if len(several) != 1 else ''} {ranges(several).replace(',', ', ')}"


def _seconds(ns: int) -> str:
    seconds = ns / 1e9
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def facts(verdict: Verdict) -> dict[str, Fact]:
    """The tags and metrics of a `pytorch.stall` span."""
    where, first = verdict.where, verdict.culprits[0]
    told: dict[str, Fact] = {
        "stall.kind": verdict.kind.value,
        "stall.ranks": ranges(verdict.ranks),
        "stall.group": where.label,
        "stall.group_name": where.group,
        "stall.op": where.operation,
        "stall.moves": "true" if verdict.moves else "false",
        "stall.message": message(verdict),
        "stall.waited_s": verdict.waited / 1e9,
        "stall.culprits": len(verdict.culprits),
        "stall.waiting": len(verdict.waiting),
    }
    if where.key:
        told["stall.key"] = where.key
    frame = own_frame(first.state.frames) if first.state is not None else None
    known = {
        "stall.detail": verdict.detail.value if verdict.detail is not None else None,
        "stall.waiting_ranks": ranges(verdict.waiting),
        "stall.hosts": ",".join(sorted({one.host for one in verdict.culprits if one.host})),
        "stall.store_host": verdict.store_host,
        "stall.doing": first.doing,
        "stall.at": short(frame) if frame is not None else None,
        "stall.error": first.error,
    }
    told |= {name: value for name, value in known.items() if value}
    if first.state is not None and first.state.step is not None:
        told["stall.step"] = first.state.step
    for one in verdict.culprits[:WITH_FRAMES]:
        if one.state is not None and one.state.frames:
            told[f"stall.frames.{one.rank}"] = "\n".join(one.state.frames)
    return told


def record(verdict: Verdict) -> dict[str, Any]:
    """The run log's `verdict` record: plain JSON, with what each culprit said of itself."""
    return {
        "type": "verdict",
        "ts": verdict.at,
        "kind": verdict.kind.value,
        "detail": verdict.detail.value if verdict.detail is not None else None,
        "ranks": list(verdict.ranks),
        "doing": verdict.culprits[0].doing,
        "moves": verdict.moves,
        "group": verdict.where.label,
        "op": verdict.where.operation,
        "key": verdict.where.key,
        "message": message(verdict),
        "tags": {name: value for name, value in facts(verdict).items() if not name.startswith("stall.frames.")},
        "waiting": list(verdict.waiting),
        "usual": _plain_call(verdict.usual),
        "culprits": [_plain_culprit(one) for one in verdict.culprits[:RECORDED]],
    }


def _plain_culprit(one: Culprit) -> dict[str, Any]:
    state = one.state
    plain: dict[str, Any] = {
        "rank": one.rank,
        "kind": one.kind.value,
        "detail": one.detail.value if one.detail is not None else None,
        "moves": one.moves,
        "host": one.host or None,
        "error": one.error,
        "call": _plain_call(one.call),
        "group": one.where.group,
        "op": one.where.operation,
        "key": one.where.key,
    }
    if state is not None:
        plain |= {
            "gpu": state.gpu,
            "life": state.life.value,
            "as_of": state.as_of,
            "doing": state.doing,
            "step": state.step,
            "end_reason": state.end_reason,
            "frames": list(state.frames),
            "frames_at": state.frames_at,
            "frames_step": state.frames_step,
        }
    return {name: value for name, value in plain.items() if value is not None}


def _plain_call(call: Call | None) -> dict[str, Any] | None:
    if call is None:
        return None
    shape = list(call.shape) if call.shape is not None else None
    return {"op": call.operation, "key": call.key, "shape": shape, "dtype": call.dtype, "peer": call.peer}
