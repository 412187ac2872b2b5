"""Chrome's trace event format: JSON that ui.perfetto.dev, chrome://tracing and many others open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtrace_pytorch.runlog.schema import json_text
from ddtrace_pytorch.timeline.arrows import Part, Point
from ddtrace_pytorch.timeline.marks import MAX_NAME
from ddtrace_pytorch.timeline.sink import Line, Out

# The longest that is written of one record's fields.
MAX_FACTS = 100_000

# Times are clamped into this, in which a float of microseconds is right to the nanosecond for the first 100 days.
LONGEST = 10 * 366 * 86_400 * 10**9

BATCH = 1 << 16


class Chrome:
    """Events are in no order of time, which the format doesn't ask for."""

    between = b",\n"

    def begin(self, zero: int) -> bytes:
        return f'{{"displayTimeUnit":"ns","otherData":{{"zero_ns":"{zero}"}},"traceEvents":[\n'.encode()

    def end(self, about: Mapping[str, Any]) -> bytes:
        return f'\n],"metadata":{json_text(about)}}}\n'.encode()

    def sink(self, file: Out, zero: int) -> ChromeSink:
        return ChromeSink(file, zero)


class ChromeSink:
    """Writes as it goes. What is of a process as a whole is of the thread with its number, which is no line."""

    def __init__(self, file: Out, zero: int) -> None:
        self._file = file
        self._zero = zero
        self._held: list[str] = []
        self._size = 0
        self._between = ""

    def process(self, process: int, name: str) -> None:
        self._told(process, process, "process_name", f'"name":{_name(name)}')
        self._told(process, process, "process_sort_index", f'"sort_index":{process}')

    def line(self, line: Line, name: str) -> None:
        self._told(line.process, line.id, "thread_name", f'"name":{_name(name)}')
        self._told(line.process, line.id, "thread_sort_index", f'"sort_index":{line.id}')

    def slice(self, line: Line, name: str, start: int, end: int, facts: Mapping[str, Any], point: Point | None) -> None:
        begin = self._since(start)
        took = _us(self._since(end) - begin)
        at = f'"ts":{_us(begin)},"pid":{line.process},"tid":{line.id}'
        self._event(f'{{"ph":"X",{at},"dur":{took},"cat":"span","name":{_name(name)},"args":{_facts(facts)}}}')
        if point is not None:
            binds = ',"bp":"e"' if point.part is Part.END else ""
            self._event(
                f'{{"ph":"{point.part.value}",{at},"cat":"collective","name":"collective","id":{point.id}{binds}}}'
            )

    def moment(self, line: Line, name: str, ts: int, facts: Mapping[str, Any], wide: bool) -> None:
        at = f'"ts":{_us(self._since(ts))},"pid":{line.process},"tid":{line.id}'
        scope = "p" if wide else "t"
        self._event(f'{{"ph":"i",{at},"s":"{scope}","cat":"moment","name":{_name(name)},"args":{_facts(facts)}}}')

    def count(self, process: int, name: str, ts: int, values: Mapping[str, float]) -> None:
        at = f'"ts":{_us(self._since(ts))},"pid":{process},"tid":{process}'
        self._event(f'{{"ph":"C",{at},"name":{_name(name)},"args":{json_text(values)}}}')

    def close(self) -> None:
        self._flush()

    def _told(self, process: int, thread: int, what: str, args: str) -> None:
        self._event(f'{{"ph":"M","ts":0,"pid":{process},"tid":{thread},"name":"{what}","args":{{{args}}}}}')

    def _event(self, event: str) -> None:
        self._put(self._between + event)
        self._between = ",\n"

    def _put(self, text: str) -> None:
        self._held.append(text)
        self._size += len(text)
        if self._size >= BATCH:
            self._flush()

    def _flush(self) -> None:
        self._file.write("".join(self._held).encode())
        self._held.clear()
        self._size = 0

    def _since(self, ns: int) -> int:
        return min(max(ns - self._zero, 0), LONGEST)


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _name(name: str) -> str:
    return json_text(name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…")


def _facts(facts: Mapping[str, Any]) -> str:
    text = json_text(facts)
    if len(text) <= MAX_FACTS:
        return text
    return json_text({"cut off": text[: MAX_FACTS // 2], "characters": len(text)})
