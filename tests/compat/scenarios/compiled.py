"""torch.compile and torch.export, seen by Dynamo's own counters."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from stage import bits, failure, launched, plain, play, scene
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

SUM = dist.ReduceOp.SUM


def fresh(n: int = 8) -> Any:
    return torch.arange(n, dtype=torch.float32) * 1.1 + dist.get_rank()


def four(tensor: Any) -> Any:
    """All that Dynamo takes into a graph, with an explicit operation."""
    reduced = tensor * 2
    dist.all_reduce(reduced, op=SUM)
    gathered = torch.empty(reduced.shape[0] * 2)
    dist.all_gather_into_tensor(gathered, reduced + 1)
    scattered = torch.empty_like(reduced)
    dist.reduce_scatter_tensor(scattered, gathered * 3, op=SUM)
    exchanged = torch.empty_like(reduced)
    dist.all_to_all_single(exchanged, scattered - 1)
    return exchanged.sin()


def two(tensor: Any) -> Any:
    """Without arithmetic: each kernel is a run of the C++ compiler."""
    dist.all_reduce(tensor, op=SUM)
    gathered = torch.empty(tensor.shape[0] * 2)
    dist.all_gather_into_tensor(gathered, tensor)
    return gathered


def breaking(tensor: Any, everybody: list[Any]) -> Any:
    """Graph breaks at each call that Dynamo can't take."""
    tensor = tensor * 2
    dist.barrier()
    tensor = (tensor + 1).sin()
    peer = 1 - dist.get_rank()
    got = torch.empty_like(tensor)
    works = [dist.isend(tensor, peer), dist.irecv(got, peer)]
    for work in works:
        work.wait()
    return got.cos()


def seen_by_dynamo() -> dict[str, Any]:
    """Its counters, and which functions it was asked to compile: by that, nothing of ours."""
    from torch._dynamo import convert_frame

    codes = [code for ref in convert_frame.input_codes.seen if (code := ref()) is not None]
    return {
        "counters": {
            name: {plain(str(key)): value for key, value in counter.items()}
            for name, counter in counters.items()
            if counter
        },
        "frames": sorted(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}" for code in codes),
    }


def fullgraph(backend: str, function: Any, sizes: tuple[int, ...]) -> Any:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    before = launched()
    came = [bits(compiled(fresh(n))) for n in sizes]
    return [came, bits(function(fresh(8))), launched() - before, seen_by_dynamo()]


@scene
def fullgraph_inductor() -> Any:
    return fullgraph("inductor", two, (8, 8))


@scene
def fullgraph_aot_eager() -> Any:
    return fullgraph("aot_eager", four, (8, 8, 12, 16))


@scene
def ten_runs() -> Any:
    torch._dynamo.reset()
    counters.clear()

    @torch.compile(fullgraph=True, backend="eager")
    def one(tensor: Any) -> Any:
        dist.all_reduce(tensor)
        return tensor + 1

    before = launched()
    came = [bits(one(fresh())) for _ in range(10)]
    return [came, launched() - before, seen_by_dynamo()]


@scene
def graph_breaks() -> Any:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(breaking, backend="aot_eager")
    everybody: list[Any] = [None, None]
    before = launched()
    came = [bits(compiled(fresh(n), everybody)) for n in (8, 8, 12)]
    said = seen_by_dynamo()
    explained = torch._dynamo.explain(breaking)(fresh(), everybody)
    breaks = [plain(reason.reason) for reason in explained.break_reasons]
    return [came, everybody, launched() - before, said, explained.graph_count, explained.graph_break_count, breaks]


@scene
def a_compiled_piece_inside_of_a_function_that_is_not() -> Any:
    # The names are bound by closures and attributes here, as libraries do.
    torch._dynamo.reset()
    counters.clear()
    reduce, batch = dist.all_reduce, dist.batch_isend_irecv

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(4, 4)
            self.reduce = reduce

        def forward(self, tensor: Any) -> Any:
            tensor = self.lin(tensor)
            with torch.no_grad():
                total = tensor.detach().clone()
                self.reduce(total, group=dist.group.WORLD)
            got = torch.empty_like(total)
            peer = 1 - dist.get_rank()
            for work in batch([dist.P2POp(dist.isend, total, peer), dist.P2POp(dist.irecv, got, peer)]):
                work.wait()
            return tensor + got

    model = torch.compile(Model(), backend="aot_eager")
    came = []
    for n in (2, 2, 3):
        out = model(fresh(4 * n).reshape(n, 4))
        out.sum().backward()
        came.append(bits(out))
    return [came, bits(*(p.grad for p in model.parameters())), seen_by_dynamo()]


@scene
def coalescing_in_a_graph() -> Any:
    torch._dynamo.reset()
    counters.clear()

    @torch.compile(backend="eager")
    def block(tensor: Any) -> Any:
        other = tensor + 1
        with dist.distributed_c10d._coalescing_manager():
            dist.all_reduce(tensor)
            dist.all_reduce(other)
        return tensor + other

    return [bits(block(fresh())), seen_by_dynamo()]


