"""When one step of a training ends and the next begins, by which optimizers step. No torch in here.

A step ends when an optimizer that has stepped in it steps again, or a never-seen one after another has stepped twice.
So a GAN's two optimizers make one step, one optimizer for each parameter too, and of two phases with an optimizer each
every step is one.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any


class StepRule:
    """Remembers who has stepped; holds no optimizer."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # By the id of an optimizer, as long as that lives: one that is made where it died has the same.
        self._known: dict[int, int] = {}
        self._lives: dict[int, weakref.ref[Any]] = {}
        self._here: set[int] = set()
        self._before: set[int] = set()
        self._any_stepped_twice = False

    def ends_before(self, optimizer: Any) -> bool:
        """Whether the step under way is over, now that `optimizer` is about to step."""
        number = self._known.get(id(optimizer))
        if number is None:
            return self._any_stepped_twice and bool(self._here)
        return number in self._here

    def stepped(self, optimizer: Any) -> bool:
        """`optimizer` has stepped, in the step under way; whether all that stepped in the step before now have."""
        number = self._known.get(id(optimizer))
        if number is None:
            number = self._meet(optimizer)
        else:
            self._any_stepped_twice = True
        self._here.add(number)
        return bool(self._before) and self._before <= self._here

    def ended(self) -> None:
        """The step is over."""
        self._before, self._here = self._here, set()

    @property
    def begun(self) -> bool:
        """Whether any optimizer has stepped in the step under way."""
        return bool(self._here)

    def _meet(self, optimizer: Any) -> int:
        key = id(optimizer)

        def forget(gone: weakref.ref[Any]) -> None:
            if self._lives.get(key) is gone:
                del self._lives[key], self._known[key]

        self._lives[key] = weakref.ref(optimizer, forget)
        self._known[key] = number = next(self._numbers)
        return number
