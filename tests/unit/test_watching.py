"""Signs of frameworks: heard by whatever name, wherever imported, and given back; the user sees no difference."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pickle
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddtrace_pytorch import autoload
from ddtrace_pytorch.training.frameworks import Use
from ddtrace_pytorch.training.signs import Call, Sign
from ddtrace_pytorch.training.watching import Undo, watch

LIBRARY = '''
import functools
import warnings

register = {}

def contract(function):
    @functools.wraps(function)
    def wrapper(module, *args, **kwargs):
        register[function] = module
        return function(module, *args, **kwargs)
    wrapper.state = lambda: register.get(function)
    return wrapper

class Wrapper:
    def __init__(self, module, size=1, *, fails=False):
        if fails:
            raise ValueError("no")
        if size == 7:
            warnings.warn("an odd size", stacklevel=2)
        self.module, self.size = module, size

    def run(self, done):
        done.append("run")

class Derived(Wrapper):
    pass

def plain(module, mesh=None, *, depth=0):
    """Recursive, as `parallelize_module` is."""
    warnings.warn("plain", stacklevel=2)
    return plain(module, mesh, depth=depth - 1) if depth else module

@contract
def decorated(module, *, mesh=None):
    return decorated.state()
'''

NAME = "library_of_a_framework"


def tells_size(call: Call) -> Use:
    return Use(framework=f"{type(call.args[0]).__name__}:{call.args[0].size}")


SIGNS = (
    Sign(NAME, "Wrapper.__init__", tells_size),
    Sign(NAME, "Wrapper.run", lambda call: Use(framework=f"{call.args[1]}"), before=True),
    Sign(NAME, "plain", lambda call: Use(framework=f"plain{call.args}{sorted(call.kwargs.items())}")),
    Sign(NAME, "decorated", lambda call: Use(framework=f"decorated{call.args}{sorted(call.kwargs.items())}")),
    Sign(NAME, "gone", lambda call: Use()),
    Sign(NAME, "Gone.__init__", lambda call: Use()),
    Sign(NAME, "Derived.__init__", lambda call: Use(framework="inherited")),
    Sign(f"{NAME}_again", "plain", lambda call: Use(framework="passed on")),
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / f"{NAME}.py").write_text(LIBRARY)
    (tmp_path / f"{NAME}_again.py").write_text(f"from {NAME} import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders, opened_by = list(sys.meta_path), autoload.opened_by
    autoload.install("explicit")
    yield NAME
    sys.meta_path[:] = finders
    autoload.opened_by = opened_by
    for name in (NAME, f"{NAME}_again"):
        sys.modules.pop(name, None)


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def undo(library: str, seen: list[str]) -> Iterator[list[Undo]]:
    undo: list[Undo] = []
    watch(lambda use: seen.append(use.framework), undo, SIGNS)
    yield undo
    give_back(undo)


def give_back(undo: list[Undo]) -> None:
    while undo:
        undo.pop()()


def everything(module: ModuleType) -> list[Any]:
    wrapper = module.Wrapper
    inner = module.decorated.__wrapped__
    return [
        vars(wrapper)["__init__"], vars(wrapper)["run"], "__init__" in vars(module.Derived), module.plain,
        module.plain.__code__, module.decorated, inner, inner.__code__,
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_what_is_used_is_told_after_it_went_well_and_what_is_only_imported_is_not(
    undo: list[Undo], seen: list[str]
) -> None:
    module = importlib.import_module(NAME)
    assert seen == []
    with pytest.raises(ValueError, match="no"):
        module.Wrapper(1, fails=True)
    assert seen == []
    wrapper = module.Wrapper(1, size=3)
    module.Derived(1)
    assert seen == ["Wrapper:3", "Derived:1"]
    done: list[str] = []
    wrapper.run(done)
    assert seen.pop() == "[]"
    assert done == ["run"]
    assert module.plain(module=1, depth=1) == 1
    assert seen[2:] == ["plain(1, None)[('depth', 0)]", "plain(1, None)[('depth', 1)]"]
    assert module.decorated(5) == 5
    assert seen[4:] == ["decorated(5,)[('mesh', None)]"]


@pytest.mark.filterwarnings("ignore")
def test_names_bound_before_and_after_are_heard_alike_and_functions_stay_themselves(
    library: str, seen: list[str]
) -> None:
    module = importlib.import_module(NAME)
    early, wrapped = module.plain, module.decorated
    before = everything(module)
    source, pickled = inspect.getsource(early), pickle.dumps(early)
    undo: list[Undo] = []
    watch(lambda use: seen.append(use.framework), undo, SIGNS)
    again = importlib.import_module(f"{NAME}_again")  # that only passes on what the first defines
    for function in (early, module.plain, again.plain):
        assert function is early
        assert pickle.loads(pickled) is early
        assert inspect.getsource(function) == source
        function(1)
    assert len(seen) == 3
    wrapped(1)
    assert len(seen) == 4
    give_back(undo)
    assert everything(module) == before
    assert wrapped.state() == 1  # what it was called with under us is known by the function that it is
    early(1)
    assert len(seen) == 4


def test_a_module_first_imported_after_the_end_is_left_alone(undo: list[Undo], seen: list[str]) -> None:
    give_back(undo)
    module = importlib.import_module(NAME)
    assert not hasattr(module.Wrapper.__init__, "__wrapped__")
    module.Wrapper(1)
    assert seen == []


def test_errors_and_warnings_are_about_the_users_lines(undo: list[Undo], seen: list[str]) -> None:
    module = importlib.import_module(NAME)
    here = inspect.currentframe()
    assert here is not None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        module.Wrapper(1, 7)
        module.plain(1)
        line = here.f_lineno
    assert [(one.filename, one.lineno) for one in heard] == [(__file__, line - 2), (__file__, line - 1)]
    with pytest.raises(ValueError, match="no") as raised:
        module.Wrapper(1, fails=True)
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:] == ["__init__"]


def test_what_cannot_be_told_is_the_users_business_in_no_way(library: str, caplog: pytest.LogCaptureFixture) -> None:
    undo: list[Undo] = []

    def raises(call: Call) -> Use:
        raise AttributeError("another release")

    watch(lambda use: None, undo, (Sign(NAME, "Wrapper.__init__", raises),))
    assert importlib.import_module(NAME).Wrapper(1).size == 1
    assert "could not say what Wrapper.__init__ tells" in caplog.text
    give_back(undo)


@pytest.mark.parametrize("order", list(itertools.permutations(["us", "them"])))
@pytest.mark.filterwarnings("ignore")
def test_another_tools_wrapper_over_ours_is_kept_and_ours_stands_aside(
    library: str, seen: list[str], order: tuple[str, str]
) -> None:
    module = importlib.import_module(NAME)
    before = everything(module)
    undo: list[Undo] = []
    watch(lambda use: seen.append(use.framework), undo, SIGNS)
    ours, theirs = module.Wrapper.__init__, []

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs.append(1)
        ours(self, *args, **kwargs)

    module.Wrapper.__init__ = wrapper
    module.Wrapper(1)
    assert (len(seen), len(theirs)) == (1, 1)
    for who in order:
        if who == "us":
            give_back(undo)
            module.Wrapper(1)
            assert len(seen) == 1
        else:
            module.Wrapper.__init__ = ours
    module.Wrapper(1)
    assert len(seen) == 1
    assert everything(module)[1:] == before[1:]
