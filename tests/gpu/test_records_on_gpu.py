"""By hand, on a machine with a GPU: scalars that are on it, behind a kernel that takes a second and in a CUDA graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, environment
from harness.log import of_type

pytestmark = pytest.mark.gpu

SCRIPT = """
    import json, statistics, time
    import torch
    import ddtrace_pytorch
    from ddtrace_pytorch import scalar, set_step
    ddtrace_pytorch.patch()

    said = {}
    loss = torch.zeros((), device="cuda", requires_grad=True)
    scalar({"opens": 1})  # the session, as there is no group
    begun = time.perf_counter()
    scalar({"warm": loss})
    said["first_us"] = (time.perf_counter() - begun) * 1e6
    torch.cuda.synchronize()

    cycles = 1_000_000
    begun = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    cycles = int(cycles / (time.perf_counter() - begun))  # of one second

    value = torch.empty((), device="cuda")
    torch.cuda._sleep(cycles)
    took = []
    for number in range(1, 101):
        value.fill_(float(number))
        begun = time.perf_counter()
        scalar({"behind": value})
        took.append((time.perf_counter() - begun) * 1e6)
        value.zero_()
    said["busy"] = not torch.cuda.current_stream().query()
    said["behind_us"] = statistics.median(took)
    said["slowest_us"] = max(took)
    torch.cuda.synchronize()

    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool):
        scalar({str(dtype): torch.ones((1, 1), device="cuda", dtype=dtype)})
    with torch.inference_mode():
        scalar({"inference": torch.ones((), device="cuda")})
    scalar({"nan": torch.tensor(float("nan"), device="cuda"), "inf": torch.tensor(float("-inf"), device="cuda")})
    scalar({"several": torch.ones(2, device="cuda")})
    scalar({"graph": (loss * 2).sum()})

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = torch.full((), 7.0, device="cuda")
        where = made.data_ptr()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda._sleep(cycles // 2)
    scalar({"freed": made})
    del made
    with torch.cuda.stream(side):
        # Whoever gets its memory writes there long before the number is copied.
        others = [torch.zeros((), device="cuda") for _ in range(50)]
    said["not_copied_yet"] = not torch.cuda.current_stream().query()
    said["given_away"] = where in {other.data_ptr() for other in others}
    torch.cuda.synchronize()
    del others

    static = torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    scalar({"pending": static})
    with torch.cuda.graph(graph):
        static += 1
        scalar({"captured": static, "host": 5})
    graph.replay()
    torch.cuda.synchronize()
    said["replayed"] = static.item()
    scalar({"after": static})
    print(json.dumps(said))
"""


def test_scalars_on_a_gpu(jobs: Jobs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(log))
    result = jobs.run([*PYTHON, jobs.script(SCRIPT)], env).ok()
    said = json.loads(result.stdout)
    print(said)
    assert said["busy"], "all calls came back while the kernel ran"
    assert said["behind_us"] < 50
    assert said["replayed"] == 2
    assert said["not_copied_yet"]
    assert not said["given_away"]
    numbers: dict[str, list[float]] = {}
    for record in of_type(log, "scalar"):
        for name, number in record["metrics"].items():
            numbers.setdefault(name, []).append(number)
    assert numbers.pop("behind") == [float(number) for number in range(1, 101)]
    assert numbers == {
        "opens": [1], "warm": [0.0], "torch.float64": [1.0], "torch.bfloat16": [1.0], "torch.float16": [1.0],
        "torch.int32": [1], "torch.bool": [1], "inference": [1.0], "nan": ["NaN"], "inf": ["-Infinity"], "graph": [0.0],
        "pending": [1.0], "freed": [7.0], "host": [5], "after": [2.0],
    }  # fmt: skip
    (drop,) = of_type(log, "drop")
    assert (drop["reason"], drop["count"]) == ("scalars during graph capture", 1)
