"""The functions that run in place of torch's collectives, generated from the table.

This is the hot path. What costs here (`benchmarks/collectives.py` tells): every call of a Python function, every new
tuple, `*args`. So each wrapper has the exact signature of the function it stands for, and counts in straight-line
code; see :mod:`ddtrace_pytorch.ledger` for why that is exact without a lock. Where the installation has the part in C
(:mod:`~ddtrace_pytorch.collectives.c_wrappers`), that does the ordinary calls, and these do the rest.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Callable
from time import monotonic_ns
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ddtrace_pytorch.border import leave_no_trace, safely
from ddtrace_pytorch.collectives import c_wrappers, sizes
from ddtrace_pytorch.collectives.composites import Composite
from ddtrace_pytorch.collectives.generated import maker, signature_of
from ddtrace_pytorch.collectives.in_flight import InFlight
from ddtrace_pytorch.collectives.surface import Kind, Operation
from ddtrace_pytorch.in_place import UnknownShape
from ddtrace_pytorch.ledger import Cell, How, Ledger
from ddtrace_pytorch.plain_numbers import RECENT

# What is to be done with the Work of a call that returned before it was complete; of a transfer, with which rank it is.
Track = Callable[..., object]

_NUMBER = f"""here.calls = _key = here.calls + 1
        _place = (_key & {RECENT - 1}) * 2
        here.recent[_place] = _cell.number + 1
        here.recent[_place + 1] = _size"""

# Takes what is a number of 64 bits, and nothing else: what is none is no size, rather than an error where it is added.
_WHOLE = memoryview(bytearray(8)).cast("q")

_LEAF = """
def make(_original, _waited, _issued, _find, _local, _new_slot, _track):
    def {name}({parameters}):
        _cell = {line}.default if group is None else {line}.others.get(_id(group))
        try:
            _slot = _local.slot
        except _AttributeError:
            _slot = _new_slot()
        if _cell is None or _slot.call is not None:
            if _cell is None:
                _cell = _find({deferred}, group)
            if _cell is None or _slot.call is not None:
                try:
                    return _inside(_slot, _cell, {arguments})
                except _BaseException as _error:
                    _leave_no_trace(_error)
                    raise
        _slot.started = _started = _now()
        _slot.call = _cell
        try:
            _result = _original({arguments})
        except _BaseException as _error:
            _cell.fail(_error)
            _leave_no_trace(_error)
            raise
        finally:
            _slot.call = None
        _took = _now() - _started
        _bucket = _took.bit_length()
        here = _cell.group
        try:
            _whole[0] = _size = {size}
        except _Exception:
            _size = 0
            _cell.unsized += 1
        {track}
        _cell.buckets[_bucket] += 1
        _cell.time += _took
        _cell.bytes += _size
        {number}
        if {noteworthy}:
            _cell.note(_started, _took, _size, _key)
        return _result

    def _inside(_slot, _cell, {arguments}):
        _outer = _slot.call
        _counts = _cell is not None and _outer.__class__ is _Composite
        _started = _now()
        if _counts:
            _slot.call = _cell  # what this calls in turn is part of it
        try:
            _result = _original({arguments})
        except _BaseException as _error:
            _leave_no_trace(_error)
            raise
        finally:
            _slot.call = _outer
        if _counts:
            here = _cell.group
            try:
                _whole[0] = _size = {size}
            except _Exception:
                _size = 0
                _outer.unsized += 1
            _outer.holds(_cell, _started, _now() - _started, _size)
        return _result

    return {name}
