"""One window of our own, of what the GPU runs alone: the kernel sampler keeps each record for some steps.

torch's profiler takes several times as long to begin and to end one, and has to let go of CUPTI after each, or steps
stay slower; CUPTI keeps memory each time (``benchmarks/results/windows-torch.md``). Here records are switched on and
off, no more; there are none of what launched the kernels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ddtrace_pytorch.kernels import own_trace, reading, sampled
from ddtrace_pytorch.kernels.aggregates import Event
from ddtrace_pytorch.kernels.memory import MemoryHistory
from ddtrace_pytorch.kernels.sampler_library import COPIES, FILLS, Copied, Raw, SamplerLibrary
from ddtrace_pytorch.kernels.trace_file import PLAIN_LIMIT, NoTrace


class OwnWindow:
    """As :class:`~ddtrace_pytorch.kernels.window.Window`: from :meth:`prepare` by :meth:`start` to :meth:`end`, or to
    :meth:`cancel` at any time, and from any thread. Raises RuntimeError where CUPTI refuses."""

    ends_anywhere = True

    def __init__(self, torch: Any, library: SamplerLibrary, memory: bool) -> None:
        """`library` is open; `memory`: what is taken of the GPU's memory is wanted too."""
        self._torch = torch
        self._library = library
        self._memory = MemoryHistory(torch) if memory else None
        self._place: dict[str, Any] = {}
        self._since = 0
        self.is_spoilt = False

    def prepare(self) -> None:
        """Warm up: what runs when the window starts was launched before, and is known of then."""
        self._library.keep(0)
        if self._library.on(COPIES | FILLS):
            raise RuntimeError(self._library.error)

    def start(self, rank: int, world_size: int, backend: str | None) -> None:
        """Keep what ends from here on."""
        self._place = {"rank": rank, "world_size": world_size, "backend": backend or "none"}
        self._since = time.time_ns()
        self._library.copy()
        self._library.keep(self._library.limits.raws)
        if self._memory is not None:
            self._memory.begin()

    def may_end(self) -> bool:
        return True

    def must_wait(self) -> bool:
        """Whether this is no time to start or to end: whoever waits for the GPU now would break a graph's capture."""
        return bool(self._torch.cuda.is_current_stream_capturing())

    def settle(self) -> None:
        """Wait until the GPU has done what was asked of it: what isn't over isn't recorded."""
        if not self.must_wait():
            self._torch.cuda.synchronize()

    def memory(self) -> Any:
        """What the GPU's allocator did since the start, if that is wanted, before the :meth:`end`; otherwise None."""
        return None if self._memory is None else self._memory.end()

    def end(self) -> Recorded:
        """Record no more; gives the results."""
        if self._off():
            raise RuntimeError(self._library.error)
        return Recorded(self._library.copy(), self._since, self._place)

    def cancel(self) -> None:
        """End, without results."""
        self._off()
        self._library.copy()

    def give_way(self) -> None:
        """From any thread: a profiler begins, and has CUPTI for itself. The window is spoilt."""
        self.is_spoilt = True
        self._library.off()

    def _off(self) -> int:
        if self._memory is not None:
            self._memory.leave()
        refused = self._library.off()
        self._library.keep(0)
        return refused


class Recorded:
    """The results of one window."""

    def __init__(self, copied: Copied, since: int, place: dict[str, Any]) -> None:
        """`since`: when the window started, in ns since the epoch. CUPTI hands over records late."""
        self._copied = copied
        self._since = since
        self._place = place
        self._raws: Sequence[Raw] = ()

    def read(self, ahead: int) -> tuple[int, Iterator[Event]]:
        """How many records there are, and their events, with times on the clock that the system's is `ahead` of."""
        self._raws = [raw for raw in reading.giving_way(self._copied.kept()) if raw.end > self._since]
        return len(self._raws), (sampled.event(raw, ahead) for raw in reading.giving_way(self._raws))

    def missing(self) -> str | None:
        """What it hasn't, in words."""
        totals = self._copied.totals
        lost = sum(totals.dropped().values()) + totals.cupti_dropped
        if lost or totals.refusals:
            return f"{lost:,} records were lost" if lost else "records were lost"
        return f"there was room for {totals.raws:,} records alone" if totals.raws_left_out else None

    def save(self, path: str) -> None:
        """Write the trace, once it was read."""
        size = 0
        with open(path, "w", encoding="utf-8") as file:
            for line in reading.giving_way(own_trace.lines(self._raws, self._place)):
                size += file.write(line)
                if size > PLAIN_LIMIT:
                    raise NoTrace("its kernels' names are too long for so many of them; take fewer steps")
