"""What a whole training step costs with us on: the time of a step with and without, side by side.

    python benchmarks/training_step.py      an 8-layer bf16 transformer on every GPU, DDP and FSDP2

Each pair is a block of steps without us and a block with us (`patch()` with the group up; `unpatch()` after), in an
order that alternates, on all ranks at once. A pair's ratio is the time of one block over that of the other; the answer
is the median ratio, and the 95 % interval of the mean of their logarithms, by Student's t. What is added to a
collective on the thread that trains is measured beside it, call by call, as the time around us less that of torch's own
function below us: of a block the mean without the quickest and the slowest tenth, since one call that the scheduler
interrupts outweighs hundreds; of the pairs the mean difference, with its 95 % interval. `control` is the same with
nothing switched on in either block: what it shows is noise.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median, quantiles, stdev
from typing import Any

from _machine import describe
from _quiet import environment
from _results import RESULTS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Student's t, two-sided 95 %, for 30 pairs and more it is near enough to this.
T_95 = 2.045

JOBS = ["gpu-ddp", "gpu-fsdp2"]
# Percent of a step that its collectives may take longer on the host, where the step's own time can't be resolved.
HOST_SHARE = 0.2


def gpu_step(sharded: bool, batch: int = 8) -> Callable[[], None]:
    """An eager 8-layer transformer in bf16, the batch of every rank already on the device."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    width, heads, length = 1024, 16, 512
    blocks = [
        torch.nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(8)
    ]
    model: Any = torch.nn.Sequential(*blocks).to("cuda", torch.bfloat16)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).float().square().mean().backward()
        optimizer.step()

    return step


