"""What the documents speak of is there: files and headings that they link to, settings, commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What names of settings begin with, where a whole family is meant.
FAMILIES = {"DD_PYTORCH_", "DD_PYTORCH_PROFILE_"}


def anchors(document: Path) -> set[str]:
    """Of its headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_what_it_links_to_is_there(document: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_the_settings_and_commands_it_names_are_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    known = {one.variable for one in settings.TABLE} | FAMILIES
    assert set(re.findall(r"\bDD_PYTORCH_\w*", text)) <= known
    assert set(re.findall(r"(?:^|`|\$ )ddtrace-pytorch ([a-z]+)", text, re.MULTILINE)) <= set(COMMANDS)


def test_every_setting_and_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [f"ddtrace-pytorch {command}" for command in COMMANDS if f"ddtrace-pytorch {command}" not in text]
    assert missing + [one.variable for one in settings.TABLE if f"`{one.variable}`" not in text] == []


def test_the_readme_says_of_settings_what_the_table_does() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| (.*) \|$", text, re.MULTILINE)
    assert rows == [(one.variable, f"`{one.default}`" if one.default else "–", one.meaning) for one in settings.TABLE]


def test_the_reference_of_settings_is_what_the_script_makes_of_the_table() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "settings-reference"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"run scripts/settings-reference\n{done.stdout}"
