"""Reading run logs in tests, independently of the product's own reader."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def records(root: Path) -> list[Record]:
    """Every whole record of every segment below `root`, each with its file under ``_file``."""
    found: list[Record] = []
    for path in sorted(root.rglob("rank-*.jsonl*")):
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
        found += [json.loads(line) | {"_file": str(path)} for line in lines if line.strip()]
    return found


def of_type(root: Path, kind: str) -> list[Record]:
    return [record for record in records(root) if record["type"] == kind]


def rank_spans(root: Path) -> list[Record]:
    """The finished pieces of rank spans, by rank and start."""
    pieces = [record for record in of_type(root, "span") if record["name"] == "pytorch.rank"]
    return sorted(pieces, key=lambda span: (span["metrics"]["rank"], span["start"]))
