"""What a training process sees from inside while a process group stands: is it our integration, and it alone?"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from harness.job import Result

# What `pytorch.instrument` ends in where the process groups of this torch have hooks.
HOOKS = "+hooks" if tuple(int(part) for part in version("torch").split(".")[:2]) >= (2, 14) else ""

# Trains nothing: one process group of one process, and what can be seen from inside while it stands.
LOOK = """
    import gc, json, sys, threading
    import torch, wrapt
    import torch.distributed as dist
    import ddtrace.contrib.internal.pytorch.patch as slot
    from ddtrace_pytorch import autoload

    def of_torch(proxy):
        return (getattr(proxy, "__module__", None) or "").split(".")[0] == "torch"

    def look():
        dist.init_process_group("gloo")
        for passing in ("ddtrace_pytorch.store", "ddtrace_pytorch.recovery"):  # the first starts the second
            for thread in threading.enumerate():
                if thread.name == passing:
                    thread.join(30)
        kinds = (wrapt.ObjectProxy, getattr(wrapt, "BaseObjectProxy", wrapt.ObjectProxy))
        seen = {
            "slot": sorted({getattr(slot, name).__module__ for name in autoload.SLOT[slot.__name__]}),
            "wrapped": [str(thing.__name__) for thing in gc.get_objects() if issubclass(type(thing), kinds)
                        and of_torch(thing)],
            "hooks": len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
            "threads": sorted(thread.name for thread in threading.enumerate() if "MainThread" not in thread.name
                              and not thread.name.startswith(("ddtrace.", "Periodic"))),
            "door": autoload.opened_by,
        }
        dist.destroy_process_group()
        return seen
"""
SAY = "    print(json.dumps(look()))\n"

OURS: dict[str, Any] = {
    "slot": ["ddtrace_pytorch.patch"],
    "wrapped": [],
    "hooks": 1,
    "threads": ["ddtrace_pytorch.pulse", "ddtrace_pytorch.writer"],
}


def seen_by(result: Result) -> dict[str, Any]:
    """What a script that ends in `LOOK + SAY` saw."""
    facts: dict[str, Any] = json.loads(result.ok().stdout.splitlines()[-1])
    return facts


def ours_in(facts: dict[str, Any]) -> dict[str, Any]:
    """The part of it to compare with `OURS`."""
    return {name: facts[name] for name in OURS}
