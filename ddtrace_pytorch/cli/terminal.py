"""What every subcommand prints with: text of somebody else's must neither act on a terminal nor be taken for markup."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from rich.console import Console

# Columns of what is piped: what a log, or a ticket, shows without scrolling.
PIPED = 120


def standard_output() -> Console:
    """A console on standard output that takes everything literally."""
    return console_on(sys.stdout)


def console_on(stream: TextIO) -> Console:
    """A console that takes everything literally."""
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPED
    return Console(file=stream, markup=False, highlight=False, emoji=False, width=width)
