"""Chrome's trace events, read as a viewer does that relies on what the format's description says."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

Event = dict[str, Any]

# What metadata says of processes and threads.
TOLD = ("name", "sort_index")


def checked(data: bytes) -> list[Event]:
    """The events, when all that a viewer relies on is so."""

    def constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    events: list[Event] = json.loads(data, parse_constant=constant)["traceEvents"]
    told = [one for one in events if one["ph"] == "M"]
    assert {one["name"] for one in told} <= {f"{of}_{what}" for of in ("process", "thread") for what in TOLD}
    processes = [one["pid"] for one in told if one["name"] == "process_name"]
    lines_told = [(one["pid"], one["tid"]) for one in told if one["name"] == "thread_name"]
    named = {*lines_told}
    assert len(processes) == len({*processes})
    assert len(lines_told) == len({tid for _, tid in named})
    assert all(0 < tid < 1 << 31 for _, tid in named)
    assert {one["pid"] for one in events} == {*processes}
    # Zero is the idle thread of a kernel, and the process' own number its main thread.
    assert all(one["pid"] > 0 and one["tid"] > 0 for one in events)
    assert not any(pid == tid for pid, tid in named)
    lines: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[int, list[tuple[float, str]]] = defaultdict(list)
    slices = {(one["pid"], one["tid"], one["ts"]) for one in events if one["ph"] == "X"}
    for one in events:
        assert one["ph"] in ("M", "X", "i", "C", "s", "t", "f")
        assert one["ts"] >= 0
        assert type(one["pid"]) is type(one["tid"]) is int
        assert isinstance(one["name"], str)
        if one["ph"] == "X":
            begin = round(one["ts"] * 1000)
            lines[one["pid"], one["tid"]].append((begin, begin + round(one["dur"] * 1000)))
        if one["ph"] in ("X", "i"):
            assert (one["pid"], one["tid"]) in named
        if one["ph"] == "C":
            assert all(type(value) in (int, float) and math.isfinite(value) for value in one["args"].values())
        if one["ph"] in "stf":
            assert (one["pid"], one["tid"], one["ts"]) in slices
            assert one.get("bp") == ("e" if one["ph"] == "f" else None)
            flows[one["id"]].append((one["ts"], one["ph"]))
    for points in flows.values():
        # A viewer goes through them in order of time, and where that is the same, of the file.
        phases = "".join(phase for _, phase in sorted(points, key=lambda point: point[0]))
        assert phases == "s" + "t" * (len(points) - 2) + "f"
    for spans in lines.values():
        around: list[int] = []
        for begin, end in sorted(spans, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)
    return events


def arrows(events: list[Event]) -> dict[int, list[tuple[int, str]]]:
    found: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for one in events:
        if one["ph"] in "stf":
            found[one["id"]].append((one["pid"], one["ph"]))
    return dict(found)
