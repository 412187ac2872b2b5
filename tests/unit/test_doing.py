"""What a main thread is at, from frames as they really are."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore
from torch.utils.data import DataLoader, Dataset

import ddtrace_pytorch
from ddtrace_pytorch.stalls.doing import FRAMES, Frame, doing, own_frame, short, spelled, theirs


def frames_of(thread: int) -> list[Frame]:
    found: list[Frame] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return found


def seen_during(work: Callable[[], object]) -> tuple[Counter[str], list[list[Frame]]]:
    """What another thread sees of this one while it works, about every millisecond."""
    main, over = threading.get_ident(), threading.Event()
    stacks: list[list[Frame]] = []

    def look() -> None:
        while not over.wait(0.001):
            stacks.append(frames_of(main))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        work()
    finally:
        over.set()
        looking.join()
    return Counter(doing(stack) for stack in stacks), stacks


def test_our_own_frames_are_never_shown() -> None:
    standard, ours = "/u/lib/python3.11/threading.py", "/v/ddtrace_pytorch/ledger.py"
    torchs = "/v/site-packages/torch/d.py"
    handler = "/v/lib/python3.11/site-packages/ddtrace/internal/utils/signals.py"
    users = [("/job/train.py", "log_loss", 51), ("/job/train.py", "main", 80)]
    raised = [(standard, "wait", 331), (ours, "failed", 136), (torchs, "wrapper", 83), *users]
    assert theirs(raised) == raised[2:]
    assert theirs([(standard, "wait", 1), (ours, "__call__", 2), (handler, "wrap_signals", 47), *users]) == users
    # What is called through us is its own.
    through = [("/job/data.py", "load", 7), (standard, "map", 1), ("/job/data.py", "get", 9), (ours, "next", 2), *users]
    assert theirs(through) == [*through[:3], *users]
    assert theirs([(standard, "sleep", 1), *users]) == [(standard, "sleep", 1), *users]


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader(workers: int) -> None:
    seen, stacks = seen_during(lambda: list(DataLoader(Slow(), num_workers=workers)))
    assert seen.most_common(1)[0][0] == "data"
    inside = [own_frame(spelled(stack)) for stack in stacks if doing(stack) == "data"]
    told = Counter(short(frame).split(":")[0] for frame in inside if frame is not None)
    assert told.most_common(1)[0][0] == "test_doing.py"
    if not workers:
        assert any(frame is not None and frame.endswith(" __getitem__") for frame in inside)


def slow_write(file: BytesIO) -> BytesIO:
    class Slowly(BytesIO):
        def write(self, data: object) -> int:
            time.sleep(0.05)
            return super().write(data)  # type: ignore[arg-type]

    return Slowly()


@pytest.fixture(params=[False, True], ids=["plain", "patched"])
def patched(request: pytest.FixtureRequest) -> Iterator[None]:
    """With torch's functions as they are, and with ours around them."""
    if request.param:
        ddtrace_pytorch.patch()
    yield
    ddtrace_pytorch.unpatch()


@pytest.mark.usefixtures("patched")
def test_saving() -> None:
    seen, _ = seen_during(lambda: torch.save({"a": torch.ones(10)}, slow_write(BytesIO())))
    assert seen.most_common(1)[0][0] == "checkpoint"


class SlowToLoad:
    def __setstate__(self, state: object) -> None:
        time.sleep(0.05)

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


@pytest.mark.usefixtures("patched")
def test_loading() -> None:
    saved = BytesIO()
    torch.save(SlowToLoad(), saved)
    saved.seek(0)
    seen, _ = seen_during(lambda: torch.load(saved, weights_only=False))
    assert seen.most_common(1)[0][0] == "checkpoint"


@pytest.mark.usefixtures("patched")
def test_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    seen, _ = seen_during(lambda: dcp.save({"a": torch.ones(1_000_000)}, checkpoint_id=tmp_path / "at", no_dist=True))
    assert seen["checkpoint"] > 0


