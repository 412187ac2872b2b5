"""A command, or an option, that is nearly one: the user is told which."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from ddtrace_pytorch.cli.main import COMMANDS, cli

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["diagnos"], "diagnose"),
        (["Report", "."], "report"),
        (["timelien", "-o", "-"], "timeline"),
        (["profil"], "profile"),
        (["recover", "--al"], "--all"),
        (["diagnose", "--attemt", "1"], "--attempt"),
        (["--versoin"], "--version"),
    ],
)
def test_the_nearest_is_named(typed: list[str], meant: str) -> None:
    result = CliRunner().invoke(cli, typed)
    assert result.exit_code == 2
    assert meant in result.stderr.partition("Did you mean")[2]


def test_where_none_is_near_all_are_named() -> None:
    result = CliRunner().invoke(cli, ["xyzzy"])
    assert result.exit_code == 2
    assert "Did you mean" not in result.stderr
    assert f"the commands are {', '.join(sorted(COMMANDS))}" in result.stderr
