"""What profiler windows leave behind in a training on a GPU: time in the steps after, time in all, memory.

    python benchmarks/windows.py [--with sampler] [--processes 20] [--ranks 2]

A step's time is by the clock, from one synchronised end to the next. Three trainings:

- a small one whose time is the host's, launching kernels one by one, where a profiler that stays attached shows most:
  the median of the 60 steps that follow a process' first window, 20 steps after it, over that of the 60 before it; in
  processes by themselves, in turn with a window and with none (`control`);
- the same with 200 windows, one every 50 steps: what the process grows by with each, and for each but the first the
  20 steps after it over the 20 before it;
- an 8-layer bf16 transformer under FSDP2 with 30 windows: what one of 2 steps takes in all, which has a budget as a
  part of ten minutes: for each of the steps around it, from the warm-up on until it has been read and written, the
  median over the windows, above the median of all steps.

`--with torch` takes them with torch's profiler instead, and has two rows more: what a process grows by with that alone,
and steps after a window of it that leaves CUPTI attached.

With a ratio stands the 95 % interval that the order of the single ones gives.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression, median

from _machine import describe
from _quiet import environment
from _resident import resident_mib
from _results import Measured, publish, say
from ddp_loop import interval

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TEN_MINUTES, SHARE = 600.0, 1e-4
# Steps from a window's first on until it has been written, and before it, its warm-up among them.
AROUND, AHEAD = 20, 3
WARM_UP = 100
# Steps that are compared before and after a window.
FIRST, LATER = 60, 20
EVERY_FIRST = WARM_UP + FIRST + AHEAD
EVERY_COST, EVERY_MEMORY = 40, 50
WINDOWS_COST, WINDOWS_MEMORY = 30, 200


def small_step() -> Callable[[], None]:
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


def scheduled(taken_with: str, steps: int) -> dict[str, str]:
    return {"DD_PYTORCH_PROFILE_WITH": taken_with, "DD_PYTORCH_PROFILE_EVERY": str(steps)}


def train(step: Callable[[], None], steps: int) -> dict[str, list[float]]:
    """In a group: what each step took, in ms, and how large the process was then, in KiB."""
    import torch

    found: dict[str, list[float]] = {"took": [], "resident": []}
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found["took"].append((time.perf_counter() - started) * 1e3)
        found["resident"].append(resident_mib() * 1024)
    return found


def rank(steps: int, out: Path) -> None:
    """One of a job that torchrun started; rank 0 writes `out`."""
    import torch
    import torch.distributed as dist
    from training_step import gpu_step

    import ddtrace_pytorch

    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ddtrace_pytorch.patch()
    dist.init_process_group("nccl")
    found = train(gpu_step(sharded=True), steps)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def alone(steps: int, variables: dict[str, str], said: Connection) -> None:
    """A process that was forked before CUDA was begun with."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= variables
    import ddtrace_pytorch

    ddtrace_pytorch.patch()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said.send(train(small_step(), steps))
    dist.destroy_process_group()


