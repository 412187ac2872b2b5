"""What a mark says, on which channel, for which calls, and from which rank."""

from __future__ import annotations

import json
import select
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ddtrace_pytorch import border
from ddtrace_pytorch.collectives import markers as module
from ddtrace_pytorch.collectives.listening import BATCH, Call
from ddtrace_pytorch.collectives.markers import (
    Channel,
    Markers,
    channels,
    crosses_nodes,
    find_nvtx,
    fitting,
    leads,
    our_fields,
    their_fields,
)
from ddtrace_pytorch.collectives.surface import OPERATIONS
from ddtrace_pytorch.ledger import Group
from ddtrace_pytorch.settings import load

ROWS = {operation.function: operation for operation in OPERATIONS} | {BATCH.function: BATCH}
ORIGIN = {"gpu_serial": "13", "vm_id": "vm-7"}


class Cuda:
    index = 1

    def __str__(self) -> str:
        return "cuda:1"


def tensor(nbytes: int) -> Any:
    return SimpleNamespace(nbytes=nbytes, device=Cuda())


def group(rank: int = 0, ranks: tuple[int, ...] = (4, 5, 6, 7), between: bool | None = None) -> Group:
    made = Group("7", "dp", "nccl", ranks, rank)
    made.crosses_nodes = between
    return made


def call(function: str = "all_reduce", here: Group | None = None, root: int | None = None, **more: Any) -> Call:
    known: dict[str, Any] = {"size": 16, "number": 3, "deferred": False, "started": 0, "batch": None}
    arguments = more.pop("arguments", {"tensor": tensor(16), "group": None})
    return Call(ROWS[function], here or group(), root=root, arguments=arguments, **(known | more))


ALL, BETWEEN = Channel(False, False), Channel(True, False)
THEIRS, THEIRS_BETWEEN = Channel(False, True), Channel(True, True)


@pytest.mark.parametrize(
    ("environ", "nvtx", "stdout"),
    [
        ({}, None, None),
        ({"DD_PYTORCH_NVTX": "true"}, ALL, None),
        ({"DD_PYTORCH_NVTX": "crossnode", "DD_PYTORCH_PRINT": "true"}, BETWEEN, ALL),
        ({"DD_PYTORCH_NVTX": "false", "DD_PYTORCH_PRINT": "crossnode"}, None, BETWEEN),
        ({"DD_PYTORCH_NVTX": "true", "DD_PYTORCH_COLLECTIVES": "crossnode"}, BETWEEN, None),
        ({"TORCH_DISTRIBUTED_TRACING": "ALL"}, THEIRS, None),
        ({"TORCH_DISTRIBUTED_TRACING": "CROSSNODE"}, THEIRS_BETWEEN, None),
        ({"TORCH_DISTRIBUTED_TRACING": "NONE", "TORCH_DISTRIBUTED_TRACING_PRINT": "true"}, None, None),
        ({"TORCH_DISTRIBUTED_TRACING_PRINT": "true", "GPU_SERIAL": "1", "VM_ID": "2"}, None, None),
        ({"TORCH_DISTRIBUTED_TRACING": "ALL", "TORCH_DISTRIBUTED_TRACING_PRINT": "1"}, THEIRS, THEIRS),
        ({"TORCH_DISTRIBUTED_TRACING": "CROSSNODE", "TORCH_DISTRIBUTED_TRACING_PRINT": "1"},) + (THEIRS_BETWEEN,) * 2,
        ({"TORCH_DISTRIBUTED_TRACING": "ALL", "DD_PYTORCH_NVTX": "false"}, None, None),
        ({"TORCH_DISTRIBUTED_TRACING": "ALL", "DD_PYTORCH_NVTX": "crossnode"}, BETWEEN, None),
        ({"TORCH_DISTRIBUTED_TRACING": "NONE", "DD_PYTORCH_PRINT": "true"}, None, ALL),
    ],
)
def test_who_asks_for_which_marks(environ: dict[str, str], nvtx: Channel | None, stdout: Channel | None) -> None:
    settings = load(environ)
    assert settings.complaints == ()
    assert channels(settings) == (nvtx, stdout)


