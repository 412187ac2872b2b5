"""Where in the source an instruction of a code object is. Pure."""

from __future__ import annotations

from types import CodeType


def line_of(code: CodeType, instruction: int) -> int:
    """The line of an instruction, by its offset in `code`."""
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            return number
    return code.co_firstlineno


def place(code: CodeType, instruction: int) -> str:
    """``file:line`` of an instruction."""
    return f"{code.co_filename}:{line_of(code, instruction)}"


def place_and_function(code: CodeType, instruction: int) -> str:
    """``file:line:function`` of an instruction."""
    return f"{place(code, instruction)}:{getattr(code, 'co_qualname', code.co_name)}"