def torch_alone(steps: int, variables: dict[str, str], said: Connection) -> None:
    """The same, without a session; says the sizes alone. Its windows are dropped unread."""
    import torch

    torch.set_num_threads(1)
    os.environ |= variables
    from ddtrace_pytorch.kernels.window import Options, Window, prepare_environment

    prepare_environment(torch, first=True)
    step = small_step()
    sizes: list[float] = []
    for _ in range(steps // EVERY_MEMORY):
        train(step, EVERY_MEMORY - AHEAD)
        window = Window(torch, Options(cpu=False, gpu=True))
        window.prepare()
        step()
        window.start(0, 1, "none")
        step()
        step()
        window.settle()
        window.end()
        sizes.append(resident_mib() * 1024)
    said.send({"resident": sizes})


Every = Callable[[int], dict[str, str]]
Found = tuple[dict[str, list[float]], list[int]]


def job(steps: int, variables: dict[str, str], ranks: int) -> Found:
    """Of the large one: of rank 0 what :func:`train` found, and the first steps of its windows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
            "--steps", str(steps), "--out", str(out),
        ]  # fmt: skip
        subprocess.run(command, env=environment(folder) | variables, check=True)
        return json.loads(out.read_text(encoding="utf-8")), windows_in(folder)


def process(steps: int, variables: dict[str, str], what: Callable[..., None] = alone) -> Found:
    """The same of the small one, in a process by itself."""
    import torch  # once for all that are forked

    assert not torch.cuda.is_initialized()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        heard, said = context.Pipe(duplex=False)
        child = context.Process(target=what, args=(steps, environment(folder) | variables, said))
        child.start()
        said.close()
        found = heard.recv()
        child.join()
        return found, windows_in(folder)


def windows_in(folder: str) -> list[int]:
    """The first steps of those that rank 0 took whole; of others it is said why."""
    from ddtrace_pytorch.runlog.reader import read, scan

    logs = [log for log in scan(str(Path(folder, "log"))).logs if log.rank == 0]
    told = [record for log in logs for record in read(log, ("profile",))]
    for why in {f"{one['state']}: {one.get('why')}" for one in told if one["state"] != "complete"}:
        print("a window is", why, file=sys.stderr)
    return [one["step"] for one in told if one["state"] == "complete"]


def ratio(took: list[float], window: int, steps: int) -> float:
    """Of a window that began with the step of that number, from 1 on: so many steps after it, over as many before."""
    first = window - 1
    return median(took[first + AROUND : first + AROUND + steps]) / median(took[first - AHEAD - steps : first - AHEAD])


def after_the_first(variables: dict[str, str]) -> float:
    """Of one process of its own."""
    found, windows = process(EVERY_FIRST + AROUND + FIRST, variables)
    expected = [EVERY_FIRST] if "DD_PYTORCH_PROFILE_EVERY" in variables else []
    if windows != expected:
        raise SystemExit(f"there were windows at {windows}, expected at {expected}")
    return ratio(found["took"], EVERY_FIRST, FIRST)


def cost(ranks: int, every: Every) -> tuple[float, float, int]:
    """ms that the first window took, that each later one takes, and how many there were of these."""
    found, (first, *later) = job(EVERY_COST * (WINDOWS_COST + 1), every(EVERY_COST), ranks)
    took = found["took"]
    usual = median(took[EVERY_COST:])
    print(f"a step of the transformer took {usual:.2f} ms", file=sys.stderr)

    def above(windows: list[int]) -> float:
        return sum(median(took[at - 1 + place] for at in windows) - usual for place in range(-AHEAD, AROUND))

    return above([first]), above(later), len(later)


def many(every: Every) -> tuple[float, list[float]]:
    """KiB that the process grows by with each window, and the ratios of all but the first."""
    found, windows = process(EVERY_MEMORY * (WINDOWS_MEMORY + 1), every(EVERY_MEMORY))
    sizes = [found["resident"][at + EVERY_MEMORY - AHEAD] for at in windows]
    ratios = [ratio(found["took"], at, LATER) for at in windows[1:]]
    return slope(sizes), ratios


def slope(sizes: list[float]) -> float:
    """KiB with each window, once the first tenth of them has been."""
    settled = sizes[len(sizes) // 10 :]
    return linear_regression(range(len(settled)), settled).slope


def compared(what: str, ratios: list[float], budget: float | None) -> Measured:
    low, high = interval(ratios)
    within = f"{what} ({low * 100:.1f} to {high * 100:.1f} %)"
    return Measured(within, median(ratios) * 100, "%", budget, len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="taken_with", choices=("sampler", "torch"), default="sampler")
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        rank(options.steps, options.out)
        return

    every = partial(scheduled, options.taken_with)
    machine = describe()
    rows: list[Measured] = []
    first_took, took, windows = cost(options.ranks, every)
    say(
        rows,
        Measured("the first window in a process", first_took, "ms", None, 1),
        Measured("a later one, each ten minutes", took, "ms", SHARE * TEN_MINUTES * 1e3, windows),
    )
    grown, later = many(every)
    say(
        rows,
        Measured("growth with each window", grown, "KiB", 10.0, len(later) + 1),
        compared("a step after a later window, of one before", later, 101.0),
    )
    kinds: dict[str, tuple[dict[str, str], int, float | None]] = {
        "control": ({}, options.processes, None),
        "with a window": (every(EVERY_FIRST), options.processes, 101.0),
    }
    if options.taken_with == "torch":
        bare, _ = process(EVERY_MEMORY * WINDOWS_MEMORY, {}, torch_alone)
        grown = slope(bare["resident"])
        say(rows, Measured("growth with each window, torch alone", grown, "KiB", None, WINDOWS_MEMORY))
        attached = every(EVERY_FIRST) | {"TEARDOWN_CUPTI": "0"}
        kinds["with one, TEARDOWN_CUPTI=0"] = attached, options.processes // 4, None
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(options.processes):
        for kind, (variables, times, _) in kinds.items():
            if turn < times:
                ratios[kind].append(after_the_first(variables))
    say(
        rows,
        *(
            compared(f"a step after the first window, of one before, {kind}", ratios[kind], budget)
            for kind, (_, _, budget) in kinds.items()
        ),
    )
    publish(f"windows-{options.taken_with}", machine, rows)


if __name__ == "__main__":
    main()
