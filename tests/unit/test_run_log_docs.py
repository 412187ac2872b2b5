"""docs/run-log.md says what the schema does."""

from __future__ import annotations

import re
from pathlib import Path

from ddtrace_pytorch.runlog.schema import RECORDS, SCHEMA_VERSION

DOCS = Path(__file__).parents[2] / "docs" / "run-log.md"


def test_each_type_and_field_is_documented_and_nothing_else() -> None:
    text = DOCS.read_text(encoding="utf-8").partition("\n## Records")[2].partition("\n## ")[0]
    documented = {}
    for section in text.split("\n### ")[1:]:
        kind = re.match(r"`(\w+)`", section)
        assert kind is not None
        rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        documented[kind[1]] = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == {kind: set(fields) for kind, fields in RECORDS.items()}
    assert f"version of what is described here: {SCHEMA_VERSION} |" in text
