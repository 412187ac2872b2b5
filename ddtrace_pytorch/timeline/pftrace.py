"""Perfetto's own format, written with the `perfetto` package: smaller than JSON, and exact to the nanosecond."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtrace_pytorch.runlog.schema import json_text
from ddtrace_pytorch.timeline.arrows import Point
from ddtrace_pytorch.timeline.chrome import BATCH, LONGEST, MAX_FACTS
from ddtrace_pytorch.timeline.marks import MAX_NAME
from ddtrace_pytorch.timeline.sink import Line, Out

INSTALL = "pip install 'ddtrace-pytorch[timeline]'"

# Names and keys are forgotten after so many different ones: a log may have any number of them.
MOST_NAMES = 10_000


class NotInstalled(Exception):
    """The `perfetto` package is not there, or doesn't fit; the message says what to do."""


def vocabulary() -> Any:
    """The module of the format's messages.

    Raises:
        NotInstalled: it can't be imported.
    """
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as words
    except Exception as error:  # protobuf has exceptions of its own for versions that don't match
        raise NotInstalled(f"this format takes the perfetto package ({error}); {INSTALL}") from None
    return words


class Perfetto:
    """A file is one message, whose packets may come in as many parts as one likes.

    Raises:
        NotInstalled: the package that knows the format can't be imported.
    """

    between = b""

    def __init__(self) -> None:
        self._words = vocabulary()

    def begin(self, zero: int) -> bytes:
        return b""

    def end(self, about: Mapping[str, Any]) -> bytes:
        return b""

    def sink(self, file: Out, zero: int) -> PerfettoSink:
        return PerfettoSink(file, zero, self._words)


class PerfettoSink:
    """Writes as it goes. All packets of a process are of one writer: a name is written once and then referred to."""

    def __init__(self, file: Out, zero: int, words: Any) -> None:
        self._words = words
        self._writer = 0
        self._file = file
        self._zero = zero
        self._held = bytearray()
        self._counters: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._keys: dict[str, int] = {}

    def process(self, process: int, name: str) -> None:
        self._writer = process
        packet = self._words.TracePacket()
        track = packet.track_descriptor
        track.uuid = self._uuid(process)
        track.process.pid = process
        track.process.process_name = _short(name)
        self._put(packet)

    def line(self, line: Line, name: str) -> None:
        packet = self._words.TracePacket()
        track = packet.track_descriptor
        track.uuid, track.parent_uuid = line.id, self._uuid(line.process)
        # Threads are shown in the order of their numbers, other tracks of a process in that of their names.
        track.thread.pid, track.thread.tid = line.process, line.id
        track.thread.thread_name = _short(name)
        self._put(packet)

    def slice(self, line: Line, name: str, start: int, end: int, facts: Mapping[str, Any], point: Point | None) -> None:
        packet, event = self._event(line.id, start, self._words.TrackEvent.TYPE_SLICE_BEGIN)
        self._describe(packet, event, name, facts)
        if point is not None:
            event.flow_ids.append(point.id)
        self._put(packet)
        packet, _ = self._event(line.id, end, self._words.TrackEvent.TYPE_SLICE_END)
        self._put(packet)

    def moment(self, line: Line, name: str, ts: int, facts: Mapping[str, Any], wide: bool) -> None:
        packet, event = self._event(line.id, ts, self._words.TrackEvent.TYPE_INSTANT)
        self._describe(packet, event, name, facts)
        self._put(packet)

    def count(self, process: int, name: str, ts: int, values: Mapping[str, float]) -> None:
        for part, value in values.items():
            packet, event = self._event(
                self._counter(process, name if part == "value" else f"{name}: {part}"),
                ts,
                self._words.TrackEvent.TYPE_COUNTER,
            )
            event.double_counter_value = value
            self._put(packet)

    def close(self) -> None:
        self._flush()

    def _uuid(self, process: int) -> int:
        return (1 << 62) + process

    def _counter(self, process: int, name: str) -> int:
        known = self._counters.get(name)
        if known is None:
            known = self._counters[name] = (1 << 63) + (process << 32) + len(self._counters)
            packet = self._words.TracePacket()
            track = packet.track_descriptor
            track.uuid, track.parent_uuid = known, self._uuid(process)
            track.name = _short(name)
            track.counter.SetInParent()
            self._put(packet)
        return known

    def _event(self, track: int, ts: int, kind: int) -> tuple[Any, Any]:
        packet = self._words.TracePacket()
        packet.timestamp = min(max(ts - self._zero, 0), LONGEST)
        packet.trusted_packet_sequence_id = self._writer
        event = packet.track_event
        event.type = kind
        event.track_uuid = track
        return packet, event

    def _describe(self, packet: Any, event: Any, name: str, facts: Mapping[str, Any]) -> None:
        if not self._names or len(self._names) + len(self._keys) > MOST_NAMES:
            packet.sequence_flags |= self._words.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            self._names.clear()
            self._keys.clear()
        packet.sequence_flags |= self._words.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event.name_iid = _interned(self._names, _short(name), packet.interned_data.event_names)
        for key, value in facts.items():
            if value is None:
                continue
            note = event.debug_annotations.add()
            note.name_iid = _interned(self._keys, _short(key), packet.interned_data.debug_annotation_names)
            if isinstance(value, str):
                note.string_value = _text(value)
            elif isinstance(value, bool):
                note.bool_value = value
            elif isinstance(value, int) and -1 << 63 <= value < 1 << 63:
                note.int_value = value
            elif isinstance(value, float):
                note.double_value = value
            else:
                text = json_text(value)
                if len(text) <= MAX_FACTS:
                    note.legacy_json_value = text
                else:
                    note.string_value = text[: MAX_FACTS // 2]

    def _put(self, packet: Any) -> None:
        trace = self._words.Trace()
        trace.packet.append(packet)
        self._held += trace.SerializeToString()
        if len(self._held) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        self._file.write(bytes(self._held))
        self._held.clear()


def _interned(known: dict[str, int], name: str, new: Any) -> int:
    number = known.get(name)
    if number is None:
        number = known[name] = len(known) + 1
        entry = new.add()
        entry.iid, entry.name = number, name
    return number


def _text(text: str) -> str:
    """What a protobuf takes: no halves of pairs."""
    if len(text) > MAX_FACTS:
        text = text[: MAX_FACTS // 2]
    return text.encode("utf-8", "backslashreplace").decode()


def _short(name: str) -> str:
    return _text(name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…")
