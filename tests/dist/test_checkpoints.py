"""Checkpoints as spans: what they say, that each counts once, and that nothing else about saving and loading changes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness.agent import Agent
from harness.job import PYTHON, Jobs, alone, environment, torchrun
from harness.log import of_type, rank_spans

pytestmark = pytest.mark.dist


def checkpoints(root: Path, rank: int = 0) -> list[dict[str, Any]]:
    spans = [span for span in of_type(root, "span") if span["name"] == "pytorch.checkpoint"]
    mine = [span for span in spans if f"rank-{rank:05d}" in span["_file"]]
    return sorted(mine, key=lambda span: int(span["start"]))


SETUP = """
    import gc, io, os, sys, threading, time, warnings
    import torch, torch.distributed as dist
    from torch import load, save
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    from ddtrace_pytorch import instrumentation
    from ddtrace_pytorch.training import checkpoint_spans

    rank = instrumentation._switched_on.lifecycle

    class Slow:
        # To be saved in a tenth of a second, so that it is told of by itself.
        def __getstate__(self):
            time.sleep(checkpoint_spans.LONG / 1e9)
            return {}

        def __setstate__(self, state):
            time.sleep(checkpoint_spans.LONG / 1e9)

    def tags():
        step = rank.progress.step
        seen = list(step.tags)
        step.tags.pop("checkpoint", None)
        return [tag for tag in seen if tag == "checkpoint"]