@scene
def refused_as_fullgraph() -> Any:
    torch._dynamo.reset()
    counters.clear()
    came = failure(lambda: torch.compile(breaking, fullgraph=True, backend="eager")(fresh(), [None, None]))
    # What follows are the frames inside of torch and Dynamo, of which there is one more.
    return [came["type"], came["text"].partition("from user code")[0], seen_by_dynamo()]


@scene
def compiled_step_of_an_optimizer() -> Any:
    torch._dynamo.reset()
    counters.clear()
    lin = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(lin.parameters(), lr=0.1, momentum=0.9)

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    for _ in range(3):
        lin(fresh(4)).sum().backward()
        step()
        optimizer.zero_grad()
    # Our hook on optimizer steps is no secret to Dynamo: it sees a frame more or less, and breaks no other graph.
    said = seen_by_dynamo()["counters"]
    return [bits(*lin.parameters()), {name: said.get(name) for name in ("graph_break", "stats", "recompiles")}]


@scene
def a_loader_in_a_compiled_function() -> Any:
    torch._dynamo.reset()
    counters.clear()

    @torch.compile(backend="eager")
    def epoch(total: Any, loader: Any) -> Any:
        for batch in loader:
            total = (total + batch).sin()
        return total

    def a_step(total: Any, batches: Any) -> Any:
        return (total + next(batches)).sin()

    loader = DataLoader(list(range(6)), batch_size=2)
    came = [bits(epoch(torch.zeros(2), loader)) for _ in range(2)]
    said = seen_by_dynamo()
    batches = iter(loader)
    explained = torch._dynamo.explain(a_step)(torch.zeros(2), batches)
    breaks = [plain(reason.reason) for reason in explained.break_reasons]
    return [came, said, explained.graph_count, explained.graph_break_count, breaks]


@scene
def saving_and_loading_in_a_compiled_function() -> Any:
    torch._dynamo.reset()
    counters.clear()
    path = f"{os.environ['WORK']}/{dist.get_rank()}.pt"

    def function(tensor: Any) -> Any:
        tensor = tensor.sin()
        torch.save(tensor, path)
        return tensor.cos() + torch.load(path)

    function(fresh())  # imports what it imports: ddtrace has a part in each import, which Dynamo would see
    compiled = torch.compile(function, backend="eager")
    came = [bits(compiled(fresh())) for _ in range(3)]
    said = seen_by_dynamo()
    explained = torch._dynamo.explain(function)(fresh())
    breaks = [plain(reason.reason) for reason in explained.break_reasons]
    return [came, said, explained.graph_count, explained.graph_break_count, breaks]


@scene
def a_distributed_checkpoint_in_a_compiled_function() -> Any:
    torch._dynamo.reset()
    counters.clear()

    @torch.compile(backend="eager")
    def function(tensor: Any, place: str) -> Any:
        tensor = tensor.sin()
        dcp.save({"tensor": tensor}, checkpoint_id=place)
        dcp.load({"tensor": tensor}, checkpoint_id=place)
        return tensor.cos()

    came = [bits(function(fresh(), f"{os.environ['WORK']}/{number}")) for number in range(2)]
    # The imports it makes and its collectives are seen by Dynamo too, with what ddtrace and we have around them.
    said = seen_by_dynamo()["counters"]
    return [came, {name: said.get(name) for name in ("graph_break", "recompiles")}]


class Reducing(torch.nn.Module):
    def forward(self, tensor: Any) -> Any:
        return functional.all_reduce(tensor * 2, "sum", dist.group.WORLD.group_name) + 1


class ReducingInPlace(torch.nn.Module):
    def forward(self, tensor: Any) -> Any:
        reduced = tensor * 2
        dist.all_reduce(reduced)
        return reduced + 1


def exported(module: Any, strict: bool) -> Any:
    torch._dynamo.reset()
    dynamic = {"tensor": {0: torch.export.Dim("n", min=2, max=64)}}
    before = launched()
    try:
        program = torch.export.export(module, (fresh(),), dynamic_shapes=dynamic, strict=strict)
    except Exception as error:
        return ["refused", type(error).__name__, launched() - before]
    return [
        [(node.op, str(node.target)) for node in program.graph.nodes],
        str(program.graph_signature),
        bits(program.module()(fresh(6))),
        launched() - before,
    ]


@scene
def exported_strict() -> Any:
    return [exported(Reducing(), True), exported(ReducingInPlace(), True)]


@scene
def exported_not_strict() -> Any:
    return [exported(Reducing(), False), exported(ReducingInPlace(), False)]


@scene
def traced_with_symbols() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = ReducingInPlace()
    before = launched()
    graph = make_fx(lambda tensor: module(tensor), tracing_mode="symbolic")(fresh())
    # Its result is left alone: torch traces no wait, so what the graph adds 1 to may not be reduced yet.
    graph(fresh(6))
    return [[(node.op, str(node.target)) for node in graph.graph.nodes], launched() - before]


if __name__ == "__main__":
    play()