"""


class Leaf:
    """What makes the wrapper of an operation that does its work itself out of the function it wraps."""

    def __init__(self, operation: Operation, public: Any, ledger: Ledger, in_flight: InFlight, track: Track) -> None:
        """`public` is the function that users call; it may be the wrapped one, or torch's decorator around that."""
        self._operation = operation
        self._public = public
        self._in_flight = in_flight
        self._track = track
        self._waited = ledger.line(operation.name, How.WAITED)
        self._issued = ledger.line(operation.name, How.ISSUED)
        cell_of = safely("look up a process group")(ledger.cell)

        def find(deferred: Any, group: Any) -> Cell | None:
            return cell_of(operation.name, How.ISSUED if deferred else How.WAITED, operation.numbered, group)

        self._find = find

    def __call__(self, original: Callable[..., Any]) -> FunctionType:
        """The wrapper around `original`.

        Raises :class:`UnknownShape` if that lacks parameters that the table's row speaks of.
        """
        operation = self._operation
        _check(operation, inspect.signature(original).parameters)
        parameters, arguments, defaults = signature_of(original)
        numbered = operation.numbered
        maybe = operation.deferred not in ("True", "False")
        source = _LEAF.format(
            name=original.__name__,
            parameters=parameters,
            arguments=arguments,
            size=operation.size,
            deferred=operation.deferred,
            line=f"(_issued if {operation.deferred} else _waited)"
            if maybe
            else ("_issued" if operation.deferred == "True" else "_waited"),
            track="pass"
            if operation.deferred == "False"
            else f"if {operation.deferred} and _result is not None: "
            f"_track(_result, _cell{_peer(operation, arguments)})",
            number=_NUMBER if numbered else "_key = 0",
            noteworthy="_took > _cell.notable" + (" or _key >= here.sampled" if numbered else ""),
        )
        home = _home(self._public, original)
        namespace: dict[str, Any] = {
            "__name__": home.module.get("__name__"),
            "__warningregistry__": home.module.setdefault("__warningregistry__", {}),
            "_defaults": defaults,
            "_id": id,
            "_now": monotonic_ns,
            "_AttributeError": AttributeError,
            "_Exception": Exception,
            "_BaseException": BaseException,
            "_leave_no_trace": leave_no_trace,
            "_whole": _WHOLE,
            "_Composite": Composite,
            **{name: getattr(sizes, name) for name in sizes.__all__},
        }
        make: Callable[..., FunctionType] = maker(source, home.file, home.line, namespace)
        local, new_slot = self._in_flight.local, self._in_flight.new_slot
        made = make(original, self._waited, self._issued, self._find, local, new_slot, self._track)
        made.__qualname__ = original.__qualname__  # the interpreter names the function so when it is called wrongly
        return made

    def in_c(self, original: FunctionType, careful: FunctionType) -> tuple[FunctionType, Callable[[], None]]:
        """The same as `careful`, the wrapper around `original`, with ordinary calls counted in C; and what gives it up.

        It is a copy of `original`, and any holder may call it for good. Raises ImportError where there is no C part.
        """
        return c_wrappers.instrument(
            self._operation, original, careful, self._waited, self._issued, self._in_flight, self._track
        )


def _peer(operation: Operation, arguments: str) -> str:
    """Of a transfer: who it is with, as a further argument."""
    if operation.kind is not Kind.P2P:
        return ""
    within = f"group_{operation.root}"
    return f", peer({operation.root}, {within if within in arguments.split(', ') else None}, here)"


def _check(operation: Operation, parameters: Any) -> None:
    needed = {node.id for node in ast.walk(ast.parse(operation.size)) if isinstance(node, ast.Name)}
    needed |= {node.id for node in ast.walk(ast.parse(operation.deferred)) if isinstance(node, ast.Name)}
    missing = (needed | {"group"}) - set(parameters) - set(sizes.__all__) - {"here"}
    if missing:
        raise UnknownShape(f"{operation.function} has no parameter {', '.join(sorted(missing))}")
    odd = [name for name, one in parameters.items() if one.kind is not one.POSITIONAL_OR_KEYWORD]
    if odd:
        raise UnknownShape(f"{operation.function} has parameters of another kind: {', '.join(odd)}")


class _Home(NamedTuple):
    """Where a wrapper pretends to stand: `module` is the dictionary of the module."""

    file: str
    line: int
    module: dict[str, Any]


def _home(public: Any, original: Any) -> _Home:
    """The line in torch's decorator that calls `original`; without a decorator, where `original` is defined.

    A warning that `original` gives in its caller's name then comes from where it always came, and not twice. And
    Dynamo, which decides by the file whether to look into a function, does with ours as with torch's own.
    """
    function = public
    while getattr(function, "__closure__", None):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        for name, cell in cells.items():
            if cell.cell_contents is original:
                return _Home(function.__code__.co_filename, _first_use(function.__code__, name), function.__globals__)
        inner = cells.get("func") or cells.get("arg")
        function = inner.cell_contents if inner is not None else None
    defined = inspect.unwrap(original)
    return _Home(defined.__code__.co_filename, defined.__code__.co_firstlineno, defined.__globals__)


def _first_use(code: CodeType, variable: str) -> int:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        # A number up to Python 3.12, then a flag beside `line_number`.
        line = getattr(instruction, "line_number", instruction.starts_line) or line
        if instruction.argval == variable and instruction.opname == "LOAD_DEREF":
            break
    return line
