"""What the torch at hand has, of what not every release has."""

from __future__ import annotations

import re

import torch

from ddtrace_pytorch.collectives.surface import OPERATIONS, release_of

RELEASE = release_of(torch.__version__)

# The first release in which gloo does it, where that isn't the first we support; before, it raises.
GLOO = {
    "all_gather_into_tensor": (2, 2),
    "reduce_scatter_tensor": (2, 2),
    "reduce_scatter": (2, 8),
    "all_to_all": (2, 12),
}

# Of the functions in the table, those that can't be called here.
MISSING = frozenset(row.function for row in OPERATIONS if not row.exists_in(RELEASE)) | frozenset(
    name for name, since in GLOO.items() if since > RELEASE
)


def without(script: str, missing: frozenset[str] = MISSING) -> str:
    """`script` without the lines that call what is `missing`."""
    calls = re.compile(rf"\b({'|'.join(missing)})\(") if missing else None
    return "\n".join(line for line in script.splitlines() if calls is None or not calls.search(line))
