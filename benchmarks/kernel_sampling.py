"""What it costs to count the kernels of one step in so many, and whether all are counted; needs a GPU or more.

    python benchmarks/kernel_sampling.py [--ranks 2] [--steps 400]

A step's time is by the clock, from one synchronised end to the next; those that were counted are in the run log. Each
is compared with the median of those around it that weren't, and the ratio's 95 % interval is what the order of the
single ones gives. With one step in fifty counted, that costs a fiftieth of what a counted one takes longer.

- an 8-layer bf16 transformer, under DDP with a batch that keeps the GPU busy, and under FSDP2 with one that doesn't and
  is bound by the host: one step in 8, and all (eight in a row, then some that aren't);
- the same trainings in processes of their own, in turns with ones that count nothing: what steps take after the first
  that is counted, of what they took before; and the launches of tiny kernels, likewise. What CUPTI leaves behind is in
  every step, so comparing steps that are counted with others doesn't show it;
- a CUDA graph of 200 tiny kernels, replayed with CUPTI on and off, in turns; and ten million of its kernels, counted:
  what the process grows by;
- against torch.profiler, over the same work: the kernels' names, how many there were, and what they took.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from _machine import describe
from _quiet import environment
from _resident import resident_mib
from _results import Measured, publish, say
from ddp_loop import interval
from training_step import gpu_step
from windows import small_step, train

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SELDOM, OFTEN = 50, 8
BUSY, IDLE = 32, 8  # batches
WARM_UP, AROUND = 24, 4
FIRST, PROCESSES, LAUNCHES = 150, 4, 2_000
RECORDS, TINY = 10_000_000, 200


def rank(kind: str, steps: int, out: Path) -> None:
    """One of a job that torchrun started; rank 0 writes what its steps took."""
    import torch
    import torch.distributed as dist

    import ddtrace_pytorch

    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ddtrace_pytorch.patch()
    dist.init_process_group("nccl")
    step = gpu_step(sharded=kind == "fsdp2", batch=BUSY if kind == "ddp" else IDLE)
    took = train(step, steps)["took"]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(took), encoding="utf-8")
    dist.destroy_process_group()


def job(kind: str, every: int, ranks: int, steps: int) -> tuple[list[float], list[dict[str, Any]]]:
    """What the steps of rank 0 took, in ms, and its records of those that were counted."""
    from ddtrace_pytorch.runlog.reader import read, scan

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "took.json")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
            "--kind", kind, "--steps", str(steps), "--out", str(out),
        ]  # fmt: skip
        asked = {"DD_PYTORCH_KERNEL_EVERY": str(every), "DD_PYTORCH_KERNEL_BUDGET": "100"}
        subprocess.run(command, env=environment(folder) | asked, check=True)
        logs = [log for log in scan(str(Path(folder, "log"))).logs if log.rank == 0]
        return json.loads(out.read_text(encoding="utf-8")), [one for log in logs for one in read(log, ("kernels",))]


def ratios(took: list[float], records: list[dict[str, Any]]) -> list[float]:
    """Of each step that was counted, over the median of the nearest that weren't."""
    counted = {one["step"] + more for one in records for more in range(one["steps"])}
    others = [step for step in range(WARM_UP, len(took) + 1) if step not in counted]
    found = []
    for step in sorted(counted):
        if WARM_UP < step <= len(took):
            near = sorted(others, key=lambda other: abs(other - step))[: 2 * AROUND]
            found.append(took[step - 1] / median(took[other - 1] for other in near))
    return found


def compared(what: str, found: list[float], budget: float | None, share: int = 1) -> Measured:
    """`share`: one step in so many is like that."""
    low, high, value = (100 + (one - 1) * 100 / share for one in (*interval(found), median(found)))
    return Measured(f"{what} ({low:.2f} to {high:.2f} %)", value, "%", budget, len(found))


def left_behind(kind: str, name: str, ranks: int) -> list[Measured]:
    """Steps after the first that is counted, of those before it, by processes; and of ones that count nothing."""
    found: dict[int, list[float]] = {FIRST: [], 0: []}
    for _ in range(PROCESSES):
        for every, shares in found.items():
            took, records = job(kind, every, ranks, 2 * FIRST - 1)
            assert {one["step"] for one in records} == ({FIRST} if every else set())
            shares.append(median(took[FIRST + AROUND :]) / median(took[WARM_UP : FIRST - 1]))
    return [
        compared(f"{name}: a step after the first that is counted, of one before", found[FIRST], 100.2),
        compared(f"{name}: the same where none is counted", found[0], None),
    ]


def opened() -> Any:
    """The library, with the CUPTI of this process."""
    import torch

    from ddtrace_pytorch.kernels.sampler_library import SamplerLibrary, find, libcupti

    torch.zeros(1, device="cuda")
    path, cupti = find(), libcupti()
    assert path is not None
    assert cupti is not None
    library = SamplerLibrary(path)
    assert library.open(cupti) == 0, library.error
    return library


