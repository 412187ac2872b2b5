"""How much later a job ends for being traced, with no Agent and with one that accepts and never answers.

    .demo/venv/bin/python benchmarks/exit_delay.py [--runs 5]

Needs the package installed, so that `ddtrace-run` finds it. Measured from the last line of the user's script to
the end of the process; of several ranks the slowest counts.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from _machine import describe
from _results import Measured, publish

JOB = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(20):
    dist.all_reduce(torch.ones(1000))
traced = "ddtrace_pytorch.session" in sys.modules
assert traced == (os.environ["EXPECT_TRACED"] == "yes"), f"traced: {traced}"
dist.destroy_process_group()
print(time.time(), flush=True)
"""


@dataclass(frozen=True)
class Way:
    """A way to start the job: its name, the command before `python`, and its environment."""

    name: str
    launcher: tuple[str, ...]
    environ: dict[str, str]
    allowed: float | None  # seconds over the plain run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mute_agent() -> socket.socket:
    """A listener whose backlog accepts connections that nobody ever answers."""
    return socket.create_server(("127.0.0.1", 0), backlog=256)


def exit_seconds(way: Way, job: str, world_size: int, log_dir: str) -> float:
    """Seconds from the script's last line to the end of its process, the slowest rank's."""
    shared = {
        **os.environ,
        **way.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "DD_PYTORCH_LOG_DIR": log_dir,
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    }
    ranks = [
        subprocess.Popen(
            [*way.launcher, sys.executable, job],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    ended = [0.0] * world_size

    def wait(rank: int) -> None:
        ranks[rank].wait()
        ended[rank] = time.time()

    waiters = [threading.Thread(target=wait, args=(rank,)) for rank in range(world_size)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    outputs = [process.communicate()[0] for process in ranks]
    failed = [process.returncode for process in ranks if process.returncode]
    if failed:
        sys.exit(f"{way.name}: the job failed with {failed}")
    return max(end - float(output.split()[-1]) for end, output in zip(ended, outputs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    machine = describe()
    ddtrace_run = str(Path(sys.executable).with_name("ddtrace-run"))
    traced = {"DD_PATCH_MODULES": "pytorch:true", "EXPECT_TRACED": "yes"}
    rows = []
    with mute_agent() as listener, tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.py")
        job.write_text(JOB, encoding="utf-8")
        nobody = f"http://127.0.0.1:{free_port()}"
        mute = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ways = (
            Way("plain", (), {"EXPECT_TRACED": "no"}, None),
            Way("traced, no Agent", (ddtrace_run,), traced | {"DD_TRACE_AGENT_URL": nobody}, 1.0),
            Way("traced, mute Agent", (ddtrace_run,), traced | {"DD_TRACE_AGENT_URL": mute}, 2.0),
        )
        for world_size in (1, 2):
            seconds: dict[str, list[float]] = {way.name: [] for way in ways}
            for turn in range(runs):
                print(f"{world_size} rank(s), turn {turn + 1} of {runs} ...", flush=True)
                for way in ways:
                    seconds[way.name].append(exit_seconds(way, str(job), world_size, folder))
            plain = median(seconds["plain"])
            rows.append(Measured(f"exit of {world_size} rank(s), plain", plain, "s", None, runs))
            for way in ways[1:]:
                pairs = zip(seconds[way.name], seconds["plain"], strict=True)
                added = median(with_us - without for with_us, without in pairs)
                rows.append(Measured(f"added to it: {way.name}", added, "s", way.allowed, runs))
    publish("exit_delay", machine, rows)


if __name__ == "__main__":
    main()