def test_a_mark_in_our_words() -> None:
    assert our_fields(call(here=group(rank=2)), "train.py:7") == {
        "operation": "all_reduce",
        "bytes": 16,
        "group": "dp",
        "group_ranks": (4, 5, 6, 7),
        "rank": 6,
        "seq": 3,
        "async": False,
        "device": "cuda:1",
        "line": "train.py:7",
    }


def test_a_root_and_a_peer_are_told_apart() -> None:
    assert our_fields(call("broadcast", root=5), None)["root"] == 5
    sent = our_fields(call("isend", root=5, number=0, batch="b"), None)
    assert (sent["peer"], sent["correlation_id"]) == (5, "b")
    assert "root" not in sent
    assert "seq" not in sent
    assert our_fields(call("irecv", root=None, number=0), None)["peer"] is None  # from anybody
    assert our_fields(call("send_object_list", root=5, size=None, arguments={}), None)["peer"] == 5


def transfers(*peers: int) -> dict[str, Any]:
    return {"p2p_op_list": [SimpleNamespace(tensor=tensor(8), peer=peer) for peer in peers]}


def test_a_batch_tells_its_size() -> None:
    batch = our_fields(call("batch_isend_irecv", number=0, batch="b", arguments=transfers(5, 6)), None)
    assert batch["transfers"] == 2
    assert batch["correlation_id"] == "b"
    assert batch["device"] == "cuda:1"
    assert "peer" not in batch


def test_a_mark_in_the_words_of_monitor_collectives() -> None:
    assert their_fields(call(), "train.py:7", 1, 12.9, ORIGIN) == {
        "name": "all_reduce",
        "rank": 4,
        "source_line": "train.py:7",
        "message_size": 16,
        "device": 1,
        "timestamp": 12,
        "gpu_serial": "13",
        "vm_id": "vm-7",
    }


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (call(arguments={"tensor": tensor(16), "group": object()}), {"group_ranks": (4, 5, 6, 7)}),
        (call("broadcast", root=5), {"name": "broadcast", "root_rank": 5}),
        (call("isend", root=5, batch="b"), {"name": "send", "peer_rank": 5, "correlation_id": "b"}),
        (call("irecv", root=6), {"name": "recv", "peer_rank": 6}),
        (call("barrier", size=0, arguments={"group": None}), {"name": "barrier", "message_size": 1}),
        (call("all_gather_single"), {"name": "all_gather", "message_size": 16}),
        (
            call("reduce_scatter_single", size=64, arguments={"output": tensor(16), "input": tensor(64)}),
            {"name": "reduce_scatter", "message_size": 16},
        ),
        (call("broadcast_object_list", root=4, size=None, arguments={}), {"message_size": None, "root_rank": 4}),
    ],
)
def test_its_names_sizes_and_ranks(made: Call, told: dict[str, Any]) -> None:
    fields = their_fields(made, None, None, 0, ORIGIN)
    assert {name: fields[name] for name in told} == told
    assert set(fields) - set(told) <= {*their_fields(call(), None, None, 0, ORIGIN)}


@pytest.mark.parametrize(
    ("made", "speaks"),
    [
        (call(here=group(rank=0)), True),
        (call(here=group(rank=1)), False),
        (call("broadcast", here=group(rank=0), root=5), False),
        (call("broadcast", here=group(rank=1), root=5), True),
        (call("send", here=group(rank=1), root=4), True),
        (call("recv", here=group(rank=0), root=5), True),
        (call("batch_isend_irecv", here=group(rank=3), arguments=transfers(4)), True),
    ],
)
def test_who_prints(made: Call, speaks: bool) -> None:
    assert leads(made) is speaks


def node_of(rank: int) -> object:
    return {4: "a", 5: "a", 6: "b"}.get(rank)


@pytest.mark.parametrize(
    ("made", "crosses"),
    [
        (call(here=group(between=True)), True),
        (call(here=group(between=False)), False),
        (call(here=group(between=None)), False),
        (call("send", here=group(between=True), root=5), False),
        (call("send", here=group(between=True), root=6), True),
        (call("recv", here=group(between=True), root=7), True),  # its node isn't known: the group's answer
        (call("recv", here=group(between=False), root=None), False),
        (call("batch_isend_irecv", here=group(between=True), arguments=transfers(5, 5)), False),
        (call("batch_isend_irecv", here=group(between=True), arguments=transfers(5, 6)), True),
    ],
)
def test_what_goes_from_one_node_to_another(made: Call, crosses: bool) -> None:
    assert crosses_nodes(made, node_of) is crosses


