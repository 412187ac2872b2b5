"""The environment of a job that is measured: a run log of its own, no Agent, and none of ddtrace's own messages."""

from __future__ import annotations

import os
from pathlib import Path


def environment(folder: str) -> dict[str, str]:
    """That of this process, with the run log in `folder`/log."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
        "DD_PYTORCH_EXPORT": "local",
        "DD_PYTORCH_LOG_DIR": str(Path(folder, "log")),
    }
