"""Which framework shards or replicates the model: told by the wrapper class the user makes, at no import cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ddtrace_pytorch import autoload
from ddtrace_pytorch.border import safely

Undo = Callable[[], None]


@dataclass(frozen=True)
class Framework:
    """One row: making an instance of `module`.`class_name` says `word`."""

    word: str
    module: str
    class_name: str


# The built-in integration's words, the strongest last: DeepSpeed wraps in DDP, FSDP can sit beside it.
FRAMEWORKS: tuple[Framework, ...] = (
    Framework("ddp", "torch.nn.parallel.distributed", "DistributedDataParallel"),
    Framework("fsdp", "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    Framework("deepspeed", "deepspeed.runtime.engine", "DeepSpeedEngine"),
)

STRENGTH = {"none": -1} | {row.word: strength for strength, row in enumerate(FRAMEWORKS)}


def stronger(known: str, seen: str) -> str:
    """The one of two words that says more; a word of somebody else's making is kept."""
    return seen if STRENGTH[seen] > STRENGTH.get(known, len(STRENGTH)) else known


def watch(seen: Callable[[str], object], undo: list[Undo]) -> None:
    """Call `seen` with the word of each framework put to use, also of one imported later; what undoes it goes into
    `undo`."""
    for row in FRAMEWORKS:
        undo.append(autoload.after_import(row.module, functools.partial(_watch_class, row, seen, undo)))


@safely("watch for a framework")
def _watch_class(row: Framework, seen: Callable[[str], object], undo: list[Undo], module: ModuleType) -> None:
    kind = getattr(module, row.class_name)
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        seen(row.word)

    kind.__init__ = __init__

    def give_back() -> None:
        if kind.__init__ is __init__:
            kind.__init__ = original

    undo.append(give_back)
