"""A user's values as plain data: what is kept, what becomes its type, and that no code of theirs runs for it."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy
import pytest
import torch

from ddtrace_pytorch.records.attributes import MOST, NAME_LIMIT, TEXT_LIMIT, one, plain, short_name


class Meta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise AssertionError("a metaclass was asked")


class Touchy(metaclass=Meta):
    """Whatever is asked of it, the test fails."""

    def _fail(self, *ignored: Any) -> Any:
        raise AssertionError("code of the user's ran")

    __repr__ = __str__ = __len__ = __iter__ = __float__ = __int__ = __index__ = __bool__ = _fail
    __hash__ = __eq__ = __format__ = __getattr__ = _fail  # type: ignore[assignment]

    @property
    def __class__(self) -> Any:
        return self._fail()

    @__class__.setter
    def __class__(self, value: Any) -> None: ...


class Word(str):
    def __str__(self) -> str:
        raise AssertionError("code of the user's ran")

    __repr__ = __len__ = __str__  # type: ignore[assignment]


class Many(dict[str, int]):
    def __len__(self) -> int:
        raise AssertionError("code of the user's ran")


class Phase(str, enum.Enum):
    TRAIN = "train"


class Level(enum.IntEnum):
    HIGH = 3


class OwnTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *ignored: Any) -> Any:
        raise AssertionError("code of the user's ran")


VALUES: list[tuple[Any, Any]] = [
    ("text", "text"),
    (7, 7),
    (-1.5, -1.5),
    (math.inf, math.inf),
    (True, True),
    (None, None),
    (Word("plain"), "plain"),
    (Phase.TRAIN, "train"),
    (Level.HIGH, 3),
    (numpy.float32(0.5), 0.5),
    (numpy.int64(9), 9),
    (numpy.bool_(True), True),
    (numpy.float64(2.5), 2.5),
    (10**1000, "int"),
    (1j, "complex"),
    (b"abc", "bytes[3]"),
    ([1, 2], "list[2]"),
    ((), "tuple[0]"),
    ({"a": 1}, "dict[1]"),
    ({1, 2, 3}, "set[3]"),
    (Many(a=1), "Many"),
    (Touchy(), "Touchy"),
    (Touchy, "Meta"),
    (len, "builtin_function_or_method"),
    (torch.zeros(2, 3), "Tensor[2, 3] float32"),
    (torch.tensor(1), "Tensor[] int64"),
    (torch.nn.Parameter(torch.zeros(4)), "Parameter[4] float32"),
    (torch.zeros(2, device="meta", dtype=torch.bfloat16), "Tensor[2] bfloat16"),
    (torch.zeros(2).as_subclass(OwnTensor), "OwnTensor"),
    (numpy.zeros((4, 1), numpy.int64), "ndarray[4, 1] int64"),
    (numpy.datetime64("2026-01-01"), "datetime64"),
]


# Without the values in the tests' names: for those they would be asked.
@pytest.mark.parametrize("number", range(len(VALUES)))
def test_a_value_is_kept_or_becomes_its_type_and_shape(number: int) -> None:
    value, kept = VALUES[number]
    found = one(value)
    assert found == kept
    assert type(found) is type(kept)


def test_a_nested_tensor_has_no_shape_to_tell() -> None:
    assert one(torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])) in ("Tensor", "Tensor[2, ?] float32")


def test_nan_is_kept() -> None:
    assert math.isnan(one(math.nan))  # type: ignore[arg-type]


def test_long_text_is_cut_off_with_a_mark() -> None:
    assert one("x" * TEXT_LIMIT) == "x" * TEXT_LIMIT
    assert one("x" * (TEXT_LIMIT + 1_234)) == "x" * TEXT_LIMIT + "…(+1234 chars)"


def test_of_too_many_attributes_the_first_are_kept_with_a_mark() -> None:
    found = plain({str(number): number for number in range(MOST + 5)})
    assert len(found) == MOST + 1
    assert found["0"] == 0
    assert found["…"] == "+5 attributes"


def test_a_long_name_is_cut_off_with_a_mark() -> None:
    for long in ("n" * (NAME_LIMIT + 30), Word("n" * (NAME_LIMIT + 30))):
        found = plain({long: 1})
        assert found == {"n" * NAME_LIMIT + "…(+30 chars)": 1}
    assert short_name("n" * NAME_LIMIT) == "n" * NAME_LIMIT
    assert type(short_name(Word("plain"))) is str


def test_a_mode_of_the_users_sees_nothing_of_an_attribute() -> None:
    from torch.overrides import TorchFunctionMode

    class Fails(TorchFunctionMode):
        def __torch_function__(self, *ignored: Any) -> Any:
            raise AssertionError("code of the user's ran")

    value = torch.zeros(2, 3)
    with Fails():
        found = one(value)
    assert found == "Tensor[2, 3] float32"