"""

FILES = f"""
{SETUP}
    from torch.utils.data import DataLoader, Dataset

    state = {{"weight": torch.ones(1000), "slow": Slow()}}
    torch.save(state, "before the session")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert tags() == []
    load("before the session", weights_only=False)
    rank.steps.set(7)
    save(state, "a.pt")
    assert tags() == ["checkpoint"]
    assert load("a.pt", weights_only=False).keys() == state.keys()
    assert tags() == ["checkpoint"]
    rank.progress.step.number = None
    with open("b.pt", "wb") as stream:
        torch.serialization.save(state, stream)
    torch.save(state, io.BytesIO())
    tags()

    buffer = io.BytesIO()
    save([1], buffer)
    buffer.seek(0)
    assert load(buffer) == [1]
    assert tags() == [], "bytes in memory are no checkpoint"

    class Samples(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return list(torch.load("a.pt", weights_only=False))

    assert len(list(DataLoader(Samples()))) == 2
    assert tags() == [], "data are no checkpoint"

    thread = threading.Thread(target=save, args=(state, "thread.pt"))
    thread.start()
    thread.join()
    assert tags() == [], "what another thread saves does not hold up the step"

    class SavesWhileSaved:
        def __reduce__(self):
            save(state, "inner.pt")
            return list, ()

    save(SavesWhileSaved(), "outer.pt")
    print(os.path.getsize("a.pt"), os.path.getsize("b.pt"))
    dist.destroy_process_group()
    save(state, "after the session")
"""


def test_files(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*PYTHON, jobs.script(FILES)], alone(tmp_path / "log")).ok()
    sizes = [int(word) for word in result.stdout.split()]
    spans = checkpoints(tmp_path / "log")
    said = [(span["resource"], span["tags"]["checkpoint.op"], span["metrics"].get("step")) for span in spans]
    assert said == [
        ("before the session", "torch.load", None),
        ("a.pt", "torch.save", 7),
        ("a.pt", "torch.load", 7),
        ("b.pt", "torch.save", None),
        ("BytesIO", "torch.save", None),
        ("thread.pt", "torch.save", None),
        ("outer.pt", "torch.save", None),
    ]
    sized = [(span["metrics"]["checkpoint.bytes"], span["tags"]["checkpoint.bytes_of"]) for span in spans[1:4]]
    assert sized == [(sizes[0], "file"), (sizes[0], "file"), (sizes[1], "stream")]
    assert [span["tags"].get("checkpoint.path") for span in spans[3:5]] == ["b.pt", None]
    assert [span["tags"]["checkpoint.kind"] for span in spans[1:3]] == ["save", "load"]
    (parent,) = rank_spans(tmp_path / "log")
    for span in spans:
        assert (span["parent_id"], span["trace_id"], span["error"]) == (parent["span_id"], parent["trace_id"], 0)
        assert span["tags"]["component"] == "pytorch"
        assert span["duration"] >= 100_000_000
        assert span["metrics"]["checkpoint.ms"] == pytest.approx(span["duration"] / 1e6)
        assert parent["start"] <= span["start"] <= span["ts"] <= parent["ts"]


CROWD = f"""
{SETUP}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = 0
    for number in range(50):
        save(torch.ones(number), "crowd.pt")
        whole += os.path.getsize("crowd.pt")
    print(whole)
"""


def test_a_crowd_of_small_ones_is_few_spans_and_all_are_counted(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*PYTHON, jobs.script(CROWD)], alone(tmp_path / "log")).ok()
    spans = checkpoints(tmp_path / "log")
    assert sum(span["metrics"]["checkpoint.count"] for span in spans) == 50
    assert sum(span["metrics"]["checkpoint.bytes"] for span in spans) == int(result.stdout)
    assert 2 <= len(spans) <= 25


ERRORS = f"""
{SETUP}
    import traceback

    class Refuses:
        def __reduce__(self):
            raise KeyboardInterrupt("not now")

        def __repr__(self):
            raise AssertionError("nobody asks for that")

    def failures():
        for call in (
            lambda: save([1], "no/such/directory.pt"),
            lambda: load("no such file.pt"),
            lambda: save(Refuses(), "a.pt"),
            lambda: save([1], Refuses()),
            lambda: load(Refuses()),
            lambda: save([1], "\\0"),
            lambda: save([1]),
            lambda: load(map_location="cpu"),
        ):
            try:
                call()
            except BaseException as error:
                frames = [(frame.filename, frame.lineno, frame.name)
                          for frame in traceback.extract_tb(error.__traceback__)]
                yield type(error), str(error), frames, type(error.__context__), type(error.__cause__)
                # Nothing of ours keeps it, and with it the frames, alive.
                error.__traceback__ = None
                held.append(len(gc.get_referrers(error)))

    held = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours = list(failures())
    ours_held, held = held, []
    ddtrace_pytorch.unpatch()
    assert list(failures()) == ours, (ours, list(failures()))
    assert ours_held == held[:len(ours_held)], (ours_held, held)
"""


@pytest.mark.skipif("sys.version_info < (3, 11)", reason="a bare raise brings our frame back")
def test_errors_are_those_of_torch_and_spans_say_so(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*PYTHON, jobs.script(ERRORS)], alone(tmp_path / "log")).ok()
    assert "ddtrace_pytorch" not in result.stderr
    spans = checkpoints(tmp_path / "log")
    assert {span["error"] for span in spans} == {1}
    counted = Counter[tuple[str, str]]()
    for span in spans:
        counted[span["tags"]["checkpoint.op"]] += span["metrics"]["checkpoint.count"]
        assert "checkpoint.bytes" not in span["metrics"]
    assert counted == {"torch.save": 4, "torch.load": 2}
    first = {span["tags"]["checkpoint.op"]: span for span in reversed(spans)}
    assert first["torch.load"]["tags"]["error.type"] == "FileNotFoundError"
    assert first["torch.save"]["tags"]["error.type"] == "RuntimeError"
    assert "no/such" in first["torch.save"]["tags"]["error.message"]


NOBODY_CAN_TELL = """
    import copy, inspect, pickle
    import torch, torch.serialization as serialization
    from torch import load, save
    import ddtrace_pytorch

    functions = (save, load)

    def seen():
        return [(id(function), inspect.signature(function), pickle.dumps(function), inspect.getsource(function),
                 function.__defaults__, function.__kwdefaults__, function.__dict__, function.__doc__,
                 function.__code__.co_name, copy.deepcopy(function) is function) for function in functions]

    before = seen()
    ddtrace_pytorch.patch()
    assert seen() == before
    assert torch.save is serialization.save is save
    assert torch.load is serialization.load is load
    assert pickle.loads(pickle.dumps(save)) is save
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    assert dcp.save is state_dict_saver.save
    assert dcp.async_save is state_dict_saver.async_save
    assert dcp.load is state_dict_loader.load
    ours = [(inspect.signature(one), pickle.dumps(one), inspect.getsource(one))
            for one in (dcp.save, dcp.load, dcp.async_save)]
    ddtrace_pytorch.unpatch()
    assert ours == [(inspect.signature(one), pickle.dumps(one), inspect.getsource(one))
                    for one in (dcp.save, dcp.load, dcp.async_save)]
    assert seen() == before
"""


def test_the_functions_are_what_they_were(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(NOBODY_CAN_TELL)], alone(tmp_path / "log")).ok()


DISTRIBUTED = f"""
{SETUP}
    assert "torch.distributed.checkpoint" not in sys.modules
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    checkpoint_spans.LONG = 0  # each has a span
    place = sys.argv[1]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    class Model(Stateful):
        def __init__(self):
            self.weight = distribute_tensor(torch.ones(1000, 10), mesh, [Shard(0)])

        def state_dict(self):
            return {{"weight": self.weight}}

        def load_state_dict(self, state):
            pass

    def state():
        return {{"model": Model()}}

    turn = rank.steps.set

    turn(1)
    dcp.save(state(), checkpoint_id=f"{{place}}/1")
    assert tags() == ["checkpoint"]
    turn(2)
    dcp.save(state_dict=state(), storage_writer=dcp.FileSystemWriter(f"{{place}}/2"))
    turn(3)
    dcp.load(state(), checkpoint_id=f"{{place}}/1")
    turn(4)
    dcp.save_state_dict({{"weight": Model().weight}}, dcp.FileSystemWriter(f"{{place}}/4"))
    turn(5)
    dcp.load_state_dict({{"weight": Model().weight}}, dcp.FileSystemReader(f"{{place}}/4"))
    turn(6)
    try:
        dcp.load(state(), checkpoint_id=f"{{place}}/6")
    except dcp.CheckpointException:
        pass
    else:
        raise AssertionError
    tags()
    turn(7)
    future = dcp.async_save(state(), checkpoint_id=f"{{place}}/7")
    assert tags() == ["checkpoint"]
    turn(70)
    assert type(future.result()) is dcp.Metadata
    assert tags() == []
    turn(8)
    assert dcp.async_save(state(), checkpoint_id="/proc/8").exception() is not None
    turn(9)
    try:
        dcp.async_save(None, checkpoint_id=f"{{place}}/9")
    except AttributeError:
        pass
    else:
        raise AssertionError
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_distributed_checkpoints(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    place = tmp_path / "place"
    env = environment(agent.url, DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    jobs.run([*torchrun(2), jobs.script(DISTRIBUTED), str(place)], env).ok()
    assert len(agent.received("pytorch.checkpoint")) == 18
    for rank in (0, 1):
        spans = {span["metrics"]["step"]: span for span in checkpoints(tmp_path / "log", rank)}
        assert {step: (span["tags"]["checkpoint.op"], span["resource"]) for step, span in spans.items()} == {
            1: ("dcp.save", f"{place}/1"),
            2: ("dcp.save", f"{place}/2"),
            3: ("dcp.load", f"{place}/1"),
            4: ("dcp.save", f"{place}/4"),
            5: ("dcp.load", f"{place}/4"),
            6: ("dcp.load", f"{place}/6"),
            7: ("dcp.async_save", f"{place}/7"),
            8: ("dcp.async_save", "/proc/8"),
            9: ("dcp.async_save", f"{place}/9"),
        }
        for step in (1, 2, 4, 7):
            files = sum(file.stat().st_size for file in (place / str(step)).glob(f"__{rank}_*.distcp"))
            # 500 rows of 10 floats.
            assert 20_000 <= spans[step]["metrics"]["checkpoint.bytes"] <= files, step
            assert spans[step]["tags"]["checkpoint.bytes_of"] == "rank"
        for step in (3, 5):
            assert spans[step]["metrics"]["checkpoint.bytes"] == 20_000
            assert spans[step]["tags"]["checkpoint.bytes_of"] == "local_tensors"
        for step, span in spans.items():
            failed = step in (6, 8, 9)
            assert span["error"] == int(failed)
            assert ("checkpoint.bytes" in span["metrics"]) is not failed
            in_background = step in (7, 8, 9)
            assert span["tags"].get("checkpoint.async") == ("true" if in_background else None)
            blocked = span["metrics"].get("checkpoint.blocked_ms")
            assert 0 < blocked <= span["duration"] / 1e6 if in_background else blocked is None
        assert spans[6]["tags"]["error.type"] == spans[8]["tags"]["error.type"]
        assert spans[6]["tags"]["error.type"].endswith(".CheckpointException")
        assert spans[9]["tags"]["error.type"] == "AttributeError"


IN_BACKGROUND = f"""
{SETUP}
    import torch.distributed.checkpoint as dcp
    from ddtrace_pytorch.stalls.doing import doing

    go_on, writing = threading.Event(), threading.Event()

    class Slow(dcp.FileSystemWriter):
        def write_data(self, *args, **kwargs):
            writing.set()
            assert go_on.wait(30)
            return super().write_data(*args, **kwargs)

    def frames():
        found, frame = [], sys._current_frames()[threading.main_thread().ident]
        while frame is not None:
            found.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        return found

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    future = dcp.async_save({{"weight": torch.ones(10)}}, storage_writer=Slow("a"))
    assert writing.wait(30)
    assert doing(frames()) == "user"
    first = rank.current.span.piece.span_id
    rank.current.rotate()
    assert rank.current.span.piece.span_id != first
    # Another one meanwhile, with a path of its own.
    dcp.save({{"weight": torch.ones(10)}}, storage_writer=dcp.FileSystemWriter("b"))
    go_on.set()
    future.result()
    go_on.clear()
    writing.clear()
    future = dcp.async_save({{"weight": torch.ones(10)}}, storage_writer=Slow("c"), no_dist=True)
    assert writing.wait(30)
    dist.destroy_process_group()
    go_on.set()
    future.result()
    print(first)
"""


def test_what_goes_on_in_the_background_is_under_the_piece_it_started_in(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*PYTHON, jobs.script(IN_BACKGROUND)], alone(tmp_path / "log")).ok()
    spans = {span["resource"]: span for span in checkpoints(tmp_path / "log")}
    assert set(spans) == {"a", "b", "c"}
    assert spans["a"]["parent_id"] == result.stdout.split()[-1] != spans["b"]["parent_id"]
    assert spans["a"]["ts"] >= spans["b"]["ts"]
    assert [spans[name]["tags"].get("checkpoint.unfinished") for name in "abc"] == [None, None, "true"]
    assert "checkpoint.bytes" not in spans["c"]["metrics"]


IN_A_PROCESS = """
    import sys
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch, torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        kind = AsyncCheckpointerType.PROCESS
        future = dcp.async_save({"weight": torch.ones(10)}, checkpoint_id=sys.argv[1], async_checkpointer_type=kind)
        future.result()
        dist.destroy_process_group()
"""


def test_a_process_that_saves_for_a_rank_is_no_rank(jobs: Jobs, tmp_path: Path) -> None:
    script = jobs.script(IN_A_PROCESS)
    jobs.run([*PYTHON, script, str(tmp_path / "at")], alone(tmp_path / "log")).ok()
    (span,) = rank_spans(tmp_path / "log")
    assert span["tags"]["pytorch.end_reason"] == "destroyed"
    (checkpoint,) = checkpoints(tmp_path / "log")
    assert checkpoint["tags"]["checkpoint.op"] == "dcp.async_save"
    assert checkpoint["metrics"]["checkpoint.bytes"] > 0


AMONG_OTHERS = """
    import functools, itertools
    import torch, torch.distributed as dist
    import ddtrace_pytorch

    code = torch.save.__code__

    class Tool:
        def __init__(self):
            self.calls = 0

        def on(self):
            found = self.found = torch.save

            @functools.wraps(found)
            def save(*args, **kwargs):
                self.calls += 1
                return found(*args, **kwargs)

            torch.save = save

        def off(self):
            torch.save = self.found

    class Us:
        on = staticmethod(ddtrace_pytorch.patch)
        off = staticmethod(ddtrace_pytorch.unpatch)

    original, expected = torch.save, 0
    for entering, leaving in itertools.product(itertools.permutations("ut"), repeat=2):
        tool, is_on = Tool(), {"u": False, "t": False}
        who = {"u": Us, "t": tool}
        for name, switch in [(name, "on") for name in entering] + [(name, "off") for name in leaving]:
            getattr(who[name], switch)()
            is_on[name] = switch == "on"
            calls = tool.calls
            dist.init_process_group("gloo")
            torch.save([1], "a.pt")
            dist.destroy_process_group()
            assert tool.calls - calls == is_on["t"]
            expected += is_on["u"]
        assert torch.save is original
        assert torch.save.__code__ is code
    print(expected)
"""


def test_another_tool_on_the_same_function_neither_loses_nor_keeps_us(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*PYTHON, jobs.script(AMONG_OTHERS)], alone(tmp_path / "log")).ok()
    counted = sum(span["metrics"]["checkpoint.count"] for span in checkpoints(tmp_path / "log"))
    assert counted == int(result.stdout) == 8


INTERRUPTED = f"""
{SETUP}
    from harness.interrupting import interrupted_everywhere
    from torch.utils.data import DataLoader, Dataset

    TRAINING = "ddtrace_pytorch/training/"
    state = [torch.ones(1)]
    save(state, "data.pt")

    class Samples(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return [torch.load("data.pt"), *DataLoader([1])]

    def fetch():
        next(iter(DataLoader(Samples())))

    fetch()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fetches = saves = 0
    for fetches in interrupted_everywhere(fetch, TRAINING + "dataloader.py", every=3):
        before = time.monotonic_ns(), rank.steps.data_ns
        fetch()
        took, waited = time.monotonic_ns() - before[0], rank.steps.data_ns - before[1]
        assert 0 < waited < took, (fetches, waited, took)
        assert tags() == [], fetches

    ddtrace_pytorch.set_step(1)  # before the first there is none to tag

    def interrupted():
        save(state, "interrupted.pt")

    for saves in interrupted_everywhere(interrupted, TRAINING + "checkpoint.py", every=3):
        tags()
        save(state, "next.pt")
        assert tags() == ["checkpoint"], saves

    # Another thread fetches while this one saves.
    fetching, saved = threading.Event(), threading.Event()

    class Waits(Samples):
        def __getitem__(self, index):
            fetching.set()
            assert saved.wait(30)
            return index

    def elsewhere():
        rank.steps.trains_on.add(threading.get_ident())
        list(DataLoader(Waits()))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert fetching.wait(30)
    save(state, "meanwhile.pt")
    assert tags() == ["checkpoint"]
    saved.set()
    thread.join()
    print(fetches, saves)
    dist.destroy_process_group()
"""


@pytest.mark.once
def test_after_an_interrupt_anywhere_the_next_is_told_as_ever(jobs: Jobs, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    result = jobs.run([*PYTHON, jobs.script(INTERRUPTED)], alone(tmp_path / "log", PYTHONPATH=path)).ok()
    fetches, saves = map(int, result.stdout.split())
    assert fetches > 50
    assert saves > 200
