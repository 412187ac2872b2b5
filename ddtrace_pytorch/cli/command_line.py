"""What a job's command line and the scripts it names say of how ddtrace gets into the job."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_SCRIPT = 1 << 20

DDTRACE_RUN_MODULE = "ddtrace.commands.ddtrace_run"
# Modules that start what comes behind them.
_LAUNCHERS = (DDTRACE_RUN_MODULE, "torch.distributed.run", "torch.distributed.launch")
# Not an option, whatever that ends in.
_SCRIPT = re.compile(r"[^-].*\.(?:py|sh|bash)", re.DOTALL)

# Lines of a script of any language; what follows a # in them counts for nothing.
_OPENS = re.compile(r"^[^#]*(?<![\w.])(?:ddtrace-run\b|ddtrace\.auto\b|from\s+ddtrace\s+import\s+auto\b)")
_PATCHES = re.compile(r"^[^#]*(?<![\w.])(?:ddtrace_pytorch\.patch\(|(?:ddtrace\.)?patch\([^#)]*pytorch\s*=\s*True)")


@dataclass(frozen=True)
class CommandLine:
    """`opened_by` says what lets ddtrace in, to do what DD_PATCH_MODULES asks for: a word, or a script's ``file:line``.
    `patched_by` is the line that switches tracing on by itself, `missing` the script that is run and isn't there. None
    where there is no such thing."""

    words: tuple[str, ...]
    opened_by: str | None
    patched_by: str | None
    missing: str | None

    def __str__(self) -> str:
        return shlex.join(self.words)


def look_at(words: Sequence[str]) -> CommandLine:
    """What can be told of `words` without running them: a script that imports another one hides what that does."""
    runs = (word for word in words if os.path.basename(word) == "ddtrace-run" or word == DDTRACE_RUN_MODULE)
    opened_by = next(runs, None) or _first_line(words, _OPENS)
    return CommandLine(tuple(words), opened_by, _first_line(words, _PATCHES), _missing(words))


def _missing(words: Sequence[str]) -> str | None:
    """The script that `words` run, if it isn't there; what comes behind a script or a module is its own affair."""
    for before, word in pairwise(("", *words)):
        if before in ("-m", "-c", "--module") and word not in _LAUNCHERS:
            return None
        if _SCRIPT.fullmatch(word):
            return None if os.path.isfile(word) else word
    return None


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
