"""Whether memory stays flat: resident size while a session counts a million collectives.

python benchmarks/memory.py [--calls 1000000]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path

from _machine import describe
from _resident import resident_mib
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def settled_mib() -> float:
    gc.collect()
    return resident_mib()


def growth_mib(calls: int) -> float:
    """MiB that a session grows by over `calls` collectives, after a tenth as many for a warm-up."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import ddtrace_pytorch

    ddtrace_pytorch.patch()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    tensor = torch.ones(1)

    def work(many: int) -> None:
        for turn in range(many):
            if turn % 4:
                dist.all_reduce(tensor)
            else:
                waiting = dist.all_reduce(tensor, async_op=True)
                if waiting is not None and turn % 8:
                    waiting.wait()

    work(calls // 10)
    before = settled_mib()
    work(calls)
    grown = settled_mib() - before
    dist.destroy_process_group()
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    calls = parser.parse_args().calls
    machine = describe()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "DD_PYTORCH_EXPORT": "local",
            "DD_PYTORCH_LOG_DIR": folder,
            "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
            "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
            "DD_REMOTE_CONFIGURATION_ENABLED": "false",
        }
        grown = growth_mib(calls)
    publish("memory", machine, [Measured(f"resident size after {calls:,} collectives", grown, "MiB", 1.0, 1)])


if __name__ == "__main__":
    main()
