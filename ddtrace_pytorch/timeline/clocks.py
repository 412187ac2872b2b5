"""How far the clocks of hosts are apart, from collectives that all ranks of a group wait in. Pure.

Such a collective is over for all ranks at about the same moment. So the end of one call, known by its group and number,
is one moment seen on the clocks of all hosts that have it, and the median of the differences over many calls is how far
two clocks are apart. Hosts that share no group are aligned by way of others. Ranks of one host have one clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

# More shared calls than these make a link no better.
ENOUGH = 20

# So many ends are kept; of more, those of every second number, of every fourth, …
MOST_ENDS = 20_000

# Incarnation and group, and the number there.
Call = tuple[Hashable, int]


@dataclass(frozen=True)
class Aligned:
    """A host's clock: what to add to its times (ns), by way of which other host, the median absolute deviation of the
    differences (ns), and of how many calls they are. A host that others are aligned with has no `by`."""

    host: str
    offset: int
    by: str | None
    residual: int
    calls: int


class Ends:
    """When calls were over, on each host's clock. Of several ranks of a host the first that came back counts."""

    def __init__(self, most: int = MOST_ENDS) -> None:
        self.of_host: dict[str, dict[Call, int]] = {}
        self._most = most
        self._stride = 1
        self._kept = 0

    def passes(self, number: int | None) -> bool:
        """Whether calls of that number are not kept."""
        return number is not None and number % self._stride != 0

    def add(self, host: str, ends: Iterable[tuple[Call, int]]) -> None:
        """All calls of one rank of `host`; those whose number comes twice say nothing of either."""
        mine: dict[Call, int | None] = {}
        for call, end in ends:
            if call[1] % self._stride == 0:
                mine[call] = None if call in mine else end
                if len(mine) > self._most:
                    self._stride *= 2
                    mine = {one: when for one, when in mine.items() if one[1] % self._stride == 0}
        known = self.of_host.setdefault(host, {})
        before = len(known)
        for call, when in mine.items():
            if when is not None:
                known[call] = min(when, known.get(call, when))
        self._kept += len(known) - before
        while self._kept > self._most and self._stride < 1 << 62:
            self._stride *= 2
            for name, of_host in self.of_host.items():
                self.of_host[name] = {one: when for one, when in of_host.items() if one[1] % self._stride == 0}
            self._kept = sum(map(len, self.of_host.values()))


def align(of_host: Mapping[str, Mapping[Call, int]]) -> list[Aligned]:
    """The clocks of all hosts, in their order; the first of each set of hosts that are linked stays as it is."""
    done: dict[str, Aligned] = {}
    hops: dict[str, int] = {}
    # Of each host that is not aligned the best link to one that is: (how good it is, by whom).
    best: dict[str, tuple[tuple[int, int, int], str]] = {}

    def take(one: Aligned, far: int) -> None:
        done[one.host], hops[one.host] = one, far
        best.pop(one.host, None)
        for other in of_host:
            if other not in done:
                shared = len(of_host[one.host].keys() & of_host[other].keys())
                link = (min(shared, ENOUGH), -far, -len(done))
                if shared and (other not in best or link > best[other][0]):
                    best[other] = link, one.host

    for first in of_host:
        if first in done:
            continue
        take(Aligned(first, 0, None, 0, 0), 0)
        while best:
            host = max(best, key=lambda name: best[name][0])
            by = best[host][1]
            there, here = of_host[by], of_host[host]
            apart = [there[call] - here[call] for call in there.keys() & here.keys()]
            middle = round(median(apart))
            spread = round(median(abs(one - middle) for one in apart))
            take(Aligned(host, done[by].offset + middle, by, spread, len(apart)), hops[by] + 1)
    return [done[host] for host in of_host]