class Recorder:
    def __init__(self) -> None:
        self.stack: list[str] = []
        self.seen: list[dict[str, Any]] = []

    def push(self, message: str) -> None:
        self.stack.append(message)
        self.seen.append(json.loads(message))

    def pop(self) -> None:
        self.stack.pop()


def without_cuda() -> Any:
    return SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False), _C=SimpleNamespace())


def marked(channel: Channel, made: Call) -> list[dict[str, Any]]:
    nvtx = Recorder()
    listener = Markers(channel, None, nvtx, without_cuda(), ORIGIN, node_of)
    listener.begin(made)
    assert len(nvtx.stack) == len(nvtx.seen)
    listener.end(made, None)
    assert nvtx.stack == []
    return nvtx.seen


def test_a_range_is_pushed_and_popped_for_what_the_channel_is_for() -> None:
    near, far = call(here=group(between=False)), call(here=group(between=True))
    assert [len(marked(ALL, near)), len(marked(ALL, far))] == [1, 1]
    assert [len(marked(BETWEEN, near)), len(marked(BETWEEN, far))] == [0, 1]
    (told,) = marked(ALL, near)
    assert __file__ in told["line"]


def test_as_in_monitor_collectives_only_the_root_marks_gather_and_a_batch_has_no_mark_of_its_own() -> None:
    at_root, elsewhere = call("gather", here=group(0), root=4), call("gather", here=group(1), root=4)
    assert [len(marked(THEIRS, one)) for one in (at_root, elsewhere)] == [1, 0]
    assert len(marked(ALL, elsewhere)) == 1
    batch = call("batch_isend_irecv", batch="b", arguments=transfers(5))
    assert marked(THEIRS, batch) == []
    assert len(marked(ALL, batch)) == 1


def test_a_batch_is_printed_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(module, "say", lines.append)
    listener = Markers(None, THEIRS, None, without_cuda(), ORIGIN, node_of)
    listener.begin(call("batch_isend_irecv", batch="b", arguments=transfers(5, 6)))
    assert lines == ["Num p2p ops in batch: 2"]


@pytest.mark.parametrize("channel", [ALL, THEIRS])
def test_a_line_fits_into_one_write_and_says_what_was_cut(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(module, "say", lines.append)
    listener = Markers(None, channel, None, without_cuda(), {"gpu_serial": "é" * 5_000, "vm_id": ""}, node_of)
    many = group(ranks=tuple(range(10_000)))
    listener.begin(call(here=many, arguments={"tensor": tensor(16), "group": object()}))
    (line,) = lines
    assert len(line.encode()) < select.PIPE_BUF
    told = json.loads(line)
    there = len(told["group_ranks"])
    assert told["group_ranks"] == list(range(there))
    assert there > 100
    lengths = {"group_ranks": 10_000} | ({"gpu_serial": 5_000} if channel is THEIRS else {})
    assert told["shortened"] == lengths


def test_what_fits_is_left_as_it_is() -> None:
    assert fitting({"group_ranks": (0, 1)}) == '{"group_ranks": [0, 1]}'


def test_torchs_own_nvtx_comes_first() -> None:
    nvtx = SimpleNamespace(range_push=object(), range_pop=object())
    found = find_nvtx(SimpleNamespace(_C=SimpleNamespace(_nvtx=1), cuda=SimpleNamespace(nvtx=nvtx)))
    assert found is not None
    assert (found.push, found.pop) == (nvtx.range_push, nvtx.range_pop)


def test_without_any_nvtx_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(border, "_said", set())
    monkeypatch.setitem(sys.modules, "nvtx", None)
    settings = load({"DD_PYTORCH_NVTX": "true"})
    assert module.markers(settings, without_cuda(), node_of) is None
    assert module.markers(settings, without_cuda(), node_of) is None
    assert caplog.text.count("the package nvtx") == 1
    assert module.markers(load({"DD_PYTORCH_NVTX": "true", "DD_PYTORCH_PRINT": "1"}), without_cuda(), node_of)


def test_nobody_asks_for_marks() -> None:
    assert module.markers(load({}), without_cuda(), node_of) is None
