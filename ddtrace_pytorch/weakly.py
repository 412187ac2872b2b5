"""How a part of a session calls the whole that it is a part of, without keeping it.

A session whose parts held it would be a ring. Python gives rings back only when it looks for them, and it seldom does
among as many objects as a training has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """The bound `method`, whose object isn't kept by this; None comes of it where that is gone."""
    # Not WeakMethod, which is written in Python: within a region that torch compiles, torch would compile it, too.
    bound = cast(MethodType, method)
    function, reference = bound.__func__, weakref.ref(bound.__self__)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        whole = reference()
        return cast(R, None if whole is None else function(whole, *args, **kwargs))

    return call
