"""Calls that are made of other collectives: `*_object` functions and coalescing blocks."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddtrace_pytorch.border import leave_no_trace, safely
from ddtrace_pytorch.collectives.generated import maker, signature_of
from ddtrace_pytorch.collectives.surface import SCATTERS, Operation
from ddtrace_pytorch.compiler import compiling
from ddtrace_pytorch.ledger import Cell, How, Ledger

if TYPE_CHECKING:
    from ddtrace_pytorch.collectives.in_flight import InFlight
    from ddtrace_pytorch.collectives.wrappers import Track


class Composite:
    """A composite call in flight: adds up what the collectives inside of it move.

    `started` on the monotonic clock, in ns. A `coalesced` one issues what it holds as a single collective.
    """

    __slots__ = ("cell", "coalesced", "many", "names", "size", "started", "unsized")

    def __init__(self, cell: Cell | None, coalesced: bool = False) -> None:
        self.cell = cell
        self.started = monotonic_ns()
        self.coalesced = coalesced
        self.size = 0
        self.many = 0
        self.unsized = 0
        self.names: dict[str, None] = {}

    def holds(self, cell: Cell, started: int, took: int, size: int) -> None:
        """A call inside of this one is over (or, coalesced, noted down)."""
        if self.coalesced and not cell.numbered:
            cell.add(started, took, size)  # each transfer of a P2P batch counts by itself
            return
        self.size += size
        self.many += 1
        self.names[cell.operation] = None
        if cell.numbered and not self.coalesced:
            cell.group.number(cell, size)


def objects(operation: Operation, ledger: Ledger, in_flight: InFlight) -> Callable[..., Any]:
    """What makes the wrapper of a `*_object` function: one call, whose size is what the calls inside move."""
    cell_of = safely("look up a process group")(ledger.cell)
    numbered = operation.numbered

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        group_of = _group_argument(original)

        @functools.wraps(original)
        def composite(*args: Any, **kwargs: Any) -> Any:
            slot = in_flight.slot()
            cell = None
            if slot.call is None:
                cell = cell_of(operation.name, How.WAITED, numbered, group_of(args, kwargs))
            if cell is None:
                try:
                    return original(*args, **kwargs)
                except BaseException as error:
                    leave_no_trace(error)
                    raise
            whole = Composite(cell)
            number = cell.group.calls + 1 if numbered else 0
            slot.started = whole.started
            slot.call = whole
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                cell.fail(error)
                leave_no_trace(error)
                raise
            finally:
                slot.call = None
            cell.unsized += whole.unsized
            cell.add(whole.started, monotonic_ns() - whole.started, whole.size, number)
            return result

        return composite

    return around


# A generator of the original's signature: Dynamo traces no other, and takes the block into its graph.
_BLOCK = """
def make(_original, _counted, _block, _compiling):
    def _coalescing_manager({parameters}):
        if _compiling():
            yield from _original({arguments})
        else:
            try:
                yield from _counted(_block({arguments}), group)
            except _BaseException as _error:
                _leave_no_trace(_error)
                raise

    return _coalescing_manager
"""


def coalescing(operation: Operation, ledger: Ledger, in_flight: InFlight, track: Track) -> Callable[..., Any]:
    """What makes the wrapper of `_coalescing_manager`'s generator: the block is one call, when it ends."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        # In place, it is the generator inside of the context manager that is exchanged; else the manager is wrapped.
        is_generator = inspect.isgeneratorfunction(original)
        block = contextlib.contextmanager(original) if is_generator else original

        parameters, arguments, defaults = signature_of(original)
        names: dict[str, Any] = {
            "__name__": __name__,
            "_defaults": defaults,
            "_BaseException": BaseException,
            "_leave_no_trace": leave_no_trace,
        }
        code = inspect.unwrap(original).__code__
        source = _BLOCK.format(parameters=parameters, arguments=arguments)
        make = maker(source, code.co_filename, code.co_firstlineno, names)
        counting: Callable[..., Any] = make(original, counted, block, compiling())
        counting.__qualname__ = original.__qualname__
        return counting if is_generator else contextlib.contextmanager(counting)

    def counted(block: contextlib.AbstractContextManager[Any], group: Any) -> Iterator[Any]:
        slot = in_flight.slot()
        outer = slot.call
        whole = Composite(None, coalesced=True)
        ending = whole.started
        if outer is None:
            slot.started, slot.call = whole.started, whole
        try:
            with block as manager:
                try:
                    yield manager
                finally:
                    ending = monotonic_ns()
        except BaseException as error:
            leave_no_trace(error)
            if error.__traceback__ is not None and _is_context_manager(error.__traceback__.tb_frame):
                leave_no_trace(error)  # where ours calls torch's
            raise
        finally:
            slot.call = outer
        if outer is not None:
            return
        took = monotonic_ns() - ending
        works = list(getattr(manager, "works", ()))
        _count(whole, group, ending, took, works)

    @safely("count a coalesced collective")
    def _count(whole: Composite, group: Any, ending: int, took: int, works: list[Any]) -> None:
        if not whole.many:
            return
        name = next(iter(whole.names)) if len(whole.names) == 1 else "mixed"
        cell = ledger.cell(f"{name}_coalesced", How.ISSUED if works else How.WAITED, True, group)
        if cell is None:
            return
        for work in works:
            track(work, cell)
        cell.unsized += whole.unsized
        if name == SCATTERS:
            cell.group.scattered += whole.many - 1
        cell.add(ending, took, whole.size, cell.group.number(cell, whole.size))

    return around


def _is_context_manager(frame: FrameType) -> bool:
    return frame.f_code.co_filename == contextlib.__file__


def _group_argument(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    position = list(inspect.signature(function).parameters).index("group")

    def group_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get("group")

    return group_of
