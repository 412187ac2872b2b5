"""Pure parts of how a session ends and fails."""

from __future__ import annotations

import pytest

from ddtrace_pytorch.opening import rendezvous_facts
from ddtrace_pytorch.spans import End, describe_error


@pytest.mark.parametrize(
    ("init_method", "facts"),
    [
        (None, {}),
        ("env://", {}),
        ("file:///shared/meet", {}),
        ("tcp://10.0.0.1:29500", {"pytorch.master_addr": "10.0.0.1", "pytorch.master_port": 29500}),
        ("tcp://[fe80::1]:29500?rank=0", {"pytorch.master_addr": "[fe80::1]", "pytorch.master_port": 29500}),
        ("tcp://nonsense", {}),
    ],
)
def test_the_meeting_place_of_a_failed_rendezvous(init_method: str | None, facts: dict[str, object]) -> None:
    told = rendezvous_facts({"init_method": init_method})
    assert {tag: value for tag, value in told.items() if tag != "pytorch.init_method"} == facts
    assert told.get("pytorch.init_method") == (None if init_method in (None, "env://") else init_method)


def test_an_exception_whose_text_raises_is_described_all_the_same() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    tags = describe_error(Broken())
    assert tags["error.type"].endswith("Broken")
    assert tags["error.message"] == "(its text raised RuntimeError)"


def test_a_signal_is_an_error_and_a_plain_end_is_none() -> None:
    assert End("signal:SIGTERM").is_error
    assert End("exception", ValueError("x")).tags()["error.type"] == "ValueError"
    assert not End("exit").is_error
    assert End("destroyed").tags() == {"pytorch.end_reason": "destroyed"}
