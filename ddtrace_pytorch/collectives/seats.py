"""Memory that outlives the process, and who writes to which piece of it."""

from __future__ import annotations

import weakref
from typing import Any

from ddtrace_pytorch.weakly import weakly

NOWHERE = -1


class Seats:
    """Gives owners a piece of memory each, for as long as they live: its address is their `address`, 0 where there is
    none. There are `many` pieces of `size` bytes, the first `offset` bytes behind where :meth:`write_to` says."""

    def __init__(self, many: int, size: int, offset: int = 0) -> None:
        self._size = size
        self._offset = offset
        self._memory = 0
        self._free = list(reversed(range(many)))
        self._taken: dict[weakref.ref[Any], int] = {}

    def owners(self) -> list[Any]:
        """Those that live."""
        return [owner for reference in tuple(self._taken) if (owner := reference()) is not None]

    def give(self, owner: Any) -> None:
        """A piece to `owner`, unless it has one, or there is no other left."""
        reference = weakref.ref(owner, weakly(self._take_back))
        if reference in self._taken:
            return
        try:
            place = self._free.pop()
        except IndexError:
            place = NOWHERE
        self._taken[reference] = place
        # Without a call, where the memory could be given back between looking and writing.
        owner.address = self._memory + place * self._size if self._memory and place != NOWHERE else 0

    def _take_back(self, gone: weakref.ref[Any]) -> None:
        place = self._taken.pop(gone)
        if place != NOWHERE:
            self._free.append(place)

    def write_to(self, memory: int) -> None:
        """Have all owners write behind that address; 0: nowhere."""
        self._memory = memory and memory + self._offset
        for reference, place in tuple(self._taken.items()):
            owner = reference()
            if owner is not None:
                owner.address = self._memory + place * self._size if self._memory and place != NOWHERE else 0
