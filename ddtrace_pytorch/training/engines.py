"""Engines that step optimizers of their own: what they do at once is one step, however many optimizers step in it.

DeepSpeed's ZeRO steps its inner optimizer once for each group of parameters, or for each part of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddtrace_pytorch import autoload, in_place
from ddtrace_pytorch.border import leave_no_trace, safely
from ddtrace_pytorch.compiler import leave_uncompiled
from ddtrace_pytorch.stack import calls_of, code_in
from ddtrace_pytorch.training.steps import Steps

Undo = Callable[[], None]

# Module -> class and method that takes a step; `step` itself is called for each micro-batch.
ENGINES = {"deepspeed.runtime.engine": ("DeepSpeedEngine", "_take_model_step")}


def watch(steps: Steps, undo: list[Undo]) -> None:
    """Tell `steps` of each, also of engines imported later; what undoes it goes into `undo`."""
    for module in ENGINES:
        undo.append(autoload.after_import(module, functools.partial(_watch_module, steps, undo)))


@safely("follow an engine's steps")
def _watch_module(steps: Steps, undo: list[Undo], module: ModuleType) -> None:
    leave_uncompiled(calls_of.__code__, to_the_end=True)
    class_name, method = ENGINES[module.__name__]
    undo += in_place.place_in([getattr(module, class_name)], method, functools.partial(_around, steps))[0]


def _around(steps: Steps, original: Callable[..., Any]) -> Callable[..., Any]:
    entered = safely("follow an engine's step")(steps.engine_entered)
    left = safely("follow an engine's step")(steps.engine_left)

    @functools.wraps(original)
    def take_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        well = False
        try:
            entered(self, calls_of(TAKE_STEP))
            result = original(self, *args, **kwargs)
            well = True
        except BaseException as error:
            leave_no_trace(error)
            raise
        finally:
            left(well)
        return result

    return take_step


# Counted anew each time: a signal's handler may raise before one is left.
TAKE_STEP = code_in(_around, "take_step")
