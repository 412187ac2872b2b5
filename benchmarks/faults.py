"""Is the right rank named, for the right reason, in time? Real jobs of four ranks over gloo, each with one fault.

    python benchmarks/faults.py [--rounds 1] [--seed N] [--only NAME ...] [--healthy-minutes 10]
    python benchmarks/faults.py --list
    python benchmarks/faults.py --bare       what torch does by itself, without ddtrace-pytorch
    python benchmarks/faults.py --nccl [--ranks 2]      over NCCL, with a GPU for each rank

Rank, group and moment of each fault are picked at random from the seed, which is printed: the same seed picks the same.
Time counts from the fault to the moment when the verdict can be read on disk, or when `diagnose` gives it after a job
that died before. A healthy job's row is right if it ends well and no verdict of it is an error.

The two-host rows need root (or unprivileged user namespaces). With `--only` the results are printed, not kept.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random, randrange

from _machine import describe
from _results import RESULTS
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from harness.stalls.observing import Ending, observe  # noqa: E402
from harness.stalls.plan import CALLS, GROUPS, WORLD, Plan  # noqa: E402
from harness.stalls.table import BY_NAME, OVER_NCCL, ROWS, Expected, Launch, Row  # noqa: E402
from harness.stalls.trial import WITHIN, Outcome, attempt  # noqa: E402

# Long enough for peers to notice a dead rank and to end, on a busy machine.
OBSERVED = 12.0

Rows = list[tuple[str, ...]]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=randrange(10**6))
    parser.add_argument("--only", action="append", choices=list(BY_NAME), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    parser.add_argument("--threshold", type=float, default=10.0, help="DD_PYTORCH_STALL_SECONDS")
    parser.add_argument("--healthy-minutes", type=float, default=10.0, help="of the longest healthy job")
    parser.add_argument("--bare", action="store_true", help="without ddtrace-pytorch: how each rank ends by itself")
    parser.add_argument("--nccl", action="store_true", help="over NCCL, a GPU for each rank; fewer kinds of faults")
    parser.add_argument("--ranks", type=int, choices=list(GROUPS), default=WORLD)
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Row]:
    if options.only:
        return [BY_NAME[name] for name in options.only]
    return [BY_NAME[name] for name in OVER_NCCL] if options.nccl else list(ROWS)


def trials(options: argparse.Namespace) -> Iterator[tuple[Row, Plan, Path]]:
    """Each row as often as wanted, with a directory that lasts while it runs."""
    job = Plan(patched=not options.bare, ranks=options.ranks, backend="nccl" if options.nccl else "gloo")
    for row in chosen(options):
        for turn in range(options.rounds):
            # By name: what is picked for a row is the same whichever others run.
            chance = Random(f"{options.seed} {row.name} {turn}")
            minutes = options.healthy_minutes if row.name == "healthy" else min(1.5, options.healthy_minutes)
            plan = row.plan(job, chance, options.threshold, minutes * 60)
            with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as directory:
                yield row, plan, Path(directory)


def picked(row: Row, plan: Plan) -> str:
    """Where the fault went, as far as it matters to it."""
    if row.expected is None or row.launch is Launch.HOSTS:
        return ""
    if plan.fault in ("skip", "extra", "shape", "dtype", "order"):
        return f"rank {plan.rank}, {plan.group}, {CALLS[plan.call]}, step {plan.step}"
    return f"rank {plan.rank}, step {plan.step}"


def wanted(expected: Expected | None) -> str:
    if expected is None:
        return "no error"
    words = ("/".join(expected.kinds), "/".join(expected.details[:2]), "/".join(expected.doing))
    late = {True: "error", False: "late", None: ""}[expected.error]
    return " · ".join(word for word in (*words, late) if word)


def cells(outcome: Outcome) -> tuple[str, ...]:
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    verdict = str(outcome.verdict or ("none" if outcome.row.expected is None else ""))
    right = "yes" if outcome.right else "NO: " + ", ".join(outcome.wrong)
    row = outcome.row
    return row.name, picked(row, outcome.plan), wanted(row.expected), verdict, outcome.where, seconds, right


def judged(options: argparse.Namespace, console: Console) -> tuple[Rows, bool]:
    rows: Rows = [("fault", "picked", "expected", "verdict", "given", "seconds", "right")]
    right = True
    for row, plan, directory in trials(options):
        try:
            outcome = attempt(row, plan, directory, options.threshold)
        except AssertionError as error:  # the job never came to its fault, or never ended
            outcome = Outcome(row, plan, None, None, [str(error)])
        right = right and outcome.right
        rows.append(cells(outcome))
        console.print("  ".join(cell for cell in rows[-1] if cell), highlight=False, markup=False)
    return rows, right


def bare(options: argparse.Namespace, console: Console) -> tuple[Rows, bool]:
    rows: Rows = [("fault", "picked", "culprit", "the others")]
    for row, plan, directory in trials(options):
        if row.expected is None:
            continue
        endings = observe(row, plan, directory, OBSERVED)
        rows.append((row.name, picked(row, plan), *told(endings, plan)))
        console.print("  ".join(rows[-1]), highlight=False, markup=False)
    return rows, True


def told(endings: Sequence[Ending], plan: Plan) -> tuple[str, str]:
    """The culprit's ending, and the different ones of the others; under torchrun there is one of all."""
    if len(endings) == 1:
        return str(endings[0]), ""
    others = {str(ending) for rank, ending in enumerate(endings) if rank != plan.rank}
    return str(endings[plan.rank]), "; ".join(sorted(others))


def show(rows: Rows, console: Console) -> None:
    head, *body = rows
    table = Table(*head)
    for row in body:
        table.add_row(*row, style="red" if row[-1].startswith("NO") else None)
    console.print(table)


def keep(name: str, about: str, rows: Rows, options: argparse.Namespace) -> None:
    machine = describe() | {"seed": str(options.seed), "rounds": str(options.rounds)}
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    table = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
    described = "\n".join(f"- {key}: {value}" for key, value in machine.items())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{about}\n\n{table}\n\n{described}\n", encoding="utf-8")
    kept = {"machine": machine, "rows": [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]}
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    options = parsed()
    console = Console()
    if options.list:
        show([("name", "fault", "expected"), *((row.name, row.what, wanted(row.expected)) for row in ROWS)], console)
        return
    # As an interrupt does: jobs end with the blocks that started them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console.print(f"seed {options.seed}")
    rows, right = (bare if options.bare else judged)(options, console)
    show(rows, console)
    if not options.only:
        if options.bare:
            keep("faults-bare", f"What torch does by itself within {OBSERVED:g} s.", rows, options)
        else:
            limit = options.threshold + WITHIN
            about = f"Threshold {options.threshold:g} s; a verdict is in time within {limit:g} s."
            name = "faults-nccl" if options.nccl else f"faults-torch-{version('torch').partition('+')[0]}"
            keep(name, about, rows, options)
    sys.exit(not right)


if __name__ == "__main__":
    main()
