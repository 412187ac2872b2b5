"""How each fault is done to this rank, in its own code, as users' jobs do it to themselves."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from harness.stalls.plan import Plan


class OutOfData(Exception):
    pass


def work(seconds: float) -> None:
    """Compute, at about half of a core: there are more ranks than cores."""
    matrix = torch.rand(64, 64)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(100):
            matrix = torch.tanh(matrix @ matrix)
        time.sleep(0.01)


class SlowFile(io.FileIO):
    """A checkpoint's file that takes long to write, because what it gets is encoded first."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__(path, "w")
        self._seconds = seconds

    def write(self, data: Any) -> int:
        work(self._seconds)
        self._seconds = 0
        return super().write(data)


def _save(plan: Plan, model: torch.nn.Module) -> None:
    with SlowFile(os.path.join(plan.directory, "model.pt"), plan.lasting) as file:
        torch.save(model.state_dict(), file)


def _compile(plan: Plan, model: torch.nn.Module) -> None:
    def slow(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        work(plan.lasting)
        return graph.forward

    torch.compile(model, backend=slow)(torch.rand(8, 32))


def _hold(plan: Plan, model: torch.nn.Module) -> None:
    # PyDLL, unlike CDLL, calls without giving the interpreter's lock away.
    ctypes.PyDLL(None).sleep(int(plan.lasting))


def _raise(plan: Plan, model: torch.nn.Module) -> None:
    raise OutOfData("epoch 3 is empty")


# What a rank does in its training loop, between two steps.
_INSIDE: dict[str, Callable[[Plan, torch.nn.Module], None]] = {
    "checkpoint": _save,
    "compile": _compile,
    "gil": _hold,
    "exception": _raise,
}

# What hits it wherever it is.
_ANYWHERE: dict[str, Callable[[], None]] = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(9),
}


def prepare(plan: Plan) -> None:
    """What a long job has behind it when the fault comes, and a short one has not."""
    if plan.fault == "compile":
        import torch._dynamo  # noqa: F401  # takes seconds


def between_steps(plan: Plan, rank: int, step: int, model: torch.nn.Module) -> None:
    """Do to this rank at this step what the plan has for it."""
    if plan.fault in ("slow", "late"):
        if rank == plan.rank and step >= plan.step:
            plan.struck()
            work(plan.lasting)
    elif plan.fault == "pause":
        if step >= plan.step and (step - plan.step) % 20 == 0:
            plan.struck()
            time.sleep(plan.lasting + rank * 0.2)
    elif not plan.strikes(rank, step):
        pass
    elif plan.fault in _INSIDE:
        plan.struck()
        _INSIDE[plan.fault](plan, model)
    elif plan.fault in _ANYWHERE:
        threading.Thread(target=_strike, args=(plan,), daemon=True).start()
    elif plan.fault in ("outside", "none"):
        plan.struck()


def _strike(plan: Plan) -> None:
    time.sleep(plan.delay)
    plan.struck()
    _ANYWHERE[plan.fault]()
