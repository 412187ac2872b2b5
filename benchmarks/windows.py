"""What profiler windows leave behind in a training on a GPU: time in the steps after, time in all, memory.

    python benchmarks/windows.py [--processes 5] [--ranks 2]

A step's time is by the clock, from one synchronised end to the next. Three trainings:

- a small one whose time is the host's, launching kernels one by one, where a profiler that stays attached shows most:
  the median of the steps after two windows over that of the steps before the first one, in processes by themselves,
  in turn with windows, with none (`control`) and with windows that leave CUPTI attached (`TEARDOWN_CUPTI=0`);
- an 8-layer bf16 transformer under FSDP2: what a window of 2 steps takes in all, as what the steps around it took above
  their median, from its warm-up on until it has been read and written; of the first in a process, that loads the
  profiler, and of the ones after. As a part of ten minutes it has a budget;
- the small one with a window every 25 steps: what it grows by with each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from _machine import describe
from _quiet import environment
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SMALL, LARGE = "small", "large"
TEN_MINUTES, SHARE = 600.0, 1e-4
# Steps from a window's first on until it has been written, and before it, its warm-up among them.
AROUND, AHEAD = 20, 3
WARM_UP = 100
EVERY_AFTER, EVERY_COST, EVERY_MEMORY = 400, 60, 25
WINDOWS_COST, WINDOWS_MEMORY = 10, 200


def small_step() -> Any:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(16)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    batch = torch.randn(16, 128, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def every(steps: int) -> dict[str, str]:
    return {"DD_PYTORCH_PROFILE_EVERY": str(steps)}


def resident_kib() -> float:
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


def train(kind: str, steps: int, out: Path) -> None:
    """One rank of a job; rank 0 writes what its steps took, in ms, and how large it was after each, in KiB."""
    import torch
    import torch.distributed as dist
    from training_step import gpu_step

    import ddtrace_pytorch

    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ddtrace_pytorch.patch()
    dist.init_process_group("nccl")
    step = small_step() if kind == SMALL else gpu_step(sharded=True)
    took, resident = [], []
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - started) * 1e3)
        resident.append(resident_kib())
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"took": took, "resident": resident}), encoding="utf-8")
    dist.destroy_process_group()


def job(kind: str, steps: int, variables: dict[str, str], ranks: int = 1) -> tuple[list[float], list[float], list[int]]:
    """What each step took, how large rank 0 was after it, and the first steps of its windows."""
    from ddtrace_pytorch.runlog.reader import read, scan

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
            "--train", kind, "--steps", str(steps), "--out", str(out),
        ]  # fmt: skip
        subprocess.run(command, env=environment(folder) | variables, check=True)
        found = json.loads(out.read_text(encoding="utf-8"))
        logs = [log for log in scan(str(Path(folder, "log"))).logs if log.rank == 0]
        told = [record for log in logs for record in read(log, ("profile",))]
        other = {(one["state"], one.get("why")) for one in told if one["state"] != "complete"}
        if other:
            print(kind, "windows that are not complete:", other, file=sys.stderr)
        return found["took"], found["resident"], [one["step"] for one in told if one["state"] == "complete"]


def after_over_before(variables: dict[str, str]) -> float:
    """Of one process of its own."""
    steps = 2 * EVERY_AFTER + EVERY_AFTER - WARM_UP
    took, _, windows = job(SMALL, steps, variables)
    expected = [EVERY_AFTER, 2 * EVERY_AFTER] if "DD_PYTORCH_PROFILE_EVERY" in variables else []
    if windows != expected:
        raise SystemExit(f"there were windows at {windows}, expected at {expected}")
    before = took[WARM_UP : EVERY_AFTER - AHEAD]
    after = took[2 * EVERY_AFTER + 2 * AROUND :]
    return median(after) / median(before)


def costs(ranks: int) -> list[float]:
    """Seconds that each window took, in their order."""
    steps = EVERY_COST * (WINDOWS_COST + 1)
    took, _, windows = job(LARGE, steps, every(EVERY_COST), ranks)
    usual = median(took[WARM_UP // 5 :])
    print(f"a step of the transformer took {usual:.2f} ms", file=sys.stderr)
    return [sum(took[at - 1 - AHEAD : at - 1 + AROUND]) / 1e3 - (AHEAD + AROUND) * usual / 1e3 for at in windows]


def growth() -> tuple[float, int]:
    """KiB that the process grows by with each window, and how many there were."""
    _, resident, windows = job(SMALL, EVERY_MEMORY * (WINDOWS_MEMORY + 1), every(EVERY_MEMORY))
    settled = windows[len(windows) // 10 :]
    sizes = [resident[at + EVERY_MEMORY - 3] for at in settled]
    return linear_regression(range(len(sizes)), sizes).slope, len(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--train", choices=(SMALL, LARGE), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.out)
        return

    machine = describe()
    kinds: dict[str, tuple[dict[str, str], float | None]] = {
        "with windows": (every(EVERY_AFTER), 101.0),
        "control": ({}, None),
        "with windows, TEARDOWN_CUPTI=0": (every(EVERY_AFTER) | {"TEARDOWN_CUPTI": "0"}, None),
    }
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.processes):
        for kind, (variables, _budget) in kinds.items():
            ratios[kind].append(after_over_before(variables))
    print(ratios, file=sys.stderr)
    rows = [
        Measured(f"a step after windows, of one before, {kind}", median(of) * 100, "%", budget, len(of))
        for (kind, (_, budget)), of in zip(kinds.items(), ratios.values(), strict=True)
    ]
    first, *later = costs(options.ranks)
    print(first, later, file=sys.stderr)
    rows += [
        Measured("the first window in a process", first * 1e3, "ms", None, 1),
        Measured("a later one, each ten minutes", median(later) * 1e3, "ms", SHARE * TEN_MINUTES * 1e3, len(later)),
    ]
    grown, windows = growth()
    rows.append(Measured("growth with each window", grown, "KiB", 10.0, windows))
    publish("windows", machine, rows)


if __name__ == "__main__":
    main()
