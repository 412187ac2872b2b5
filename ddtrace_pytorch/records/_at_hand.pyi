from collections.abc import Callable
from typing import Any

def reader(
    carefully: Callable[[Any], int | float | None],
    item: Callable[[Any], int | float],
    /,
    *watched: Callable[[], object],
) -> Callable[[Any], int | float | None]:
    """Makes a function that gives the `item` of a tensor in this host's memory; where it isn't there, or one of
    `watched` gives anything true, what `carefully` gives of it."""
