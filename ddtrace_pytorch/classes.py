"""What a class says of itself, past whatever its metaclass, or the class, makes of the question."""

from __future__ import annotations

_name = type.__dict__["__name__"].__get__
_qualified = type.__dict__["__qualname__"].__get__
_module = type.__dict__["__module__"].__get__


def name_of(kind: type) -> str:
    """Its name as it stands in the code."""
    return str(_name(kind))


def qualified_name_of(kind: type) -> str:
    """The same with what it is defined in."""
    return str(_qualified(kind))


def module_of(kind: type) -> str:
    """Where it was defined; empty where it doesn't say."""
    try:
        found = _module(kind)
    except AttributeError:
        return ""
    return found if type(found) is str else ""