def warm_up(steps: int) -> int:
    return max(3, steps // 10)


class HostTime:
    """What is added, on the thread that issues it, to a collective that Python issues: each call is timed around
    whatever instruments torch's function, and below that. What the timers themselves take is in the difference too, and
    falls out of that between two blocks."""

    NAMES = (
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    )

    def __init__(self) -> None:
        self._below = 0
        self._between: list[int] = []

    @contextmanager
    def below(self) -> Iterator[None]:
        """For what instruments the functions meanwhile, torch's own are timed."""
        with self._each(self._timed_below):
            yield

    @contextmanager
    def around(self) -> Iterator[None]:
        """Time the functions as they are now."""
        with self._each(self._timed_around):
            yield

    def microseconds(self) -> float:
        """A call, since the last time."""
        between = sorted(self._between)
        self._between.clear()
        tenth = len(between) // 10
        usual = between[tenth : len(between) - tenth]
        return sum(usual) / len(usual) / 1000 if usual else 0.0

    @contextmanager
    def _each(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        import torch.distributed as dist

        from ddtrace_pytorch.in_place import instrument

        with ExitStack() as undo:
            for name in self.NAMES:
                if hasattr(dist, name):
                    undo.callback(instrument(getattr(dist, name), around))
            yield

    def _timed_below(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter_ns()
            result = original(*args, **kwargs)
            self._below = time.perf_counter_ns() - started
            return result

        return timed

    def _timed_around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter_ns()
            result = original(*args, **kwargs)
            self._between.append(time.perf_counter_ns() - started - self._below)
            return result

        return timed


@contextmanager
def patched() -> Iterator[None]:
    import ddtrace_pytorch

    ddtrace_pytorch.patch()
    yield
    ddtrace_pytorch.unpatch()


def measure(kind: str, pairs: int, steps: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    step = gpu_step(sharded=kind == "gpu-fsdp2")

    def settle() -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def block(on: bool) -> tuple[float, float]:
        """Seconds a step, and µs on the host a call."""
        host = HostTime()
        with host.below(), patched() if on else nullcontext(), host.around():
            for _ in range(warm_up(steps)):
                step()
            settle()
            host.microseconds()
            started = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            took = (time.perf_counter() - started) / steps
            on_the_host = host.microseconds()
            settle()
        return took, on_the_host

    for _ in range(2):
        block(False), block(True)
    made: dict[str, list[tuple[tuple[float, float], tuple[float, float]]]] = {"with us": [], "control": []}
    for turn in range(pairs):
        for name, on in (("with us", True), ("control", False)):
            if turn % 2:
                second = block(on)
                made[name].append((block(False), second))
            else:
                first = block(False)
                made[name].append((first, block(on)))
        if dist.get_rank() == 0:
            print(f"\r{kind}: pair {turn + 1} of {pairs}", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    dist.destroy_process_group()
    return {"pairs": made}


def calls_a_session(folder: str) -> float:
    """Python-issued collectives of one rank in one session, by our own run logs."""
    from ddtrace_pytorch.runlog.reader import read, scan

    logs = scan(folder).logs
    made = sum(
        int(record["metrics"]["collective.count"])
        for log in logs
        for record in read(log, ("summary",))
        if record.get("how") in ("waited", "issued")
    )
    return made / max(1, len(logs))


def interval(numbers: list[float]) -> tuple[float, float]:
    """In which the mean lies, with 95 %."""
    middle, spread = sum(numbers) / len(numbers), T_95 * stdev(numbers) / math.sqrt(len(numbers))
    return middle - spread, middle + spread


def share(row: dict[str, Any]) -> tuple[float, float]:
    """Of a step, in percent, what is added to its collectives on the host."""
    least, most = (row["calls_a_step"] * added / row["step_ms"] / 10 for added in row["host_us"])
    return least, most


def run(kind: str, ranks: int, pairs: int, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
            "--measure", kind, "--pairs", str(pairs), "--steps", str(steps), "--result", str(result),
        ]  # fmt: skip
        subprocess.run(command, check=True, env=environment(folder))
        found = json.loads(result.read_text())
        made = calls_a_session(str(Path(folder, "log")))
    rows = []
    for name, times in found["pairs"].items():
        ratios = [ours / plain for (plain, _), (ours, _) in times]
        least, most = interval([math.log(ratio) for ratio in ratios])
        rows.append(
            {
                "kind": kind,
                "what": name,
                "ranks": ranks,
                "pairs": len(times),
                "steps_a_block": steps,
                "step_ms": median(plain for (plain, _), _ in times) * 1000,
                "host_us": interval([ours - plain for (_, plain), (_, ours) in times]),
                "ratio": quantiles(ratios, n=4),
                "interval": [math.exp(least), math.exp(most)],
                "calls_a_step": made / (steps + warm_up(steps)),
            }
        )
    return rows


def verdict(row: dict[str, Any]) -> str:
    if row["what"] != "with us":
        return ""
    budget = 1.002
    low, high = row["interval"]
    if high <= budget:
        return f"≤ {budget:.3f}: yes"
    if low > budget:
        return f"≤ {budget:.3f}: NO"
    _, most = share(row)
    within = f"{most:.3f} % on the host, ≤ {HOST_SHARE} %: {'yes' if most <= HOST_SHARE else 'NO'}"
    return f"≤ {budget:.3f}: not resolved; {within}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| job | what | step | ratio (quartiles) | 95 % interval of the mean | pairs | calls a step "
        "| added to a call on the host, 95 % interval | of a step | kept |",
        "|" + " --- |" * 10,
    ]
    for row in rows:
        low, middle, high = row["ratio"]
        least, most = row["interval"]
        (less, more), (little, much) = row["host_us"], share(row)
        lines.append(
            f"| {row['kind']}, {row['ranks']} ranks | {row['what']} | {row['step_ms']:.2f} ms "
            f"| {middle:.4f} ({low:.4f}-{high:.4f}) | {least:.4f}-{most:.4f} | {row['pairs']} "
            f"| {row['calls_a_step']:.1f} | {less:.2f}-{more:.2f} µs | {little:.3f}-{much:.3f} % | {verdict(row)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=JOBS)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100, help="steps in a block")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        found = measure(options.measure, options.pairs, options.steps)
        if os.environ["RANK"] == "0":
            Path(options.result).write_text(json.dumps(found))
        return
    machine = describe()
    wrong = False
    for kind in [options.job] if options.job else JOBS:
        rows = run(kind, options.ranks, options.pairs, options.steps)
        text = table(rows)
        print("\n" + text)
        wrong = wrong or "NO" in text
        described = "\n".join(f"- {key}: {value}" for key, value in machine.items())
        RESULTS.mkdir(exist_ok=True)
        name = f"training_step-{kind}"
        (RESULTS / f"{name}.md").write_text(f"# training step\n\n{text}\n\n{described}\n", encoding="utf-8")
        kept = {"machine": machine, "rows": rows}
        (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