def launches(library: Any) -> list[Measured]:
    """What the host takes to launch a tiny kernel, in one process: never counted, and after the first few were."""
    import torch

    many = torch.ones(16, device="cuda")

    def launch() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            many.add_(1)
        took = time.perf_counter() - started
        torch.cuda.synchronize()
        return took

    for _ in range(5):
        launch()
    before = [launch() for _ in range(20)]
    library.on()
    during = [launch() for _ in range(5)]
    library.off()
    library.take()
    after = [launch() for _ in range(20)]
    return [
        Measured("the launch of a tiny kernel, before any is counted", median(before) / LAUNCHES * 1e6, "us", None, 20),
        compared("the same while they are counted", [one / median(before) for one in during], None),
        compared("the same afterwards", [one / median(before) for one in after], 101.0),
    ]


def graphs(library: Any) -> list[Measured]:
    import torch

    many = torch.ones(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        many.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(TINY):
            many.add_(1)

    def replays(times: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / times

    replays(50)
    never = median(replays(20) for _ in range(20))
    on, off, seen = [], [], 0
    for _ in range(20):
        library.on()
        on.append(replays(20))
        library.off()
        seen += library.take().totals.records
        off.append(replays(20))
    rows = [
        Measured("a graph of 200 tiny kernels, while they are counted", median(on) / never * 100, "%", 130.0, 20),
        Measured("the same afterwards", median(off) / never * 100, "%", 103.0, 20),
        Measured("its kernels that were not counted", 20 * 20 * TINY - seen, "", 0, 20),
    ]
    library.on()
    sizes, counted, lost = [], 0, 0
    while counted < RECORDS:
        replays(500)
        library.flush()
        totals = library.take().totals
        counted += totals.records
        lost += totals.cupti_dropped + totals.refusals + sum(totals.dropped().values())
        sizes.append(resident_mib())
    library.off()
    tenth = len(sizes) // 10
    rows.append(
        Measured(f"growth over {RECORDS:,} kernels, the first tenth left out", sizes[-1] - sizes[tenth], "MiB", 1.0, 1)
    )
    rows.append(Measured("of these lost", lost, "", 0, 1))
    return rows


def profiled(library: Any) -> list[Measured]:
    """The same steps, by torch.profiler and by us, in turns."""
    import torch

    from ddtrace_pytorch.kernels.demangling import demangled

    step = small_step()
    for _ in range(20):
        step()

    def ours() -> tuple[Counter[str], float]:
        torch.cuda.synchronize()
        library.on()
        step()
        torch.cuda.synchronize()
        library.off()
        found: Counter[str] = Counter()
        total = 0
        for key, one in library.take().sums.items():
            found[demangled(key.name)] += one.many
            total += one.total
        return found, total

    def theirs() -> tuple[Counter[str], float]:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        events = [
            one for one in profile.profiler.kineto_results.events()
            if int(one.device_type()) and not one.name().startswith("Mem")
        ]  # fmt: skip
        return Counter(one.name() for one in events), sum(one.duration_ns() for one in events)

    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(15)]
    different = sum(mine[0] != other[0] for mine, other in pairs)
    if different:
        print((pairs[-1][0][0] - pairs[-1][1][0]), (pairs[-1][1][0] - pairs[-1][0][0]), file=sys.stderr)
    times = [abs(median(one[which][1] for one in pairs)) for which in (0, 1)]
    return [
        Measured("steps whose kernels or counts are not those of torch.profiler", different, "", 0, len(pairs)),
        Measured(
            "what its kernels took, by us and by torch.profiler: apart by",
            abs(times[0] / times[1] - 1) * 100,
            "%",
            1.0,
            len(pairs),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--kind", choices=["ddp", "fsdp2"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        rank(options.kind, options.steps, options.out)
        return
    machine = describe()
    rows: list[Measured] = []
    kinds = (("ddp", "DDP, bound by the GPU"), ("fsdp2", "FSDP2, bound by the host"))
    for kind, name in kinds:
        took, records = job(kind, OFTEN, options.ranks, options.steps)
        found = ratios(took, records)
        kernels = median(one["metrics"]["events"] for one in records)
        print(f"{name}: {median(took):.2f} ms a step, {kernels:g} kernels", file=sys.stderr)
        say(
            rows,
            compared(f"{name}: a step that is counted, of those around it", found, None),
            compared(f"{name}: all steps, one in {SELDOM} counted", found, 100.2, SELDOM),
        )
        took, records = job(kind, 1, options.ranks, options.steps)
        say(rows, compared(f"{name}: every step counted", ratios(took, records), 101.0 if kind == "ddp" else None))
    for kind, name in kinds:
        say(rows, *left_behind(kind, name, options.ranks))
    library = opened()
    say(rows, *launches(library))
    say(rows, *graphs(library))
    say(rows, *profiled(library))  # the last: torch's profiler leaves more of CUPTI behind than we do
    publish("kernel_sampling", machine, rows)


if __name__ == "__main__":
    main()