def test_an_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(1_000_000))
    optimizer = torch.optim.Adam([weight], foreach=False)
    weight.grad = torch.ones_like(weight)

    def steps() -> None:
        for _ in range(30):
            optimizer.step()

    seen, _ = seen_during(steps)
    assert seen.most_common(1)[0][0] == "optimizer"


def test_compiling_and_what_was_compiled() -> None:
    @torch.compile(backend="aot_eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.sin(x) @ x
        return x

    value = torch.ones(300, 300) / 1000
    torch._dynamo.reset()
    seen, stacks = seen_during(lambda: function(value))
    assert seen["compile"] > 0
    deep = [stack for stack in stacks if doing(stack) == "compile" and len(stack) > 2 * FRAMES]
    assert deep
    assert all(len(spelled(stack)) == FRAMES and own_frame(spelled(stack)) is not None for stack in deep)

    def run() -> None:
        for _ in range(30):
            function(value)

    seen, stacks = seen_during(run)
    assert any(any("eval_frame.py" in file for file, _, _ in stack) for stack in stacks)
    assert seen["compile"] == 0


def test_a_collective() -> None:
    def initialise() -> None:
        with contextlib.suppress(Exception):
            torch.distributed.init_process_group(
                "gloo", store=HashStore(), rank=0, world_size=2, timeout=__import__("datetime").timedelta(seconds=1)
            )

    seen, _ = seen_during(initialise)
    assert seen.most_common(1)[0][0] == "collective"


def test_the_users_own_code() -> None:
    seen, stacks = seen_during(lambda: time.sleep(0.1))
    assert set(seen) == {"user"}
    frame = own_frame(spelled(stacks[-1]))
    assert frame is not None
    assert short(frame).startswith("test_doing.py:")


TORCH = "/v/lib/python3.11/site-packages/torch"


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ([f"{TORCH}/serialization.py", "/job/data.py", f"{TORCH}/utils/data/_utils/fetch.py", "/job/train.py"], "data"),
        ([f"{TORCH}/distributed/distributed_c10d.py", f"{TORCH}/distributed/checkpoint/utils.py"], "collective"),
        ([f"{TORCH}/_dynamo/convert_frame.py", f"{TORCH}/optim/optimizer.py", "/job/train.py"], "compile"),
        ([f"{TORCH}/_inductor/output_code.py", f"{TORCH}/_dynamo/eval_frame.py", "/job/train.py"], "user"),
        ([f"{TORCH}/utils/checkpoint.py", "/job/train.py"], "user"),
        (["C:\\job\\train.py"], "user"),
        ([], "user"),
    ],
)
def test_which_sign_comes_first(files: list[str], what: str) -> None:
    assert doing([(file, "f", 1) for file in files]) == what


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ([f"{TORCH}/nn/modules/module.py:7 forward", "/job/train.py:8 main"], "/job/train.py:8 main"),
        (["/u/lib/python3.11/threading.py:7 wait", "/job/train.py:8 main"], "/job/train.py:8 main"),
        (["<frozen runpy>:7 run", "/job/train.py:8 main"], "/job/train.py:8 main"),
        (["/v/lib/python3.11/site-packages/lightning/fit.py:7 fit", "/job/train.py:8 main"], "/job/train.py:8 main"),
        (["/v/lib/python3.11/site-packages/mine/fit.py:7 fit"], "/v/lib/python3.11/site-packages/mine/fit.py:7 fit"),
        ([f"{TORCH}/nn/modules/module.py:7 forward"], None),
        ([], None),
    ],
)
def test_the_innermost_frame_that_the_user_wrote(words: list[str], own: str | None) -> None:
    assert own_frame(words) == own


def test_names_are_short_where_they_can_be() -> None:
    assert short("/job/a b/train.py:88 load_batch") == "train.py:88 load_batch"
    assert short("what is this") == "what is this"
