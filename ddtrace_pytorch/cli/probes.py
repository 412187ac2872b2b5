"""What `doctor` asks of child interpreters, so that whatever hangs, crashes or prints there costs one answer.

Each probe is a function without arguments that gives JSON's types; :func:`ask` runs several at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from ddtrace_pytorch.border import in_words

Answer = dict[str, Any]

# Before an answer on stdout, where sitecustomize files and libraries may print too.
_MARK = "ddtrace-pytorch-probe:"

LINES_KEPT = 5

# Torch and others warn of much that is not asked here; who made their warnings errors gets them as the job would.
UNWARNED = {"PYTHONWARNINGS": "ignore"}
# A look must not show up as an application of the user's.
QUIET = {"DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false"}

PYTHON = (sys.executable,)
DDTRACE_RUN = (sys.executable, "-m", "ddtrace.commands.ddtrace_run", sys.executable)


def torch() -> Answer:
    """Which torch this is, which door it opened, and whether it is instrumented without ddtrace-run."""
    import torch

    from ddtrace_pytorch import autoload, instrumentation

    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "distributed": torch.distributed.is_available(),
        "door": autoload.opened_by,
        "finder": any(isinstance(finder, autoload.Finder) for finder in sys.meta_path),
        "on": instrumentation.is_on(),
    }


def instrumentation() -> Answer:
    """Whether torch is instrumented in this process, by us or by ddtrace's built-in integration."""
    import torch

    from ddtrace_pytorch import instrumentation

    ours = instrumentation.is_on()
    return {"on": ours, "built_in": not ours and bool(getattr(torch, "_datadog_patch", False))}


def agent() -> Answer:
    """Whether the Agent answers, and in how many milliseconds; `url` is null where ddtrace uses none."""
    from ddtrace_pytorch import agent

    asked = time.monotonic()
    answers = agent.answers()
    return {"url": agent.url(), "answers": answers, "ms": round((time.monotonic() - asked) * 1000, 1)}


def gpu() -> Answer:
    """What NVML knows; `device` is the GPU of a process with local rank 0, null where none is visible."""
    from ddtrace_pytorch.identity import device

    nvml = device.load_nvml()
    if nvml is None:
        return {"count": 0, "why_none": "nvidia-ml-py is not installed"}
    try:
        nvml.nvmlInit()
        count, driver = nvml.nvmlDeviceGetCount(), nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError as error:
        return {"count": 0, "why_none": f"NVML says: {error}"}
    found = device.find(0, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return {"count": count, "driver": str(driver), "device": None if found is None else asdict(found)}


def log() -> Answer:
    """Whether a run log could be written here; leaves nothing behind. `why` says what is wrong, or is null."""
    from ddtrace_pytorch import settings
    from ddtrace_pytorch.runlog.writer import private_root

    chosen = settings.load()
    root = os.path.abspath(chosen.log_root)
    missing, place = [], root
    while not os.path.isdir(place):
        missing.append(place)
        place = os.path.dirname(place)
    try:
        if chosen.log_dir is None:
            private_root(root)
        else:
            os.makedirs(root, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return {"directory": root, "why": None, "free_bytes": shutil.disk_usage(root).free}
    except OSError as error:
        return {"directory": root, "why": str(error), "free_bytes": None}
    finally:
        for directory in missing:
            try:
                os.rmdir(directory)
            except OSError:
                pass  # not made after all, or used by somebody by now


def handlers() -> Answer:
    """Whether each of the factories in DD_PYTORCH_LOG_HANDLERS is to be had; `why` says what is wrong, or is null."""
    from ddtrace_pytorch import settings
    from ddtrace_pytorch.handlers import factory_at

    found = []
    for path in settings.load().log_handlers:
        why = None
        try:
            factory_at(path)
        except Exception as error:
            why = in_words(error)
        found.append({"path": path, "why": why})
    return {"handlers": found}


# Name -> how it is run. The interpreter of `instrumentation` is started as `ddtrace-run python x.py` starts it.
PROBES: dict[str, Sequence[str]] = {
    torch.__name__: PYTHON,
    instrumentation.__name__: DDTRACE_RUN,
    agent.__name__: PYTHON,
    gpu.__name__: PYTHON,
    log.__name__: PYTHON,
    handlers.__name__: PYTHON,
}


def tell(name: str) -> None:
    """In the child: run one probe and print its answer, or the error it ended with."""
    try:
        answer = globals()[name]()
    except Exception as error:
        answer = {"error": in_words(error).splitlines()[0]}
    print(_MARK + json.dumps(answer), flush=True)


def ask(names: Sequence[str], timeout: float) -> dict[str, Answer]:
    """Run the probes `names` side by side, each for at most `timeout` seconds.

    A probe that failed gives ``{"error": why}``; ``stderr`` has the last lines written there that name ddtrace.
    """
    with ThreadPoolExecutor(len(names)) as threads:
        return dict(zip(names, threads.map(lambda name: _ask(name, timeout), names), strict=True))


def _ask(name: str, timeout: float) -> Answer:
    code = f"from ddtrace_pytorch.cli import probes; probes.tell({name!r})"
    child = subprocess.Popen(
        [*PROBES[name], "-c", code], env={**UNWARNED, **os.environ, **QUIET}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    try:
        stdout, stderr = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        # A process that hangs in a driver or on a network disk can't be killed, and isn't waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1.0)
        return {"error": f"no answer in {timeout:g} s"}
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    for line in reversed(stdout.splitlines()):
        if line.startswith(_MARK):
            answer: Answer = json.loads(line[len(_MARK) :])
            return answer | {"stderr": [line for line in said if "ddtrace" in line][-LINES_KEPT:]}
    if child.returncode < 0:
        return {"error": f"the interpreter died of {signal.Signals(-child.returncode).name}"}
    return {"error": said[-1] if said else f"exit status {child.returncode}"}
