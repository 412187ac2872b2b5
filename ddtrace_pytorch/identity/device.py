"""Which GPU this rank uses, asked of NVML, so that CUDA is never initialised by us.

A process that initialises CUDA can no longer fork workers that use it, and makes a context that takes memory; NVML
does neither. What NVML does not know is which GPU CUDA calls number 0: ``CUDA_VISIBLE_DEVICES`` renumbers them
(:mod:`~ddtrace_pytorch.identity.visible_devices`).
Integers in it are taken to be NVML's numbers (PCI order). Without ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` the driver puts the
fastest GPU first instead, which differs only where the GPUs of one host do; :func:`with_torch_properties` puts that
right as soon as the user's own code has initialised CUDA.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ddtrace_pytorch.identity.visible_devices import Entry, canonical_uuid, visible_entries

if TYPE_CHECKING:
    from collections.abc import Sequence

# Far more than hosts have; so that a broken driver cannot keep us asking.
MOST_GPUS = 64
MOST_SLICES = 16


@dataclass(frozen=True)
class Device:
    """The device of a rank.

    `kind` is torch's word (``cuda``, ``cpu``, ``mps``, …), `index` its number as torch counts. `uuid` is ``GPU-…`` or
    ``MIG-…``; for a MIG slice `parent_uuid` is the GPU it was cut from. `compute_capability` reads ``9.0``. What is
    not known is None.
    """

    kind: str
    index: int | None = None
    uuid: str | None = None
    parent_uuid: str | None = None
    name: str | None = None
    compute_capability: str | None = None
    sm_count: int | None = None
    total_memory_bytes: int | None = None
    driver_version: str | None = None
    complaints: tuple[str, ...] = ()

    def tags(self, host: str | None = None) -> dict[str, str | int]:
        """Span tags, unknown ones left out. With `host`, a device without a UUID gets an id unique beyond it."""
        place = self.kind if self.index is None else f"{self.kind}:{self.index}"
        facts: dict[str, str | int | None] = {
            "device.id": self.uuid or (f"{host}:{place}" if host else place),
            "device.kind": self.kind,
            "device.index": self.index,
            "device.gpu.name": self.name,
            "device.gpu.compute_capability": self.compute_capability,
            "device.gpu.sm_count": self.sm_count,
            "device.gpu.total_memory_bytes": self.total_memory_bytes,
            "device.gpu.driver_version": self.driver_version,
            "device.gpu.parent": self.parent_uuid,
        }
        return {tag: value for tag, value in facts.items() if value is not None}


def find(local_index: int | None, visible: str | None, nvml: Any = None) -> Device | None:
    """The GPU at `local_index` among those `visible` (the text of ``CUDA_VISIBLE_DEVICES``, None if unset) shows.

    `local_index` is torch's device index where the user has initialised CUDA, otherwise the local rank. Where exactly
    one GPU is visible it is that one whatever the index: launchers that give each process its own GPU do so. None when
    there is no such GPU, no NVML (`nvml` is a module like ``pynvml``, imported here when not given) or no driver;
    never another rank's GPU.
    """
    library = load_nvml() if nvml is None else nvml
    if library is None:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    try:
        return _find(local_index, visible, library)
    finally:
        _ask(library, "nvmlShutdown")


def with_torch_properties(device: Device, properties: Any) -> Device:
    """`device` with what ``torch.cuda.get_device_properties`` says, which is the truth once CUDA is up.

    Where torch names another GPU than NVML's order did, torch is right. A MIG slice keeps its uuid and parent: torch
    does not always give a slice's own.
    """
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    uuid, complaints = device.uuid, device.complaints
    told = getattr(properties, "uuid", None)
    if told is not None and device.parent_uuid is None:
        uuid = canonical_uuid(str(told))
        if device.uuid not in (None, uuid):
            complaints = (*complaints, f"CUDA's device {device.index} is {uuid}, not {device.uuid} as in PCI order")
    return replace(
        device,
        uuid=uuid,
        name=getattr(properties, "name", None) or device.name,
        compute_capability=device.compute_capability if major is None or minor is None else f"{major}.{minor}",
        sm_count=getattr(properties, "multi_processor_count", None) or device.sm_count,
        total_memory_bytes=getattr(properties, "total_memory", None) or device.total_memory_bytes,
        complaints=complaints,
    )


def load_nvml() -> Any:
    """NVML's Python bindings; None where they are not installed."""
    # The deprecated `pynvml` distribution warns when imported; whoever installed it did not ask us about it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import pynvml
        except ImportError:
            return None
    return pynvml


