"""Auto-instrumentation of distributed PyTorch training for Datadog.

Importing this package imports neither torch nor ddtrace.
"""

from ddtrace_pytorch._version import __version__
from ddtrace_pytorch.patch import get_version, patch, unpatch

__all__ = ["__version__", "get_version", "patch", "unpatch"]
