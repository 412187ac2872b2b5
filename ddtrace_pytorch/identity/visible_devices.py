"""``CUDA_VISIBLE_DEVICES``, read the way the driver reads it.

Seen with driver 580 on a host with two GPUs; the rules for MIG slices follow NVIDIA's guide and were not seen.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ORDINAL = re.compile(r"\s*([+-]?)0*(\d{1,9})(?!\d)", re.ASCII)
_OLD_SLICE = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/(\d{1,9})/(\d{1,9})", re.ASCII)
_UUID_LETTERS = 36


class Entry(NamedTuple):
    """One entry of ``CUDA_VISIBLE_DEVICES``: an `ordinal`, or a `uuid` (perhaps only its beginning).

    With `instance` the entry is ``MIG-<uuid of the GPU>/<GPU instance>/<compute instance>``, the spelling of drivers
    before 470, and `uuid` is the GPU's.
    """

    ordinal: int | None = None
    uuid: str = ""
    instance: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        if self.ordinal is not None:
            return "ordinal"
        return "MIG" if self.instance else self.uuid[:3]


def visible_entries(text: str | None) -> tuple[Entry, ...] | None:
    """``CUDA_VISIBLE_DEVICES`` as the driver reads it; None (unset) means every GPU, an empty tuple none.

    The list ends before the first entry that is no device name, or not of the first one's kind: ``0,,1`` is GPU 0, and
    so is ``GPU-…,1``'s first. An integer may have blanks before it and anything after it. A UUID may be cut short, its
    prefix is in capitals and nothing comes before it. A device named twice hides them all.
    """
    if text is None:
        return None
    entries: list[Entry] = []
    for part in text.split(","):
        entry = _entry(part)
        if entry is None or (entries and entry.kind != entries[0].kind):
            break
        if entry in entries:
            return ()
        entries.append(entry)
    return tuple(entries)


def canonical_uuid(text: str) -> str:
    """One spelling for what torch prints (bare), NVML prints (``GPU-…``) and people type: prefix, then lower case."""
    bare = text.strip()
    prefix = bare[:4].upper()
    if prefix in ("GPU-", "MIG-"):
        return prefix + bare[4:].lower()
    return "GPU-" + bare.lower()


def _entry(part: str) -> Entry | None:
    ordinal = _ORDINAL.match(part)
    if ordinal:
        sign, digits = ordinal.groups()
        number = int(digits)
        return None if sign == "-" and number else Entry(ordinal=number)
    old = _OLD_SLICE.match(part)
    if old:
        gpu, *instance = old.groups()
        return Entry(uuid=canonical_uuid(gpu), instance=(int(instance[0]), int(instance[1])))
    prefix, rest = part[:4], part[4 : 4 + _UUID_LETTERS]
    if prefix in ("GPU-", "MIG-") and rest:
        return Entry(uuid=prefix + rest.lower())
    return None