class _Found(NamedTuple):
    """A device CUDA can use: a whole GPU, or with `instance` a slice of `gpu`."""

    handle: Any
    gpu: Any
    uuid: str
    parent_uuid: str | None = None
    instance: tuple[int | None, int | None] | None = None


class _Board(NamedTuple):
    """One GPU as NVML counts, and what CUDA can use of it: itself, its MIG slices, or nothing."""

    uuid: str
    devices: tuple[_Found, ...]


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """What NVML answers, or None where this driver, GPU or version of the bindings has no answer."""
    call = getattr(nvml, function, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _text(answer: Any) -> str | None:
    """NVML's bindings give bytes or str, by version."""
    text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer
    return text or None


def _find(local_index: int | None, visible: str | None, nvml: Any) -> Device | None:
    boards = [_board(nvml, number) for number in range(min(_ask(nvml, "nvmlDeviceGetCount") or 0, MOST_GPUS))]
    entries = visible_entries(visible)
    devices = _all(boards) if entries is None else _chosen(boards, entries)
    if len(devices) == 1:
        local_index = 0
    if local_index is None or not 0 <= local_index < len(devices):
        return None
    complaints: tuple[str, ...] = ()
    if visible is not None and entries is not None and len(devices) < visible.count(",") + 1:
        complaints = (f"CUDA_VISIBLE_DEVICES={visible[:80]!r}: CUDA uses only the first {len(devices)} of the list",)
    return _described(nvml, devices[local_index], local_index, complaints)


def _board(nvml: Any, number: int) -> _Board:
    gpu = _ask(nvml, "nvmlDeviceGetHandleByIndex", number)
    told = _text(_ask(nvml, "nvmlDeviceGetUUID", gpu)) if gpu is not None else None
    if told is None:
        return _Board("", ())  # a lost GPU keeps its number
    uuid = canonical_uuid(told)
    mode = _ask(nvml, "nvmlDeviceGetMigMode", gpu)
    if not mode or not mode[0]:
        return _Board(uuid, (_Found(gpu, gpu, uuid),))
    slices = []
    for place in range(min(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", gpu) or 0, MOST_SLICES)):
        handle = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", gpu, place)
        name = _text(_ask(nvml, "nvmlDeviceGetUUID", handle)) if handle is not None else None
        if name is not None:
            instance = (
                _ask(nvml, "nvmlDeviceGetGpuInstanceId", handle),
                _ask(nvml, "nvmlDeviceGetComputeInstanceId", handle),
            )
            slices.append(_Found(handle, gpu, canonical_uuid(name), uuid, instance))
    return _Board(uuid, tuple(slices))


def _all(boards: Sequence[_Board]) -> list[_Found]:
    """What CUDA shows unasked: every GPU, or where one is cut, a single slice and no whole GPU."""
    devices = [device for board in boards for device in board.devices]
    slices = [device for device in devices if device.parent_uuid]
    return slices[:1] or devices


def _chosen(boards: Sequence[_Board], entries: Sequence[Entry]) -> list[_Found]:
    chosen: list[_Found] = []
    for entry in entries:
        device = _named(boards, entry)
        if device is None:
            break
        if device in chosen:
            return []
        chosen.append(device)
        if device.parent_uuid:
            break  # CUDA shows a process one slice, the first
    return chosen


def _named(boards: Sequence[_Board], entry: Entry) -> _Found | None:
    if entry.ordinal is not None:
        matches = [board.devices[:1] for board in boards[entry.ordinal : entry.ordinal + 1]]
    elif entry.instance or entry.kind == "GPU":
        matches = [
            tuple(device for device in board.devices if entry.instance in (None, device.instance))[:1]
            for board in boards
            if board.uuid.startswith(entry.uuid)
        ]
    else:
        # The driver lets a MIG- name stand for a whole GPU too.
        names = (entry.uuid, "GPU-" + entry.uuid[4:])
        matches = [(device,) for board in boards for device in board.devices if device.uuid.startswith(names)]
    return matches[0][0] if len(matches) == 1 and matches[0] else None


def _described(nvml: Any, device: _Found, index: int, complaints: tuple[str, ...]) -> Device:
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", device.gpu)
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", device.handle)
    attributes = _ask(nvml, "nvmlDeviceGetAttributes", device.handle)  # answered for slices only
    return Device(
        kind="cuda",
        index=index,
        uuid=device.uuid,
        parent_uuid=device.parent_uuid,
        name=_text(_ask(nvml, "nvmlDeviceGetName", device.handle)),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        sm_count=attributes.multiprocessorCount if attributes else None,
        total_memory_bytes=int(memory.total) if memory else None,
        driver_version=_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
        complaints=complaints,
    )
