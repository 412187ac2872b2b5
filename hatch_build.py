"""Builds the optional parts in C into the wheel; a machine without a C compiler gets a wheel of Python alone."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = {
    "native/counting.c": "ddtrace_pytorch/collectives/_counting",
    "native/collecting.c": "ddtrace_pytorch/training/_collecting",
    "native/at_hand.c": "ddtrace_pytorch/records/_at_hand",
}
# No module of Python's: it is loaded by ctypes, and knows no Python.
SAMPLER, SAMPLER_LIBRARY = "native/kernel_sampler.c", "ddtrace_pytorch/kernels/libkernel_sampler.so"
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden")
# CUPTI would go on to call what was unloaded.
SAMPLER_FLAGS = ("-pthread", "-ldl", "-Wl,-z,nodelete")


class Native(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile each part beside the modules that use it, for the Python that builds the wheel."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        for source, module in PARTS.items():
            made = module + sysconfig.get_config_var("EXT_SUFFIX")
            include = f"-I{sysconfig.get_path('include')}"
            if self._compile(root / source, root / made, "its work is done in Python", include):
                self._add(made, build_data)
        if self._compile(root / SAMPLER, root / SAMPLER_LIBRARY, "nothing samples kernels", *SAMPLER_FLAGS):
            self._add(SAMPLER_LIBRARY, build_data)

    def _add(self, made: str, build_data: dict[str, Any]) -> None:
        build_data["artifacts"].append(made)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def _compile(self, source: Path, target: Path, without: str, *flags: str) -> bool:
        compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
        command = [compiler, *FLAGS, str(source), "-o", str(target), *flags]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            why = done.stderr.strip()
        except OSError as error:
            why = str(error)
        else:
            if done.returncode == 0:
                return True
        self.app.display_warning(f"{source.name} is left out, {without}: {shlex.join(command)}: {why}")
        return False
