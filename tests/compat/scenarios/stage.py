"""Plays the scenes of a script in a job, with the plugin or without, and writes down what came of each.

A script beside this one decorates functions with :func:`scene` and ends in :func:`play`. What a scene returns has to be
the same in both jobs; what it raises is a fault of the scene, unless it is :class:`Refused`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PATCHED = os.environ["PATCHED"] == "1"
if PATCHED:
    import ddtrace_pytorch

    ddtrace_pytorch.patch()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

scenes: dict[str, Callable[[], Any]] = {}


class Refused(Exception):
    """This torch, on this machine, has no such thing."""


def scene(function: Callable[[], Any]) -> Callable[[], Any]:
    scenes[function.__name__] = function
    return function


def play(a_life_each: bool = False) -> None:
    """All scenes in one life of the process group, or in `a_life_each`."""
    begin()
    rank = dist.get_rank()
    said: dict[str, Any] = {}
    for name, function in scenes.items():
        if said and a_life_each:
            dist.destroy_process_group()
            begin(name)
        torch.manual_seed(7)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                came = function()
            except Refused as refusal:
                said[name] = {"refused": str(refusal)}
                continue
            except Exception:
                said[name] = {"raised": traceback.format_exc()}
                break  # the ranks are no longer at the same place
        said[name] = {
            "came": came,
            "warnings": [(w.category.__name__, plain(str(w.message)), w.filename, w.lineno) for w in heard],
            "launched": launched(),
        }
        dist.barrier()
    dist.destroy_process_group()
    Path(os.environ["SAID"], f"{rank}.json").write_text(json.dumps(said))


def begin(life: str | None = None) -> None:
    """A store for each `life` but the first: torch finds the addresses of the one before in the launcher's."""
    where = {"init_method": f"file://{os.environ['WORK']}/{life}.store"} if life else {}
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", timeout=timedelta(seconds=30), **where, **place)


def launched() -> int:
    """How many collectives torch counts on the default group."""
    return int(dist.group.WORLD._get_sequence_number_for_group())


def bits(*tensors: Any) -> str:
    """All bits of `tensors`, as a fingerprint."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def plain(text: str) -> str:
    """`text` without what differs between any two runs: addresses, times, which of gloo's connections it was."""
    text = re.sub(r"\(\[[^]]*\]\S* <--> \[[^]]*\]\S*\)", "(… <--> …)", text)
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    return re.sub(r"\d+(\.\d+)?(?=\s?ms)|(?<=\]:)\d+", "…", text)


def failure(call: Callable[[], Any], tail: int | None = None) -> dict[str, Any]:
    """How `call` fails: the whole traceback, or its last `tail` frames; only the very last up to Python 3.10."""
    try:
        gave = call()
    except BaseException as error:
        if sys.version_info < (3, 11):
            tail = 1
        frames = traceback.extract_tb(error.__traceback__)[-(tail or 0) :]
        return {
            "type": kind(error),
            "text": plain(str(error)),
            "tail": [(frame.filename, frame.lineno, frame.name) for frame in frames],
            "context": kind(error.__context__),
            "cause": kind(error.__cause__),
            "notes": getattr(error, "__notes__", []),
        }
    return {"no error, but": kind(gave)}
