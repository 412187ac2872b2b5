"""What `ddtrace-pytorch doctor` may find, by hand."""

from __future__ import annotations

from typing import Any

from ddtrace_pytorch import settings
from ddtrace_pytorch.cli import probes
from ddtrace_pytorch.cli.command_line import CommandLine
from ddtrace_pytorch.cli.doctor import Facts
from ddtrace_pytorch.identity import job as jobs
from ddtrace_pytorch.plain_numbers import Part

ANSWERS: dict[str, probes.Answer] = {
    "torch": {
        "version": "2.13.0",
        "cuda": "13.0",
        "hip": None,
        "distributed": True,
        "door": "pth",
        "finder": True,
        "on": False,
    },
    "instrumentation": {"on": True, "built_in": False, "stderr": []},
    "agent": {"url": "http://agent:8126", "answers": True, "ms": 1.5},
    "gpu": {
        "count": 2,
        "driver": "580.1",
        "device": {"name": "NVIDIA H100", "uuid": "GPU-1", "complaints": []},
    },
    "log": {"directory": "/logs", "why": None, "free_bytes": 50 << 30},
    "handlers": {"handlers": []},
}


def facts(
    environ: dict[str, str] | None = None, command: CommandLine | None = None, **answers: dict[str, Any]
) -> Facts:
    """All is well, but for some variables and parts of answers."""
    environ = {"DD_PATCH_MODULES": "pytorch:true"} | (environ or {})
    return Facts(
        location="/site-packages/ddtrace_pytorch",
        install="wheel",
        python="3.12.1 (/bin/python)",
        c_part=Part.BUILT,
        sampler=True,
        packages={"ddtrace": "4.16.0", "wrapt": "2.0.0", "nvidia-ml-py": "13.1"},
        pth="/site-packages/ddtrace_pytorch.pth",
        pth_beside=None,
        entry_point=True,
        environ=environ,
        settings=settings.load(environ),
        job=jobs.identify(environ),
        command=command,
        answers={
            name: answers[name] if "error" in answers.get(name, {}) else answer | answers.get(name, {})
            for name, answer in ANSWERS.items()
        },
    )
