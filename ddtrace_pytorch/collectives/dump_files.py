"""Flight recorder dumps that torch left as files, one of each rank: JSON, or the pickles that NCCL's watchdog writes.

Files are somebody else's data: of a pickle nothing is taken but plain data, and one that asks for more is refused.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from typing import Any, NoReturn

from ddtrace_pytorch.collectives.flight_recorder import Entry, entry_of

# Some 100,000 entries with their stacks; the default is 2,000.
MAX_BYTES = 256 << 20

# Not every trace is one: those of profilers are large.
_NAME = re.compile(
    r"(?:.*[-_.])?(?:nccl|gloo|fr|comm_lib|flight)[-_.]?(?:.*\D)?(\d{1,9})(?:\.(?:json|pickle|pkl))?", re.ASCII
)


class _PlainData(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, and only plain data is read")


def is_dump(name: str) -> bool:
    """Whether a file of that name may be one: ``nccl_trace_rank_3``, ``comm_lib_trace_rank_3``, ``fr_dump_3.json``."""
    return _NAME.fullmatch(name) is not None


def rank_of(path: str) -> int:
    """The rank whose dump that is, by its name."""
    match = _NAME.fullmatch(os.path.basename(path))
    assert match is not None, path
    return int(match[1])


def read(path: str) -> list[Entry]:
    """The entries of one dump, oldest first.

    Raises:
        ValueError: it can't be read, or is none; the message says why.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        said = _decoded(data)
        return [entry_of(one) for one in said.get("entries", ())]
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error
    # A pickle that was cut short raises whatever its last instruction happens to.
    except Exception as error:
        raise ValueError(f"it is no dump of a flight recorder ({type(error).__name__})") from error


def _decoded(data: bytes) -> dict[str, Any]:
    said = _PlainData(io.BytesIO(data)).load() if data[:1] == b"\x80" else json.loads(data)
    if not isinstance(said, dict) or not said.keys() & {"entries", "pg_status", "pg_config"}:
        raise TypeError
    return said
