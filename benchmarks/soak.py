"""Half an hour of a training that does everything: what it takes stays flat, and every piece of its spans arrives.

    python benchmarks/soak.py [--minutes 30] [--reinit 120] [--rotation 10] [--without-us]

Two CPU ranks, a real test agent and a run log with a cap. Each step has collectives, a span by ddtrace, a span, a
number and an event of the user's; there is a profiler window every 200 steps; every two minutes the process group is
destroyed and made anew. Every few seconds it is noted of each rank how large it is and how many threads and descriptors
it has, and how large the run log is. With `--without-us` the same training runs by itself: what grows there is torch's
or ddtrace's.

The series are kept in results/soak.json; tests/dist/test_soak.py bounds their slopes, by :func:`complaints`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from _machine import describe
from _quiet import environment
from _results import RESULTS

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

RANKS = 2
STEP_SECONDS = 0.04
LOG_MAX_MB, TRACES_MAX_MB = 2, 2
SETTINGS = {
    "DD_PYTORCH_EXPORT": "both",
    "DD_PYTORCH_SNAPSHOT_SECONDS": "2",
    "DD_PYTORCH_COLLECTIVES": "all",
    "DD_PYTORCH_STEP_SAMPLE": "20",
    "DD_PYTORCH_PROFILE_EVERY": "200",
    "DD_PYTORCH_PROFILE_MAX_MB": str(TRACES_MAX_MB),
    "DD_PYTORCH_LOG_MAX_MB": str(LOG_MAX_MB),
    "DD_PYTORCH_JOB_ID": "soak",
}

# Of one rank, once a training has settled in: what it may take more in the second half of that time than in the first.
# A profiler window takes some 12 MiB while it is read, so that of each two minutes the least counts.
MOST_MIB, APART = 3.0, 120.0
SETTLES_MINUTES = 10.0

Series = dict[str, list[float]]
# Its rank and number, and when it starts and ends.
Piece = tuple[int, int, int, int]


def rank(folder: Path, reinit: float) -> None:
    """One of the job: trains until there is a file `stop`."""
    import torch
    import torch.distributed as dist
    from ddtrace.trace import tracer
    from torch.nn.parallel import DistributedDataParallel

    import ddtrace_pytorch

    number = int(os.environ["RANK"])
    torch.set_num_threads(1)
    (folder / f"pid-{number}").write_text(str(os.getpid()), encoding="ascii")
    stop, life, steps = torch.zeros(1), 0, 0
    while not stop.item():
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder / f"store-{life}"), RANKS), rank=number, world_size=RANKS
        )
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        again = time.monotonic() + reinit
        over = torch.zeros(2)
        while not over.any():
            with tracer.trace("user.work"), ddtrace_pytorch.span("forward and backward", life=life):
                loss = model(torch.randn(8, 64)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ddtrace_pytorch.scalar({"loss": loss})
            ddtrace_pytorch.event("stepped")
            time.sleep(STEP_SECONDS)
            steps += 1
            over[0], over[1] = time.monotonic() > again, (folder / "stop").exists()
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
        stop[0] = over[1]
        dist.destroy_process_group()
        life += 1
    (folder / f"ended-{number}").write_text(f"{life} {steps}", encoding="ascii")


def size(folder: Path) -> float:
    """KiB of the files below it."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # made room for another
            pass
    return found / 1024


def note(series: Series, pid: int, at: float) -> None:
    proc = Path("/proc", str(pid))
    series["t"].append(round(at, 1))
    pages = int((proc / "statm").read_text(encoding="ascii").split()[1])
    series["resident_kib"].append(pages * os.sysconf("SC_PAGE_SIZE") // 1024)
    series["threads"].append(len(os.listdir(proc / "task")))
    series["descriptors"].append(len(os.listdir(proc / "fd")))


def watched(command: list[str], env: dict[str, str], folder: Path, seconds: float, every: float) -> dict[str, Any]:
    """Runs the job for so long; gives its series, and what the ranks said at their end."""
    ranks: list[Series] = [defaultdict(list) for _ in range(RANKS)]
    log: Series = defaultdict(list)
    with subprocess.Popen(command, env=env) as job:
        pids = [folder / f"pid-{number}" for number in range(RANKS)]
        while not all(path.exists() and path.read_text() for path in pids):
            if job.poll() is not None:
                raise SystemExit("the job ended before it began")
            time.sleep(0.1)
        began = time.monotonic()
        while (at := time.monotonic() - began) < seconds:
            if job.poll() is not None:
                raise SystemExit(f"the job ended after {at:.0f} s")
            for path, series in zip(pids, ranks, strict=True):
                note(series, int(path.read_text(encoding="ascii")), at)
            log["t"].append(round(at, 1))
            log["kib"].append(round(size(folder / "log"), 1))
            time.sleep(every)
        (folder / "stop").touch()
        if job.wait(120):
            raise SystemExit(f"the job failed: {job.returncode}")
    ended = [(folder / f"ended-{number}").read_text(encoding="ascii").split() for number in range(RANKS)]
    return {"ranks": ranks, "log": log, "lives": int(ended[0][0]), "steps": int(ended[0][1])}


def run(options: argparse.Namespace) -> dict[str, Any]:
    from harness.agent import Agent

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
            __file__, "--rank", made, "--reinit", str(options.reinit),
        ]  # fmt: skip
        env = environment(made) | SETTINGS | {"DD_PYTORCH_ROTATION_SECONDS": str(options.rotation)}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        if not options.without_us:
            env["DD_PATCH_MODULES"] = "pytorch:true"
        ddtrace_run = str(Path(sys.executable).with_name("ddtrace-run"))
        with Agent(folder) as agent:
            env["DD_TRACE_AGENT_URL"] = agent.url
            found = watched([ddtrace_run, *command], env, folder, options.minutes * 60, options.every)
            spans = agent.ranks()
    pieces: list[Piece] = [
        (
            int(span["metrics"]["rank"]),
            int(span["metrics"]["pytorch.piece"]),
            span["start"],
            span["start"] + span["duration"],
        )
        for span in spans
    ]
    asked = {"minutes": options.minutes, "reinit": options.reinit, "rotation": options.rotation}
    return {"machine": describe(), "asked": asked | {"without_us": options.without_us}, **found, "pieces": pieces}


