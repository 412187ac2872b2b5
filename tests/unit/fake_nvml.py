"""An NVML of eight GPUs, 6 and 7 cut by MIG, behind the functions and the error class of ``pynvml``.

GPU 6 is cut into two slices, GPU 7 is in MIG mode and has none. It runs as ``pynvml`` itself too, when a test puts it
under that name. `calls` counts what was asked; `sessions` is what was initialised and not shut down.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GPUS = [f"GPU-{number}932f937-d72c-4106-c12f-20bd9faed9f{number}" for number in range(8)]
SLICES = ["MIG-a1b2c3d4-0000-5000-8000-00000000000a", "MIG-b1b2c3d4-0000-5000-8000-00000000000b"]
INSTANCES = [(1, 0), (2, 0)]
GIB = 1024**3


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class FakeNvml:
    """`answers_in_bytes` as old bindings do; `broken` names functions that fail, `driver` False has none at all."""

    NVMLError = NVMLError

    def __init__(
        self,
        gpus: int = 8,
        mig: bool = True,
        answers_in_bytes: bool = False,
        broken: tuple[str, ...] = (),
        driver: bool = True,
    ) -> None:
        self.gpus = gpus
        self.mig = mig
        self.answers_in_bytes = answers_in_bytes
        self.broken = broken
        self.driver = driver
        self.calls = 0
        self.sessions = 0

    def _asked(self, function: str) -> None:
        self.calls += 1
        if function in self.broken:
            raise NVMLError(3)
        if not self.sessions:
            raise NVMLError(1)

    def _text(self, text: str) -> Any:
        return text.encode() if self.answers_in_bytes else text

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError(12)
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self._asked("nvmlShutdown")
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        self._asked("nvmlSystemGetDriverVersion")
        return self._text("580.159.04")

    def nvmlDeviceGetCount(self) -> int:
        self._asked("nvmlDeviceGetCount")
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[int, int | None]:
        self._asked("nvmlDeviceGetHandleByIndex")
        if f"gpu {index}" in self.broken:
            raise NVMLError(15)
        return index % 8, None

    def nvmlDeviceGetUUID(self, handle: tuple[int, int | None]) -> Any:
        self._asked("nvmlDeviceGetUUID")
        gpu, part = handle
        return self._text(GPUS[gpu] if part is None else SLICES[part])

    def nvmlDeviceGetMigMode(self, handle: tuple[int, int | None]) -> list[int]:
        self._asked("nvmlDeviceGetMigMode")
        if handle[0] == 0:
            raise NVMLError(3)  # a GPU that has no MIG
        return [1, 1] if self.mig and handle[0] in (6, 7) else [0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: tuple[int, int | None]) -> int:
        self._asked("nvmlDeviceGetMaxMigDeviceCount")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: tuple[int, int | None], place: int) -> tuple[int, int]:
        self._asked("nvmlDeviceGetMigDeviceHandleByIndex")
        # Slices lie where they were made; the places between are empty.
        if handle[0] != 6 or place not in (1, 3):
            raise NVMLError(6)
        return 6, (1, 3).index(place)

    def nvmlDeviceGetGpuInstanceId(self, handle: tuple[int, int]) -> int:
        self._asked("nvmlDeviceGetGpuInstanceId")
        return INSTANCES[handle[1]][0]

    def nvmlDeviceGetComputeInstanceId(self, handle: tuple[int, int]) -> int:
        self._asked("nvmlDeviceGetComputeInstanceId")
        return INSTANCES[handle[1]][1]

    def nvmlDeviceGetName(self, handle: tuple[int, int | None]) -> Any:
        self._asked("nvmlDeviceGetName")
        return self._text("NVIDIA H100" if handle[1] is None else "NVIDIA H100 MIG 1g.10gb")

    def nvmlDeviceGetCudaComputeCapability(self, handle: tuple[int, int | None]) -> tuple[int, int]:
        self._asked("nvmlDeviceGetCudaComputeCapability")
        return 9, 0

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[int, int | None]) -> Any:
        self._asked("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=80 * GIB if handle[1] is None else 10 * GIB)

    def nvmlDeviceGetAttributes(self, handle: tuple[int, int | None]) -> Any:
        self._asked("nvmlDeviceGetAttributes")
        if handle[1] is None:
            raise NVMLError(3)
        return SimpleNamespace(multiprocessorCount=16)
