import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ddtrace_pytorch.collectives.in_flight import Slot
from ddtrace_pytorch.ledger import Cell, Group, Line
from ddtrace_pytorch.plain_numbers import CellNumbers as CellNumbers
from ddtrace_pytorch.plain_numbers import GroupNumbers as GroupNumbers
from ddtrace_pytorch.plain_numbers import LineNumbers as LineNumbers
from ddtrace_pytorch.plain_numbers import SlotNumbers as SlotNumbers

def lay_out(
    cell: type[Cell],
    line: type[Line],
    group: type[Group],
    slot: type[Slot],
    tensor: type[Any],
    dtypes: tuple[Any, ...],
    /,
) -> None:
    """Find where the attributes of these classes lie; once, before the first :func:`instrument`.

    `tensor` is torch's class of them; `dtypes` are those that a position names by their number, from 1 on.

    Raises TypeError if one that the hot path needs is not in ``__slots__``, or a class doesn't inherit the numbers that
    are this module's.
    """

def instrument(
    function: FunctionType,
    original: FunctionType,
    careful: Callable[..., Any],
    waited: Line,
    issued: Line,
    local: Any,
    track: Callable[[Any, Cell], object],
    size: Callable[..., int] | None,
    default_group: Any,
    first: tuple[int, str],
    group: tuple[int, str],
    deferred: tuple[int, str],
    sized: tuple[int, str],
    always_deferred: bool,
    numbered: bool,
    /,
) -> None:
    """Have each call of `function` run and count `original`, or run `careful` where it is out of the ordinary.

    The four pairs are the position and name of a parameter; position -1: there is none. `size` is called with the
    group's ledger entry before the arguments; None: the message is the ``nbytes`` of the parameter `sized`. The
    attribute ``slot`` of `local`, a ``threading.local``, is the thread's :class:`Slot`.
    """

def release(function: FunctionType, /) -> None:
    """Undo :func:`instrument`: `function` runs its own code again."""

def tracker(
    pending: dict[weakref.ref[Any], tuple[Cell, int, int | None]], first: list[Callable[[], None]], /
) -> Callable[..., None]:
    """Makes a function that takes a Work, its :class:`Cell` and perhaps a rank, and keeps in `pending`, while the Work
    lives, the cell, the number that its call will have on the group (0: none) and that rank.

    What is in `first` is called before, until it isn't there any more. A Work that can't be referred to weakly is not
    followed.
    """

def times(cells: dict[Cell, None], /) -> int:
    """The ns in the calls that `cells` have counted, and in waiting for them.

    Raises OverflowError if that is more than some centuries.
    """
