"""The four functions ddtrace expects of an integration, and nothing else.

The package imports this module at every interpreter start (through its .pth file), so it imports nothing itself:
the rooms behind it load when a function is first called.
"""

from __future__ import annotations

# Pre-releases must be admitted: vendor builds call themselves 2.9.0a0+..., which `>=2.0` refuses.
SUPPORTED_TORCH = ">=2.0.0.dev0,<3"


def patch() -> None:
    """Instrument torch in this process. Never raises; says once why when it cannot.

    With a process group already initialised, the session opens at once. Calling it again changes nothing.
    """
    from ddtrace_pytorch.border import safely

    safely("instrument torch")(_switch_on)()


def _switch_on() -> None:
    from ddtrace_pytorch.instrumentation import switch_on

    switch_on()


def unpatch() -> None:
    """Close an open session and give back every object :func:`patch` touched. Imports nothing new."""
    import sys

    instrumentation = sys.modules.get("ddtrace_pytorch.instrumentation")
    if instrumentation is not None:
        instrumentation.switch_off()


def get_version() -> str:
    """The version of the torch in use, or an empty string without one."""
    import importlib.metadata
    import sys

    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def supports(version: str) -> bool:
    """Whether torch `version` is in :data:`SUPPORTED_TORCH`; the major number decides, pre-releases included."""
    return version.partition(".")[0] == "2"


def _supported_versions() -> dict[str, str]:
    return {"torch": SUPPORTED_TORCH}
