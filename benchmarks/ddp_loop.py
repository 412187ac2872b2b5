"""What a DDP loop on CPU ranks takes longer with us on.

    python benchmarks/ddp_loop.py [--rounds 100] [--steps 40] [--ranks 2]

One job of a small model, whose ranks all switch us on and off again together: `patch()` with the group up, `unpatch()`
after. A round is a block of steps without us, one with us, and two more without, the first of them twice as far away
from its neighbour as switching takes; in every other round the other way round. A ratio is that of the block with us
to the mean of its neighbours without, in time by the clock, and in time that all of the process' threads work, ours
too: where there are as many ranks as processors a step takes longer by that, and what others do on the machine is not
in it. `control` is that of a block without us to its neighbours. Told is the median, with the 95 % interval that the
order of the ratios gives (the ranks n/2 ± 0.98 √n), for a shared machine's times have long tails; of the ranks it is
the mean of their ratios.

The budget is kept where all of the interval is within it, by the clock or by the work.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

from _machine import describe
from _quiet import environment
from _results import RESULTS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# With over without: what is as good as "without over with is 0.99".
BUDGET = 1 / 0.99
# Steps until a session that opens has said who it is and beats, and until one that closes is forgotten.
SETTLED = 150
WARM_UP = 100

# Of one block: seconds by the clock, and of work, each a step.
Times = tuple[float, float]


def train(rounds: int, steps: int, out: Path) -> None:
    """One rank of the job; rank 0 writes what came of it to `out`."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddtrace_pytorch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, 256)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())

    def block() -> Times:
        clock, work = time.perf_counter(), time.process_time()
        run(steps)
        return (time.perf_counter() - clock) / steps, (time.process_time() - work) / steps

    def ours() -> Times:
        ddtrace_pytorch.patch()
        run(SETTLED)
        took = block()
        ddtrace_pytorch.unpatch()
        run(SETTLED)
        return took

    run(WARM_UP)
    made = [one_round(turn, block, ours, lambda: run(SETTLED)) for turn in range(-2, rounds)][2:]
    every: list[list[dict[str, list[Times]]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, made)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(every), encoding="utf-8")
    dist.destroy_process_group()


def one_round(
    turn: int, block: Callable[[], Times], ours: Callable[[], Times], settle: Callable[[], None]
) -> dict[str, list[Times]]:
    """Two triples, each of a block and its two neighbours without us."""
    first = block()
    if turn % 2:
        control, after = (settle(), block())[1], (settle(), block())[1]
        with_us = ours()
        last = block()
        found = {"with us": [with_us, after, last], "control": [control, first, after]}
    else:
        with_us = ours()
        before = block()
        control, last = (settle(), block())[1], (settle(), block())[1]
        found = {"with us": [with_us, first, before], "control": [control, before, last]}
    print(f"\rround {turn + 1}", end="", flush=True, file=sys.stderr)
    return found


def ratios(every: list[list[dict[str, list[Times]]]], name: str, kind: int) -> list[float]:
    """By round; `kind`: 0 by the clock, 1 of work."""

    def ratio(triple: list[Times]) -> float:
        one, *neighbours = (times[kind] for times in triple)
        return one / mean(neighbours)

    return [mean(ratio(of_rank[name]) for of_rank in at_once) for at_once in zip(*every, strict=True)]


def interval(found: list[float]) -> tuple[float, float]:
    """In which the median lies with 95 %, as far as the order of `found` tells."""
    order, half = sorted(found), 0.98 * math.sqrt(len(found))
    middle = (len(order) - 1) / 2
    return order[max(0, math.floor(middle - half))], order[min(len(order) - 1, math.ceil(middle + half))]


def measure(rounds: int, steps: int, ranks: int) -> list[list[dict[str, list[Times]]]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
            "--rounds", str(rounds), "--steps", str(steps), "--out", str(out),
        ]  # fmt: skip
        subprocess.run(command, env=environment(folder), check=True)
        every: list[list[dict[str, list[Times]]]] = json.loads(out.read_text(encoding="utf-8"))
        return every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40, help="in a block")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        train(options.rounds, options.steps, options.out)
        return
    machine = describe()
    every = measure(options.rounds, options.steps, options.ranks)
    plain = median(times[0] for of_rank in every for one in of_rank for times in one["with us"][1:])
    rows, kept = [], False
    for name, budget in (("with us", BUDGET), ("control", None)):
        for kind, of in enumerate(("by the clock", "of work")):
            found = ratios(every, name, kind)
            low, high = interval(found)
            told = ""
            if budget is not None:
                told = "yes" if high <= budget else "NO" if low > budget else "not resolved"
                kept |= told == "yes"
            limit = f"≤ {budget:.4f}" if budget is not None else ""
            rows.append(f"| {name}, {of} | {median(found):.4f} | {low:.4f}-{high:.4f} | {limit} | {told} |")
    lines = [
        f"DDP, {options.ranks} ranks, gloo; {options.rounds} rounds, blocks of {options.steps} steps of "
        f"{plain * 1000:.2f} ms (median).",
        "",
        "| what, over without | median ratio | 95 % interval | budget | kept |",
        "| --- | --- | --- | --- | --- |",
        *rows,
    ]
    text = "\n".join(lines)
    print("\n" + text)
    described = "\n".join(f"- {key}: {value}" for key, value in machine.items())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "ddp_loop.md").write_text(f"# ddp_loop\n\n{text}\n\n{described}\n", encoding="utf-8")
    sys.exit(not kept)


if __name__ == "__main__":
    main()