def complaints(found: dict[str, Any]) -> list[str]:
    """What isn't flat, or didn't arrive. Of each series the first third is left out, in which a training settles in:
    that takes minutes, so what a shorter one has at its end isn't compared."""
    wrong = []
    settles = found["asked"]["minutes"] >= SETTLES_MINUTES
    for number, series in enumerate(found["ranks"] if settles else ()):
        settled = len(series["t"]) // 3
        for what in ("threads", "descriptors"):
            before, after = series[what][settled : 2 * settled], series[what][2 * settled :]
            if median(after) > median(before):
                wrong.append(f"rank {number} has {median(after):g} {what}, after {median(before):g}")
        grown = growth_mib(series)
        if grown > MOST_MIB:
            wrong.append(f"rank {number} grew by {grown:.2f} MiB")
    if found["asked"]["without_us"]:
        return wrong
    # Each life has files of its own and leaves them, but the caps are of a process.
    most = RANKS * (LOG_MAX_MB + TRACES_MAX_MB) * 1024
    if max(found["log"]["kib"]) > most:
        wrong.append(f"the log grew to {max(found['log']['kib']):.0f} KiB, which should be {most:.0f} at most")
    return wrong + missing(found)


def growth_mib(series: Series) -> float:
    """From the first half of the time that it has settled in to the second."""
    settled = len(series["t"]) // 3
    least: dict[int, float] = {}
    for at, kib in zip(series["t"][settled:], series["resident_kib"][settled:], strict=True):
        stretch = int(at // APART)
        least[stretch] = min(least.get(stretch, kib), kib)
    sizes = list(least.values())
    half = len(sizes) // 2
    return (median(sizes[half:]) - median(sizes[:half])) / 1024 if half else 0.0


def missing(found: dict[str, Any]) -> list[str]:
    """Of each life of each rank all pieces, from 0 on, each beginning where the one before ended."""
    wrong = []
    for number in range(RANKS):
        lives: list[list[Piece]] = []
        for piece in sorted((tuple(one) for one in found["pieces"] if one[0] == number), key=lambda one: one[2]):
            if piece[1] == 0 or not lives:
                lives.append([])
            lives[-1].append(piece)
        if len(lives) != found["lives"]:
            wrong.append(f"of rank {number} there are spans of {len(lives)} lives, not {found['lives']}")
        for pieces in lives:
            if [piece[1] for piece in pieces] != list(range(len(pieces))):
                wrong.append(f"of rank {number} a life has the pieces {[piece[1] for piece in pieces]}")
            elif any(before[3] != after[2] for before, after in pairwise(pieces)):
                wrong.append(f"of rank {number} a life has pieces with a gap or an overlap")
            expected = (pieces[-1][3] - pieces[0][2]) / 1e9 / found["asked"]["rotation"]
            if len(pieces) < expected - 1:
                wrong.append(f"of rank {number} a life has {len(pieces)} pieces, which should be {expected:.1f}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--reinit", type=float, default=120.0, help="seconds of one process group")
    parser.add_argument("--rotation", type=float, default=10.0, help="seconds of one piece")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--without-us", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.reinit)
        return
    found = run(options)
    out = options.out or RESULTS / ("soak-without-us.json" if options.without_us else "soak.json")
    out.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{found['steps']:,} steps in {found['lives']} lives, {len(found['pieces'])} pieces")
    for number, series in enumerate(found["ranks"]):
        print(
            f"rank {number}: {growth_mib(series):+.2f} MiB, {series['threads'][-1]} threads, "
            f"{series['descriptors'][-1]} descriptors"
        )
    wrong = complaints(found)
    print("\n".join(wrong) or "flat, and all is there")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
