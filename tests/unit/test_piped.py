"""What is piped, into a log or a ticket, is as wide as can be read there, and nothing of it is cut off."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness.story import BROKEN, CLOSED, beats, ended, raised, write_rank
from rich.console import Console
from rich.table import Table

from ddtrace_pytorch.cli.main import cli
from ddtrace_pytorch.cli.tables import paragraph, row, show, table
from ddtrace_pytorch.cli.terminal import console_on

pytestmark = pytest.mark.once

LONG = "/data/experiments/a-team/a-very-long-name-of-an-experiment/with/many/folders/train_something_large.py:1234"


def shown(drawn: Table, width: int) -> str:
    told = io.StringIO()
    show(Console(file=told, width=width, markup=False), drawn)
    return told.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_a_table_in_too_little_room_is_whole(width: int) -> None:
    drawn = table("Rank", "Host", "Ended", "At", "Outcome", right=("Rank",), yielding=("Host", "At"))
    row(drawn, "12345", "a-host-of-a-long-name", "signal:SIGTERM", LONG, "told by another")
    header, rule, *rows = shown(drawn, width).splitlines()
    assert header.split() == ["Rank", "Host", "Ended", "At", "Outcome"]
    assert len(rule) <= max(width, 64)
    for whole in ("12345", "signal:SIGTERM", "told by another"):
        assert whole in rows[0]
    at, until = header.index("At"), header.index("Outcome")
    assert "".join(one[at:until].strip() for one in rows) == LONG


def test_columns_that_yield_are_not_squeezed_to_letters() -> None:
    drawn = table("One", "Two", "Three", yielding=("One", "Two"))
    row(drawn, "some words that are many", "more", "x" * 60)
    header, _, first, *_ = shown(drawn, 40).splitlines()
    assert header.split() == ["One", "Two", "Three"]
    assert first.startswith("some words")


def test_a_paragraph_is_folded_between_words_alone() -> None:
    told = io.StringIO()
    text = f"The first failure, at 12:26:47.034: rank 1 on vm: raised OutOfData: epoch-3-is-it, at {LONG} load. \x1b[2J"
    paragraph(Console(file=told, width=60), text)
    lines = told.getvalue().splitlines()
    assert max(len(one) for one in lines if LONG not in one) <= 60
    assert LONG in lines
    assert " ".join(lines) == text.replace("\x1b", "\\x1b")


def test_the_width_is_that_of_a_log_unless_the_user_says_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console_on(io.StringIO()).width == 120
    monkeypatch.setenv("COLUMNS", "97")
    assert console_on(io.StringIO()).width == 97


def test_a_diagnosis_fits_and_tells_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    error = f"RuntimeError: {LONG.replace('/', ' ')} {CLOSED}"
    write_rank(tmp_path, 0, [*beats(22, 42, since=19), raised(0, 42, 22.5, error), ended("exception", 23, BROKEN)])
    write_rank(tmp_path, 1, [*beats(20, 41), ended("killed", 20)])
    environment = {"DD_PYTORCH_STATE_DIR": os.devnull}
    told = CliRunner().invoke(cli, ["diagnose", str(tmp_path)], env=environment).stdout
    _, *lines = told.splitlines()
    assert max(map(len, lines)) <= 120
    assert "…" not in told.replace("Connection closed by peer …", "").replace("peer […", "")
    assert "A rank" not in told
    words = " ".join(told.split())
    assert "all_reduce #42 of group `world` raised RuntimeError: data experiments a-team a-very-long-name" in words
