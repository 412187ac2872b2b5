"""What a job's command line and the scripts it names say of how ddtrace gets into the job."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SCRIPT = 1 << 20

# Lines of a script of any language; what follows a # in them counts for nothing.
_OPENS = re.compile(r"^[^#]*(?<![\w.])(?:ddtrace-run\b|ddtrace\.auto\b|from\s+ddtrace\s+import\s+auto\b)")
_PATCHES = re.compile(r"^[^#]*(?<![\w.])(?:ddtrace_pytorch\.patch\(|(?:ddtrace\.)?patch\([^#)]*pytorch\s*=\s*True)")


@dataclass(frozen=True)
class CommandLine:
    """`opened_by` says what lets ddtrace in, to do what DD_PATCH_MODULES asks for: a word, or a script's ``file:line``.
    `patched_by` is the line that switches tracing on by itself. None where there is no such thing."""

    words: tuple[str, ...]
    opened_by: str | None
    patched_by: str | None

    def __str__(self) -> str:
        return shlex.join(self.words)


def look_at(words: Sequence[str]) -> CommandLine:
    """What can be told of `words` without running them: a script that imports another one hides what that does."""
    runs = (word for word in words if os.path.basename(word) == "ddtrace-run" or word == "ddtrace.commands.ddtrace_run")
    return CommandLine(tuple(words), next(runs, None) or _first_line(words, _OPENS), _first_line(words, _PATCHES))


def _first_line(words: Sequence[str], wanted: re.Pattern[str]) -> str | None:
    for word in words:
        for number, line in enumerate(_lines(word), 1):
            if wanted.search(line):
                return f"{word}:{number}"
    return None


def _lines(path: str) -> list[str]:
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > MAX_SCRIPT:
            return []
        with open(path, encoding="utf-8", errors="replace") as script:
            return script.readlines()
    except OSError:
        return []
