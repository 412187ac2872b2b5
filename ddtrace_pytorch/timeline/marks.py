"""What each record of a run log looks like in a timeline. Pure.

Every record becomes at least one mark, also one that this version doesn't know, or whose times can't be: then it is a
moment. Its fields are the mark's, but for those that are drawn: where and how long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ddtrace_pytorch.runlog.fields import integer, mapping, number, text
from ddtrace_pytorch.timeline.selection import COLLECTIVE

RANK = "rank"
STEPS = "steps"
WAITS = "waiting for data"
COLLECTIVES = "collectives"
SINGLE = "collectives told of one by one"
CHECKPOINTS = "checkpoints"
WINDOWS = "profiler windows"
KERNELS = "steps whose kernels were counted"
STALLS = "stalls"
EVENTS = "events"
NUMBERS = "numbers that are none"
TOTALS = "totals"
LOG = "run log"

# From top to bottom; spans of user code are below the waiting for data, and what is not named here at the end.
ORDER = (
    RANK, STEPS, WAITS, "", COLLECTIVES, SINGLE, CHECKPOINTS, WINDOWS, KERNELS, STALLS, EVENTS, NUMBERS, TOTALS, LOG,
)  # fmt: skip

_OF_SPAN = {
    "pytorch.rank": RANK,
    "pytorch.checkpoint": CHECKPOINTS,
    "pytorch.stall": STALLS,
    COLLECTIVE: SINGLE,
}

# Later than any time in ns that is recorded; times on another clock still fit into 64 bits.
LATEST = 1 << 62

MEMORY = "device.memory."
MAX_NAME = 200


class Slice(NamedTuple):
    """A stretch of time. `thread`: of user code, the lines of whose spans are packed by `owner`."""

    track: str
    name: str
    start: int
    end: int
    facts: Mapping[str, Any]
    thread: bool = False


class Moment(NamedTuple):
    """`wide`: it concerns all tracks of the rank."""

    track: str
    name: str
    ts: int
    facts: Mapping[str, Any]
    wide: bool = False


class Count(NamedTuple):
    """Numbers, all finite, of one time."""

    name: str
    ts: int
    values: Mapping[str, float]


Mark = Slice | Moment | Count


def span_times(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """Start and end of what a record says took time; None if it says none that can be."""
    start, took = integer(record, "start"), integer(record, "duration")
    if start is None or took is None or start < 0 or took < 0 or start + took >= LATEST:
        return None
    return start, start + took


def thread_of(record: Mapping[str, Any]) -> str:
    return text(record, "thread") or "unknown thread"


def marks(record: Mapping[str, Any]) -> list[Mark]:
    """What to draw of `record`, the chief thing first."""
    kind, ts = record["type"], record["ts"]
    draw = _DRAW.get(kind)
    facts = {name: value for name, value in record.items() if name not in _DRAWN}
    drawn = draw(record, ts, facts) if draw is not None else []
    return drawn or [Moment(LOG, _name(record) if draw is None else kind, ts, facts)]


_DRAWN = frozenset(("type", "ts", "start", "duration", "name"))


def _name(record: Mapping[str, Any]) -> str:
    name = text(record, "name")
    return f"{record['type']} {name}" if name else str(record["type"])


def _span(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    times = span_times(record)
    name = text(record, "name")
    track = _OF_SPAN.get(name) or name or LOG
    shown = text(record, "resource") or name or "span"
    if record.get("error"):
        shown += " (error)"
    return [Slice(track, shown, *times, facts) if times else Moment(track, shown, ts, facts)]


def _user_span(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    times, name = span_times(record), text(record, "name") or "span"
    if "error" in record:
        name += " (error)"
    thread = thread_of(record)
    return [Slice(thread, name, *times, facts, thread=True) if times else Moment(EVENTS, name, ts, facts)]


def _step(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    times, metrics = span_times(record), mapping(record, "metrics")
    step = integer(record, "step")
    name = "step" if step is None else f"step {step}"
    drawn: list[Mark] = [Slice(STEPS, name, *times, facts) if times else Moment(STEPS, name, ts, facts)]
    waited = number(metrics, "data_ns")
    if times and waited and waited > 0:
        end = min(times[0] + int(waited), times[1])
        drawn.append(Slice(WAITS, "waiting for data", times[0], end, {"step": step, "all of the step's": waited}))
    memory = {
        name.removeprefix(MEMORY): size
        for name in metrics
        if name.startswith(MEMORY) and (size := number(metrics, name)) is not None and math.isfinite(size)
    }
    if memory:
        drawn.append(Count("device memory (bytes)", ts, memory))
    return drawn


def _call(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    times, key = span_times(record), integer(record, "key")
    name = (text(record, "op") or "collective") + ("" if key is None else f" #{key}")
    return [Slice(COLLECTIVES, name, *times, facts) if times else Moment(COLLECTIVES, name, ts, facts)]


def _event(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    name = text(record, "name") or "event"
    ours = "seq" not in record
    return [Moment(STALLS if ours and name.startswith("stall") else EVENTS, name, ts, facts)]


def _scalar(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    drawn: list[Mark] = []
    for name in (metrics := mapping(record, "metrics")):
        value = number(metrics, name)
        if value is not None and math.isfinite(value):
            drawn.append(Count(name, ts, {"value": value}))
        else:
            drawn.append(Moment(NUMBERS, f"{name}: {_words(metrics[name])}", ts, facts))
    return drawn or [Moment(EVENTS, "scalar", ts, facts)]


def _words(value: object) -> str:
    return str(value) if isinstance(value, float) else type(value).__name__


def _beat(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    calls = number(record, "calls")
    counted = {"collectives so far": calls} if calls is not None else {"steps so far": number(record, "steps")}
    ((name, value),) = counted.items()
    if value is None or not math.isfinite(value):
        return [Moment(LOG, "beat", ts, facts)]
    return [Count(name, ts, {"value": value})]


def _summary(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    return [Moment(TOTALS, text(record, "resource") or text(record, "name") or "totals", ts, dict(facts))]


def _verdict(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    return [Moment(STALLS, text(record, "message") or "verdict", ts, facts, wide=True)]


def _state(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    return [Moment(STALLS, f"state: {text(record, 'why')}", ts, facts)]


def _profile(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    times, state = span_times(record), text(record, "state")
    step, steps = integer(record, "step"), integer(record, "steps") or 1
    name = "window" if step is None else f"steps {step} to {step + steps - 1}" if steps > 1 else f"step {step}"
    if state and state != "complete":
        name += f" ({state})"
    if times and times[0] < times[1]:
        return [Slice(WINDOWS, name, *times, {key: value for key, value in facts.items() if key != "longest"})]
    return [Moment(WINDOWS, name, ts, facts)]


def _kernels(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    times, step, steps = span_times(record), integer(record, "step"), integer(record, "steps") or 1
    name = f"steps {step} to {(step or 0) + steps - 1}" if steps > 1 else f"step {step}"
    if not times:
        return [Moment(KERNELS, name, ts, facts)]
    drawn: list[Mark] = [Slice(KERNELS, name, *times, {key: facts[key] for key in facts if key != "longest"})]
    longest = record.get("longest")
    for kernel in longest if isinstance(longest, list) else ():
        if isinstance(kernel, dict) and (ran := span_times(kernel)):
            stream = integer(kernel, "stream")
            drawn.append(Slice(f"GPU stream {stream}", text(kernel, "name"), *ran, {"step": step}))
    return drawn


def _drop(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    return [Moment(LOG, f"{integer(record, 'count') or 0} not recorded: {text(record, 'reason')}", ts, facts)]


def _identity(record: Mapping[str, Any], ts: int, facts: Mapping[str, Any]) -> list[Mark]:
    return [Moment(LOG, "identity", ts, facts)]


_DRAW = {
    "identity": _identity,
    "span": _span,
    "user_span": _user_span,
    "step": _step,
    "call": _call,
    "event": _event,
    "scalar": _scalar,
    "beat": _beat,
    "summary": _summary,
    "verdict": _verdict,
    "state": _state,
    "profile": _profile,
    "kernels": _kernels,
    "drop": _drop,
}
