"""How long a training waits for its data loaders, and how many workers they have."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, alone
from harness.log import rank_spans

pytestmark = pytest.mark.dist

LOADING = """
    import gc, os, sys, threading, time, traceback
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    from ddtrace_pytorch import instrumentation

    rank = instrumentation._switched_on.lifecycle
    SLOW = 0.02

    def waited(what):
        before, started = rank.steps.data_ns, time.monotonic_ns()
        what()
        whole, data = time.monotonic_ns() - started, rank.steps.data_ns - before
        assert 0 <= data <= whole, (data, whole)
        return data / 1e9

    class Slow(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            time.sleep(SLOW)
            return index

    def iterate(loader):
        return lambda: [batch for batch in loader]
"""

WAITING = f"""
{LOADING}
    assert waited(iterate(DataLoader(Slow()))) == 0, "no session, no wait"
    gc.collect()
    assert (rank.steps.garbage.ns, list(rank.progress.step.tags)) == (0, [])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert waited(iterate(DataLoader(Slow(), batch_size=2))) >= 4 * SLOW
    assert waited(iterate(DataLoader(Slow(), num_workers=2))) > 0

    def compute():
        for _ in DataLoader(range(4), batch_size=None):
            time.sleep(SLOW)

    computed = time.monotonic()
    waits = waited(compute)
    computed = time.monotonic() - computed
    assert computed - waits >= 4 * SLOW, "what is done with a batch is no wait"

    class Nested(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return list(DataLoader(Slow()))

    # `waited` asserts that no more was waited than there was time.
    assert waited(iterate(DataLoader(Nested(), batch_size=None))) >= 8 * SLOW

    def elsewhere():
        thread = threading.Thread(target=iterate(DataLoader(Slow())))
        thread.start()
        thread.join()

    assert waited(elsewhere) == 0, "a thread that fetches ahead doesn't wait"

    class Mine(torch.utils.data.dataloader._SingleProcessDataLoaderIter):
        def __next__(self):
            return super().__next__()

    class Loader(DataLoader):
        def __iter__(self):
            iterator = Mine(self)
            while True:
                try:
                    yield next(iterator)
                except StopIteration:
                    return

    assert waited(iterate(Loader(Slow()))) >= 4 * SLOW

    def trains():
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in DataLoader(Slow()):
            weight.grad = torch.ones(1)
            optimizer.step()

    def another():
        thread = threading.Thread(target=trains)
        thread.start()
        thread.join()

    assert waited(another) >= 3 * SLOW, "but one that steps does, from its first step on"
    gc.collect()
    assert rank.steps.garbage.ns > 0
    assert list(rank.progress.step.tags) == ["gc"]
    dist.destroy_process_group()
"""


def test_time_waited_for_data(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(WAITING)], alone(tmp_path / "log")).ok()


ERRORS = f"""
{LOADING}
    class Broken(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index == 1:
                raise LookupError("no such sample")
            return index

    class Ends(IterableDataset):
        def __iter__(self):
            yield 1
            raise KeyboardInterrupt

    def how_it_ends(loader):
        seen = []
        try:
            for batch in loader:
                seen.append(int(batch))
        except BaseException as error:
            frames = [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
            return seen, type(error), str(error), frames
        return seen

    def all_ends():
        return [
            how_it_ends(loader)
            for loader in (DataLoader(Broken()), DataLoader(Ends()), DataLoader(range(3)), DataLoader([1], sampler=[5]))
        ] + [exhausted()]

    def exhausted():
        iterator = iter(DataLoader(range(1)))
        next(iterator)
        return next(iterator, "the end"), next(iterator, "the end")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours = all_ends()
    before = rank.steps.data_ns
    how_it_ends(DataLoader(Broken()))
    assert rank.steps.data_ns > before
    ddtrace_pytorch.unpatch()
    assert all_ends() == ours, (ours, all_ends())
    assert not rank.loaders.here.fetches
"""


@pytest.mark.skipif("sys.version_info < (3, 11)", reason="a bare raise brings our frame back")
def test_errors_and_ends_are_those_of_torch_without_us(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(ERRORS)], alone(tmp_path / "log")).ok()


WORKERS = f"""
{LOADING}
    def life(*loaders, before=None):
        if before:
            iterate(before)()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for loader in loaders:
            iterate(loader)()
        dist.destroy_process_group()

    if __name__ == "__main__":
        life()
        life(DataLoader(Slow()), DataLoader(Slow(), num_workers=2, persistent_workers=True, prefetch_factor=3),
             DataLoader(Slow(), num_workers=1))
        life(before=DataLoader(Slow(), num_workers=1))
        life(DataLoader(Slow()))
"""


def test_how_many_workers_there_are(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(WORKERS)], alone(tmp_path / "log")).ok()
    names = ("workers", "prefetch_factor", "persistent_workers")
    seen = [
        [{**span["tags"], **span["metrics"]}.get(f"pytorch.dataloader.{name}") for name in names]
        for span in rank_spans(tmp_path / "log")
    ]
    assert seen == [[None, None, None], [2, 3, "true"], [1, 2, "false"], [0, None, None]]


ALONE = """
    import torch
    from torch.utils.data import DataLoader
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in DataLoader(range(2), num_workers=1):
        weight.grad = torch.ones(1)
        optimizer.step()
"""


def test_a_loader_that_was_there_before_the_session(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(ALONE)], alone(tmp_path / "log")).ok()
    (span,) = rank_spans(tmp_path / "log")
    assert span["metrics"]["pytorch.dataloader.workers"] == 1


IN_A_WORKER = f"""
{LOADING}
    class InWorker(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            from ddtrace_pytorch import instrumentation
            assert get_worker_info() is not None
            list(DataLoader(range(3)))
            torch.save(torch.ones(1), os.path.join(os.environ["TMPDIR"], str(os.getpid())))
            gc.collect()
            here = instrumentation._switched_on.lifecycle
            assert here.current is None
            assert (here.steps.data_ns, here.steps.garbage.ns, here.loaders.here.fetches) == (0, 0, False)
            assert list(here.progress.step.tags) == []
            return index

    if __name__ == "__main__":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for context in ("fork", "spawn"):
            assert waited(iterate(DataLoader(InWorker(), num_workers=1, multiprocessing_context=context))) > 0
"""


def test_in_a_worker_process_nothing_is_told(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(IN_A_WORKER)], alone(tmp_path / "log", TMPDIR=str(tmp_path))).ok()


TORCHDATA = f"""
{LOADING}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torchdata.nodes import IterableWrapper, Loader, Mapper
    from torchdata.stateful_dataloader import StatefulDataLoader

    assert waited(iterate(StatefulDataLoader(Slow()))) >= 4 * SLOW
    assert rank.loaders.facts["pytorch.dataloader.workers"] == 0
    assert waited(iterate(StatefulDataLoader(Slow(), num_workers=2))) > 0
    assert rank.loaders.facts["pytorch.dataloader.workers"] == 2
    assert waited(iterate(Loader(Mapper(IterableWrapper(range(4)), Slow().__getitem__)))) >= 4 * SLOW
    dist.destroy_process_group()
"""


def test_torchdata(jobs: Jobs, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    jobs.run([*PYTHON, jobs.script(TORCHDATA)], alone(tmp_path / "log")).ok()
