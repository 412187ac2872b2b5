"""What following the steps of a training costs: an optimizer step with a session of ours open, and without us.

    python benchmarks/steps.py [--rounds 30]

One process, the two in turn: patched with a process group open on which a dozen operations were used, and unpatched
with none. The model is one weight, so that the step itself costs little. `thread`: processor time of the thread that
trains, per step; `process`: of all threads, so with what the Pulse and the writer do of each step afterwards. The run
log is on, as it is without an Agent. Then memory: what the process grows by from the 100,000th step to the 200,000th.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from _machine import describe
from _resident import resident_mib
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent
STEPS = 2_000
MANY = 100_000


def stepper() -> Any:
    import torch

    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.0)


def block(steps: int = STEPS) -> tuple[float, float]:
    """µs a step: of the thread, and of the process."""
    optimizer = stepper()
    thread, process = time.thread_time(), time.process_time()
    for _ in range(steps):
        optimizer.step()
    taken = time.thread_time() - thread
    # What the other threads have to do with them is done within the next beat.
    time.sleep(1.2)
    return taken / steps * 1e6, (time.process_time() - process) / steps * 1e6


def with_us(warm_up: int = 200, steps: int = STEPS) -> tuple[float, float, float]:
    """As :func:`block`, after so many other steps, and by how many MiB the process grew."""
    import torch
    import torch.distributed as dist

    import ddtrace_pytorch

    ddtrace_pytorch.patch()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    for group in (None, *(dist.new_group([0, 1]) for _ in range(3))):
        dist.all_reduce(torch.ones(1), group=group)
        dist.broadcast(torch.ones(1), 0, group=group)
        dist.barrier(group=group)
    block(warm_up)
    before = resident_mib()
    thread, process = block(steps)
    grown = resident_mib() - before
    dist.destroy_process_group()
    ddtrace_pytorch.unpatch()
    return thread, process, grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    machine = describe()
    sys.path.insert(0, str(ROOT))
    os.environ["DD_TRACE_AGENT_URL"] = "http://127.0.0.1:9"
    os.environ["DD_INSTRUMENTATION_TELEMETRY_ENABLED"] = "false"
    with tempfile.TemporaryDirectory() as log:
        os.environ |= {"DD_PYTORCH_EXPORT": "local", "DD_PYTORCH_LOG_DIR": log}
        import torch.testing._internal.distributed.fake_pg  # noqa: F401

        block(200), with_us()
        plain, ours = [], []
        for turn in range(rounds):
            print(f"\rround {turn + 1} of {rounds}", end="", flush=True)
            for is_ours in (turn % 2 == 0, turn % 2 == 1):
                if is_ours:
                    ours.append(with_us()[:2])
                else:
                    plain.append(block())
        *_, grown = with_us(MANY, MANY)
    print()
    added = [median(one[which] for one in ours) - median(one[which] for one in plain) for which in (0, 1)]
    publish(
        "steps",
        machine,
        [
            Measured(
                "a step of an optimizer of one weight, without us", median(one[0] for one in plain), "µs", None, rounds
            ),
            Measured("added to it on the thread that trains", added[0], "µs", 10.0, rounds),
            Measured("and, with what other threads do of it, in the process", added[1], "µs", None, rounds),
            Measured(f"memory, from the {MANY:,}th step to {MANY:,} more", grown, "MiB", 1.0, 1),
        ],
    )


if __name__ == "__main__":
    main()
