"""torchtitan's converter and ours, on the same records: time and memory, side by side.

    python -m pip install --no-deps torchtitan
    python benchmarks/converters.py [--ranks 8] [--steps 4000]

Each rank is a process that records with torchtitan's functions; its own handler and ours both take what they say, so
that two logs of the same come of it. In each step: two spans, one in the other, and a scalar. Then each log becomes a
Chrome trace, not compressed and with nothing left out, and the same of a quarter of the ranks. (torchtitan's converter
imports torch: that much of its time and memory does not go with the log.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from _machine import describe
from _results import Measured, publish

ROOT = Path(__file__).resolve().parent.parent
MIB = 1024 * 1024

JOB = """
import sys
from torchtitan.observability import structured_logger as sl
directory, rank, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sl.init_structured_logger(source="training", output_dir=directory, rank=rank)
for step in range(1, steps + 1):
    sl.set_step(step)
    with sl.log_trace_span("train_step"):
        with sl.log_trace_span("fwd_bwd"):
            pass
    sl.log_trace_scalar({"loss": 1 / step})
"""
HANDLERS = (
    "torchtitan.observability.structured_logger.jsonl_handler.register_jsonl_handler",
    "ddtrace_pytorch.integrations.torchtitan.register_handler",
)

THEIRS = """
import sys
from torchtitan.observability.structured_logger.gantt_generator import generate_gantt_trace
generate_gantt_trace(sys.argv[1], sys.argv[2])
"""
OURS = """
import sys
from ddtrace_pytorch.cli.main import cli
cli(["timeline", sys.argv[1], "-o", sys.argv[2], "--every", "1", "--attempt", "all"])
"""

# Alone, so that the most memory of any child is that of this one.
MEASURE = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run([sys.executable, "-c", *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def record(directory: str, ranks: int, steps: int) -> None:
    """Both logs, of `ranks`, below `directory`."""
    env = {
        **environment(), "DD_PATCH_MODULES": "pytorch:true", "DD_PYTORCH_EXPORT": "local",
        "DD_PYTORCH_LOG_DIR": f"{directory}/ours", "DD_PYTORCH_STATE_DIR": f"{directory}/state",
        "DD_PYTORCH_SOURCE": "rollout", "DD_PYTORCH_JOB_ID": "bench", "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false",
        "TITAN_STRUCT_LOGGER_HANDLERS": ",".join(HANDLERS),
    }  # fmt: skip
    for rank in range(ranks):
        command = [sys.executable, "-c", f"import ddtrace.auto\n{JOB}", f"{directory}/theirs", str(rank), str(steps)]
        subprocess.run(command, env={**env, "RANK": str(rank), "WORLD_SIZE": str(ranks)}, check=True)


def convert(code: str, log: str, output: str) -> tuple[float, float, float]:
    """Seconds, of them on processors, and MiB."""
    command = [sys.executable, "-c", MEASURE, code, log, output]
    seconds, cpu, mib = json.loads(subprocess.run(command, env=environment(), check=True, capture_output=True).stdout)
    return seconds, cpu, mib


def spans_in(path: str) -> int:
    """How many stretches of time a trace has, of those that were recorded."""
    events = json.loads(Path(path).read_bytes())
    events = events["traceEvents"] if isinstance(events, dict) else events
    names = [event["name"] for event in events if event["ph"] in ("X", "B")]
    return sum(any(word in name for word in ("train_step", "fwd_bwd")) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4000)
    asked = parser.parse_args()
    machine = describe() | {"torchtitan": version("torchtitan")}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in (max(asked.ranks // 4, 1), asked.ranks):
            directory = f"{scratch}/{ranks}"
            record(directory, ranks, asked.steps)
            for whose, code, log in (("torchtitan's", THEIRS, "theirs/structured_logs"), ("ours", OURS, "ours")):
                output = f"{directory}/{log.partition('/')[0]}.json"
                size = sum(path.stat().st_size for path in Path(directory, log).rglob("*.jsonl"))
                seconds, cpu, mib = convert(code, f"{directory}/{log}", output)
                assert spans_in(output) == 2 * asked.steps * ranks, (whose, spans_in(output))
                what = f"{ranks} ranks, {asked.steps:,} steps, {whose}"
                rows += [
                    Measured(f"{what}: log", size / MIB, "MiB", None, 1),
                    Measured(f"{what}: time", seconds, "s", None, 1),
                    Measured(f"{what}: time of processors", cpu, "s", None, 1),
                    Measured(f"{what}: memory at most", mib, "MiB", None, 1),
                    Measured(f"{what}: trace", os.path.getsize(output) / MIB, "MiB", None, 1),
                ]
    publish("converters", machine, rows)


if __name__ == "__main__":
    main()
