"""In what torch.compile compiles, the user's records are nothing: the graphs and results are those without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.job import PYTHON, alone, jobs_in
from harness.log import of_type

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SCRIPT = """
    import contextlib, json, warnings
    import torch
    import torch._dynamo as dynamo
    from torch._dynamo import convert_frame
    from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
    import ddtrace_pytorch
    from ddtrace_pytorch import event, scalar, set_step, span, step_tag

    ddtrace_pytorch.patch()
    said = {}
    x = torch.arange(3.0)

    def bare(x, breaks):
        y = x + 1
        y = y * 2
        if breaks:
            dynamo.graph_break()
        y = y.sin()
        return y - 1

    def recording(x, breaks):
        set_step(7)
        y = x + 1
        with span("in graph", size=x):
            step_tag("compiled")
            y = y * 2
            event("in graph", y=y)
            if breaks:
                dynamo.graph_break()
            with span("inner"):
                y = y.sin()
        scalar({"loss": y.sum() if breaks is None else y[0], "two": 2.0})
        return y - 1

    @span("decorated")
    def decorated(x, breaks):
        return bare(x, breaks)

    def calling(x, breaks):
        return bare(x, breaks)

    def calling_decorated(x, breaks):
        return decorated(x, breaks)

    def compiled(function, backend, breaks):
        dynamo.reset()
        counter = CompileCounter() if backend == "eager" else CompileCounterWithBackend(backend)
        run = torch.compile(function, backend=counter, fullgraph=not breaks)
        results = [run(x, breaks).tolist() for _ in range(2)]
        return [counter.frame_count, counter.op_count, results]

    for name, pair in {
        "a body": (bare, recording), "a function": (bare, decorated), "a callee": (calling, calling_decorated),
    }.items():
        for backend in ("eager", "inductor"):
            for breaks in (False, True):
                if backend == "inductor" and name != "a body":
                    continue
                key = f"{name}, {backend}, {'with' if breaks else 'without'} a break"
                said[key] = [compiled(function, backend, breaks) for function in pair]

    codes = [code for ref in convert_frame.input_codes.seen if (code := ref()) is not None]
    said["ours"] = sorted({code.co_filename for code in codes if "ddtrace_pytorch" in code.co_filename})

    # Around what is compiled.
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, x):
            with span("in graph"):
                y = self.layer(x)
                dynamo.graph_break()
                return y.relu()

    dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    run = torch.compile(model, backend="aot_eager")
    set_step(1)
    for _ in range(3):
        with span("step"):
            with span("forward"):
                loss = run(x).sum()
            with span("backward"):
                loss.backward()
    said["gradient"] = model.layer.weight.grad.tolist()
    model.zero_grad()
    for _ in range(3):
        model.forward(x).sum().backward()
    said["gradient by itself"] = model.layer.weight.grad.tolist()
    print("SAID", json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("records")
    with jobs_in(directory) as jobs:
        env = alone(
            directory / "log",
            TORCHINDUCTOR_CACHE_DIR=str(directory / "inductor"),
            TORCHINDUCTOR_COMPILE_THREADS="1",
            TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0",
        )
        result = jobs.run([*PYTHON, jobs.script(SCRIPT)], env, timeout=250).ok()
    assert "RuntimeError" not in result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("SAID ")]
    found: dict[str, Any] = json.loads(line.removeprefix("SAID "))
    found["log"] = directory / "log"
    return found


def test_graphs_operations_and_results_are_the_same_with_records_in_them(said: dict[str, Any]) -> None:
    scenes = {name: pair for name, pair in said.items() if name.startswith("a ")}
    assert len(scenes) == 8
    for name, (bare, recording) in scenes.items():
        assert recording == bare, name
        assert bare[0] == (2 if "with a" in name else 1), name


def test_no_code_of_ours_is_compiled(said: dict[str, Any]) -> None:
    assert said["ours"] == []


def test_spans_around_a_compiled_forward_and_backward_are_recorded_and_change_nothing(said: dict[str, Any]) -> None:
    assert said["gradient"] == said["gradient by itself"]
    log: Path = said["log"]
    names = [record["name"] for record in of_type(log, "user_span")]
    # A decorated function: the four runs of it compiled by itself, and two where the caller's graph breaks at it, so
    # that it is called as it is. Of `Model.forward` the three that were not compiled.
    assert names == ["decorated"] * 6 + ["forward", "backward", "step"] * 3 + ["in graph"] * 3
    assert of_type(log, "event") == of_type(log, "scalar") == []
