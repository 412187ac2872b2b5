"""Numbers on a GPU, read without waiting for it.

A copy into pinned memory and one event behind it are put onto the stream that the user computes on; the number is read
once the event has come to pass. Nothing of the user's is held for that, neither the tensor nor its graph.

An event may not be asked about while any thread captures a CUDA graph: so that is done by those threads alone that
record scalars or step, and not while they capture.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ddtrace_pytorch.records.scalars import without_dispatch

if TYPE_CHECKING:
    from ddtrace_pytorch.records.recorder import Recorder

# Numbers on their way at one time.
SLOTS = 1_024
SLOT_BYTES = 8
# How many calls' numbers one look reads at most: whoever looks is training.
READ_AT_ONCE = 8
POLL_SECONDS = 0.001

CAPTURING = "scalars during graph capture"
NO_ROOM = "scalars still on the GPU"
NOT_READ = "scalars not read at the end"


class Device(Protocol):
    """What there is of CUDA in this."""

    def capturing(self) -> bool:
        """Whether this thread captures a CUDA graph."""

    def copy(self, tensor: Any, slot: int) -> Any:
        """Have the one element of `tensor` copied into that slot; gives the stream that does it in its order."""

    def mark(self, stream: Any) -> Any:
        """An event behind what was put onto `stream` so far."""

    def passed(self, event: Any) -> bool:
        """Whether it has come to pass; afterwards it may be used for another."""

    def read(self, slot: int) -> Any:
        """The number that was copied there."""


class Cuda:
    """CUDA, through torch."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # Of a kind that may be written to in and out of inference mode.
        with torch.inference_mode(False):
            self._memory = torch.empty(SLOTS * SLOT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        # By the kind of number: each slot, seen as one of these. To make them one by one takes longer than a copy.
        self._slots: dict[Any, tuple[Any, ...]] = {}
        self._in_use: dict[int, Any] = {}
        self._events: dict[Any, deque[Any]] = {}

    def capturing(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())

    def copy(self, tensor: Any, slot: int) -> Any:
        kind = tensor.dtype
        slots = self._slots.get(kind)
        if slots is None:
            slots = self._slots[kind] = self._seen_as(kind)
        view = self._in_use[slot] = slots[slot]
        with without_dispatch(self._torch):
            source = tensor.detach() if tensor.requires_grad else tensor
            view.copy_(source.reshape(()) if source.dim() else source, non_blocking=True)
            # Where it was made on another stream, and is freed at once, its memory must not be given away there before
            # it is copied here. On the stream that it was made on this does nothing.
            stream = self._torch.cuda.current_stream(source.device)
            source.record_stream(stream)
            return stream

    def mark(self, stream: Any) -> Any:
        free = self._events.setdefault(stream.device, deque())
        event = free.pop() if free else self._torch.cuda.Event()
        event.record(stream)
        return event, free

    def passed(self, event: Any) -> bool:
        asked, free = event
        if not asked.query():
            return False
        free.append(asked)
        return True

    def read(self, slot: int) -> Any:
        with without_dispatch(self._torch):
            return self._in_use[slot].item()

    def _seen_as(self, kind: Any) -> tuple[Any, ...]:
        with self._torch.inference_mode(False), self._torch.no_grad():
            seen = self._memory.view(kind)
            slots: tuple[Any, ...] = seen[:: SLOT_BYTES // seen.element_size()].unbind()
            return slots


class _OnTheirWay(NamedTuple):
    events: list[Any]
    slots: list[tuple[str, int]]
    row: tuple[Any, ...]
    numbers: dict[str, Any]


class OnGpu:
    """The numbers of one process that are still to come."""

    def __init__(self, device: Callable[[], Device]) -> None:
        """`device` is called when the first of them comes."""
        self._make = device
        self._device: Device | None = None
        self._free: deque[int] = deque(range(SLOTS))
        self._coming: deque[_OnTheirWay] = deque()
        self._looking = threading.Lock()
        self._lost = {reason: count() for reason in (CAPTURING, NO_ROOM, NOT_READ)}
        self._told = dict.fromkeys(self._lost, 0)
        self._readings = dict.fromkeys(self._lost, 0)

    def put(
        self, recorder: Recorder, row: tuple[Any, ...], numbers: dict[str, Any], tensors: list[tuple[str, Any]]
    ) -> None:
        """Have `row` recorded once all `tensors` are among its `numbers`; without those that can't be read."""
        device = self._device
        if device is None:
            device = self._device = self._make()
        if device.capturing():
            self._lose(CAPTURING, len(tensors))
            if numbers:
                recorder.add(row)
            return
        self.look(recorder)
        slots: list[tuple[str, int]] = []
        streams = {}
        for name, tensor in tensors:
            try:
                slot = self._free.popleft()
            except IndexError:
                self._lose(NO_ROOM, 1)
                continue
            try:
                stream = device.copy(tensor, slot)
            except BaseException:
                self._free.append(slot)
                raise
            slots.append((name, slot))
            streams[tensor.device] = stream
        if not slots:
            if numbers:
                recorder.add(row)
            return
        marks = [device.mark(stream) for stream in streams.values()]
        self._coming.append(_OnTheirWay(marks, slots, row, numbers))

    def look(self, recorder: Recorder, most: int = READ_AT_ONCE) -> None:
        """Record what has arrived. On a thread that trains, or after the last has."""
        coming = self._coming
        device = self._device
        if not coming or device is None or self._looking.locked() or device.capturing():
            return
        # Nobody waits here, but for an instant where two threads come at once. To try for the lock and release it in
        # `finally` would leave it locked where a signal's handler raises in between.
        with self._looking:
            while coming and most:
                first = coming[0]
                while first.events and device.passed(first.events[-1]):
                    first.events.pop()
                if first.events:
                    return
                coming.popleft()
                most -= 1
                for name, slot in first.slots:
                    number = device.read(slot)
                    first.numbers[name] = int(number) if isinstance(number, bool) else number
                    self._free.append(slot)
                recorder.add(first.row)

    def finish(self, recorder: Recorder, seconds: float) -> None:
        """Record what arrives within so many seconds, and count the rest."""
        until = monotonic() + seconds
        self.look(recorder, SLOTS)
        while self._coming and monotonic() < until:
            sleep(POLL_SECONDS)
            self.look(recorder, SLOTS)
        while self._coming:
            left = self._coming.popleft()
            self._lose(NOT_READ, len(left.slots))
            if left.numbers:
                recorder.add(left.row)

    def lost(self) -> dict[str, int]:
        """How many numbers were lost since the last time, by the reason."""
        found = {}
        for reason, counter in self._lost.items():
            # A counter can only be read by taking a number from it, so our own readings are taken off again.
            lost = next(counter) - self._readings[reason]
            self._readings[reason] += 1
            fresh, self._told[reason] = lost - self._told[reason], lost
            if fresh:
                found[reason] = fresh
        return found

    def _lose(self, reason: str, many: int) -> None:
        for _ in range(many):
            next(self._lost[reason])
