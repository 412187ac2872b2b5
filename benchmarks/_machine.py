"""What a number was measured on; a number without it says nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> dict[str, str]:
    with contextlib.suppress(FileNotFoundError):
        cards = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines()
        return {"gpus": "; ".join(card.partition(" (UUID")[0] for card in cards)}
    return {}


def describe() -> dict[str, str]:
    """Name and value of everything about this machine that a measured time depends on."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load before": f"{os.getloadavg()[0]:.2f}",
        "memory": f"{_memory_gib()} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "ddtrace": _version_of("ddtrace"),
        "wrapt": _version_of("wrapt"),
        "ddtrace-pytorch": _version_of("ddtrace-pytorch"),
        **_gpus(),
    }
