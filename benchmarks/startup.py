"""What the package costs a process that starts: the .pth door, the import, and patch().

python benchmarks/startup.py [--runs 40]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _machine import describe
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent

IMPORT = """
import sys, time
started = time.perf_counter()
import ddtrace_pytorch
took = time.perf_counter() - started
heavy = {"torch", "ddtrace", "wrapt"} & set(sys.modules)
assert not heavy, f"import ddtrace_pytorch also imports {heavy}"
print(took * 1000)
"""

PATCH = """
import time
import torch, torch.distributed, ddtrace, ddtrace.trace
started = time.perf_counter()
import ddtrace_pytorch
ddtrace_pytorch.patch()
print((time.perf_counter() - started) * 1000)
"""


def bare_python(folder: Path, *, with_door: bool) -> list[str]:
    """A virtual environment with nothing in it, or nothing but our package and its .pth file."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    if with_door:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "ddtrace_pytorch").symlink_to(ROOT / "ddtrace_pytorch")
        (site / "ddtrace_pytorch.pth").write_bytes((ROOT / "ddtrace_pytorch.pth").read_bytes())
    return [str(folder / "bin" / "python"), "-c", "pass"]


def wall_ms(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return (time.perf_counter() - started) * 1000


def reported_ms(*command: str) -> float:
    # As installed: with bytecode, which an environment like a container's may forbid to write.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, *command], check=True, env=environ, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def door_ms(runs: int) -> tuple[float, float]:
    """Median start of a bare Python, and the median of what the door adds to a start right beside it."""
    with tempfile.TemporaryDirectory() as folder:
        plain = bare_python(Path(folder, "plain"), with_door=False)
        door = bare_python(Path(folder, "door"), with_door=True)
        for warm_up in (plain, door):
            wall_ms(warm_up)
        pairs = [(wall_ms(plain), wall_ms(door)) for _ in range(runs)]
    return median(without for without, _ in pairs), median(with_door - without for without, with_door in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    runs = parser.parse_args().runs
    patches = max(3, runs // 5)
    machine = describe()

    print(f"starting Python {runs} times without the .pth file and {runs} times with it, in turn ...", flush=True)
    plain, added = door_ms(runs)
    print(f"importing ddtrace_pytorch in {runs} processes ...", flush=True)
    # -S: no site-packages, so no .pth file that has imported it already, and nothing outside the standard library.
    imported = median(reported_ms("-S", "-c", IMPORT) for _ in range(runs))
    reported_ms("-c", PATCH)  # the first one also compiles
    print(f"calling patch() in {patches} processes ...", flush=True)
    patched = median(reported_ms("-c", PATCH) for _ in range(patches))
    publish(
        "startup",
        machine,
        [
            Measured("start of a bare Python", plain, "ms", None, runs),
            Measured("added to it by the .pth file", added, "ms", 2.0, runs),
            Measured("import ddtrace_pytorch", imported, "ms", 20.0, runs),
            Measured("import ddtrace_pytorch and patch(), beyond torch and ddtrace", patched, "ms", 50.0, patches),
        ],
    )


if __name__ == "__main__":
    main()
