"""The trace of what the kernel sampler has kept one by one, in the form that torch's profiler has for the GPU's part of
its own: the JSON of Chrome's trace viewer. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddtrace_pytorch.kernels.demangling import name_of
from ddtrace_pytorch.kernels.sampler_library import COPY, FILL, Raw

_CATEGORIES = {COPY: "gpu_memcpy", FILL: "gpu_memset"}
# Times count from the last multiple of this: viewers have them as floating-point numbers of microseconds, and since the
# epoch there would be no nanoseconds left.
_BASE_NS = 90 * 86_400 * 10**9


def lines(raws: Sequence[Raw], distributed: Mapping[str, Any]) -> Iterator[str]:
    """The text of the trace. `distributed`: whose it is."""
    base = min((raw.start for raw in raws), default=0) // _BASE_NS * _BASE_NS
    head = {
        "schemaVersion": 1,
        "distributedInfo": distributed,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
    }
    yield json.dumps(head)[:-1] + ', "traceEvents": [\n'
    names: dict[str | None, str] = {}
    for raw in raws:
        name = names.get(raw.name)
        if name is None:
            name = names[raw.name] = json.dumps(name_of(raw.name))
        yield (
            f'{{"ph":"X","cat":"{_CATEGORIES.get(raw.kind, "kernel")}","name":{name},"pid":{raw.device},'
            f'"tid":{raw.stream},"ts":{_us(raw.start - base)},"dur":{_us(raw.end - raw.start)},"args":{{'
            f'"device":{raw.device},"stream":{raw.stream},"correlation":{raw.correlation}{_of_graph(raw)}}}}},\n'
        )
    # At least one, for the last has no comma.
    yield ",\n".join(json.dumps(one) for one in _places(raws)) + "\n]}\n"


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _of_graph(raw: Raw) -> str:
    return f',"graph id":{raw.graph},"graph node id":{raw.graph_node}' if raw.graph else ""


def _places(raws: Sequence[Raw]) -> Iterator[dict[str, Any]]:
    """What viewers call each GPU and each stream."""
    streams = sorted({(raw.device, raw.stream) for raw in raws})
    for device in sorted({device for device, _ in streams} or {0}):
        yield _said(device, 0, "process_name", name="python")
        yield _said(device, 0, "process_labels", labels=f"GPU {device}")
        yield _said(device, 0, "process_sort_index", sort_index=5_000_000 + device)
    for device, stream in streams:
        yield _said(device, stream, "thread_name", name=f"stream {stream}")
        yield _said(device, stream, "thread_sort_index", sort_index=stream)


def _said(device: int, stream: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": device, "tid": stream, "ts": 0, "args": args}
