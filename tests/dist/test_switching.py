"""What is instrumented in a real torch, when sessions open and close, and that all of it is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.job import DDTRACE_RUN, PYTHON, Jobs, alone
from harness.log import of_type, rank_spans

pytestmark = pytest.mark.dist

OUR_THREADS = """
    import threading

    def our_threads():
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ddtrace_pytorch"))
"""

BY_EVERY_NAME = f"""
    import functools, inspect, pickle, traceback
    import torch.distributed as dist
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    import ddtrace_pytorch
{OUR_THREADS}
    c10d = dist.distributed_c10d

    def seen(function):
        return (id(function), hash(function), inspect.signature(function), pickle.dumps(function), function.__doc__,
                function.__defaults__, function.__kwdefaults__, dict(function.__dict__), function.__qualname__,
                function.__code__.co_name, function.__code__.co_firstlineno, function.__code__.co_filename)

    def refused():
        try:
            init_process_group("gloo", init_method="env://", store=dist.HashStore())
        except AssertionError as error:
            return str(error), traceback.extract_tb(error.__traceback__)[-1], error.__context__, error.__cause__

    functions = (init_process_group, destroy_process_group)
    before, refusal = [seen(function) for function in functions], refused()

    init_process_group("gloo")
    assert our_threads() == []
    ddtrace_pytorch.patch()
    assert "ddtrace_pytorch.pulse" in our_threads(), "a group that is up has a session at once"
    destroy_process_group()
    assert our_threads() == []

    assert [seen(function) for function in functions] == before
    assert dist.init_process_group is c10d.init_process_group is init_process_group
    assert pickle.loads(pickle.dumps(destroy_process_group)) is dist.destroy_process_group

    def opens(init, destroy):
        init()
        assert "ddtrace_pytorch.pulse" in our_threads(), init
        destroy()
        assert our_threads() == [], destroy

    opens(lambda: init_process_group("gloo"), destroy_process_group)
    opens(lambda: c10d.init_process_group(backend="gloo"), c10d.destroy_process_group)
    opens(lambda: init_device_mesh("cpu", (1,)), lambda: dist.destroy_process_group(dist.group.WORLD))
    opens(functools.partial(init_process_group, "gloo"), functools.partial(destroy_process_group, group=None))

    init_process_group("gloo")
    destroy_process_group(dist.new_group([0]))
    assert "ddtrace_pytorch.pulse" in our_threads(), "only the default group is the session's"
    destroy_process_group()

    assert refused() == refusal
"""


def test_a_session_opens_and_closes_by_every_name_and_nobody_can_tell(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(BY_EVERY_NAME)], alone(tmp_path / "log")).ok()
    reasons = [span["tags"]["pytorch.end_reason"] for span in rank_spans(tmp_path / "log")]
    assert sorted(reasons) == ["destroyed"] * 6 + ["exception"]


SPAWN = """
    import functools
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def child(rank, init):
        init(rank=rank)
        dist.barrier()
        dist.destroy_process_group()

    if __name__ == "__main__":
        for method in ("spawn", "fork"):
            init = functools.partial(dist.init_process_group, "gloo", world_size=2,
                                     init_method=f"file://{__file__}.{method}")
            mp.start_processes(child, (init,), nprocs=2, start_method=method)
"""


def test_each_child_of_multiprocessing_has_one_span_and_the_parent_none(jobs: Jobs, tmp_path: Path) -> None:
    env = alone(tmp_path / "log", DD_PATCH_MODULES="pytorch:true")
    jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(SPAWN)], env).ok()
    spans = rank_spans(tmp_path / "log")
    assert [span["metrics"]["rank"] for span in spans] == [0, 0, 1, 1]
    assert {span["tags"]["pytorch.end_reason"] for span in spans} == {"destroyed"}
    assert len({record["pid"] for record in of_type(tmp_path / "log", "identity")}) == 4


NOT_ASKED = """
    import logging, os, sys, threading
    before = threading.active_count(), os.listdir("."), os.listdir(os.environ["TMPDIR"])
    import ddtrace_pytorch
    assert not {"torch", "ddtrace", "wrapt", "logging.handlers", "packaging"} & set(sys.modules)
    assert (threading.active_count(), os.listdir("."), os.listdir(os.environ["TMPDIR"])) == before

    import ddtrace, torch, torch.distributed as dist
    plain = threading.active_count()
    functions = [dist.init_process_group, dist.destroy_process_group]
    optim = sys.modules["torch.optim.optimizer"]

    def state():
        return [(function.__code__, [cell.cell_contents for cell in function.__closure__ or ()])
                for function in functions], dict(optim._global_optimizer_post_hooks)

    untouched = state()

    def train():
        dist.init_process_group("gloo")
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        torch.optim.SGD([weight], lr=1.0).step()
        dist.destroy_process_group()
        assert weight.item() == 0

    train()
    assert state() == untouched
    assert threading.active_count() == plain
    assert not {"ddtrace_pytorch.session", "ddtrace_pytorch.instrumentation"} & set(sys.modules)
    assert not hasattr(torch, "_datadog_patch")
    assert [name for name in os.listdir(os.environ["TMPDIR"]) if "pytorch" in name] == []

    class Heard(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logging.getLogger("ddtrace_pytorch").addHandler(Heard())
    real = torch.__version__
    for version in ("1.13.1", "3.0.0", "3.1.0.dev20300101+cu140", "4", "not a version"):
        said = []
        torch.__version__ = version
        for _ in range(3):
            ddtrace_pytorch.patch()
        (warning,) = said
        assert version in warning and ">=2.0" in warning and "<3" in warning, warning
        assert state() == untouched
    assert "ddtrace_pytorch.session" not in sys.modules
    loaded = set(sys.modules)

    torch.__version__ = "2.9.0a0+1234.nv25.10"
    said = []
    ddtrace.patch(pytorch=True)
    assert state() != untouched
    assert said == []
    torch.__version__ = real
    assert threading.active_count() == plain, "patched, but nothing to watch yet"
    import ddtrace.contrib.internal.pytorch.patch as slot
    slot.unpatch()
    assert state() == untouched
    heavy = ("torch.distributed.fsdp", "deepspeed", "ray", "pynvml", "torch.distributed.checkpoint")
    assert [name for name in set(sys.modules) - loaded if name.startswith(heavy)] == []
"""


def test_nothing_happens_unless_asked_for_and_only_on_a_torch_we_know(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    env = alone(tmp_path / "log", DD_TRACE_SAFE_INSTRUMENTATION_ENABLED="true", TMPDIR=str(tmp_path / "tmp"))
    jobs.run([*PYTHON, jobs.script(NOT_ASKED)], env).ok()
    assert not (tmp_path / "log").exists()


OFF = f"""
    import os, threading
    import torch.distributed as dist
    import ddtrace_pytorch
{OUR_THREADS}
    ddtrace_pytorch.patch()
    dist.init_process_group("gloo")
    assert our_threads() == []
    dist.destroy_process_group()
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"], threading.enumerate()
"""


def test_ddtraces_own_switch_turns_us_off(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*PYTHON, jobs.script(OFF)], alone(tmp_path / "log", DD_TRACE_ENABLED="false")).ok()
    assert result.stderr == ""
    assert not (tmp_path / "log").exists()


GONE_WRONG = f"""
    import contextlib, logging, os, re, resource, signal, sys, tempfile
    import torch, torch.distributed as dist
    from ddtrace._trace.processor import SpanProcessor
    from harness.waiting import until
    import ddtrace_pytorch
{OUR_THREADS}
    said = []

    class Heard(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logging.getLogger("ddtrace_pytorch").addHandler(Heard())
    ddtrace_pytorch.patch()

    @contextlib.contextmanager
    def setting(**values):
        before = {{name: os.environ.get(name) for name in values}}
        os.environ.update(values)
        yield
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value

    @contextlib.contextmanager
    def limit(what, soft):
        before = resource.getrlimit(what)
        resource.setrlimit(what, (soft, before[1]))
        yield
        resource.setrlimit(what, before)

    def descriptors():
        # Not gloo's sockets, which it closes when it likes.
        links = ["/proc/self/fd/" + number for number in os.listdir("/proc/self/fd")]
        targets = [os.readlink(link) for link in links if os.path.islink(link)]
        return sorted(re.sub(r":\\[\\d+\\]", "", target) for target in targets if not target.startswith("socket"))

    @contextlib.contextmanager
    def no_descriptors_left():
        with limit(resource.RLIMIT_NOFILE, 3):
            yield

    @contextlib.contextmanager
    def no_threads():
        threading.stack_size(1 << 47)
        yield
        threading.stack_size(0)

    @contextlib.contextmanager
    def no_temporary_directory():
        del os.environ["DD_PYTORCH_LOG_DIR"]
        tempfile.tempdir = None
        with limit(resource.RLIMIT_FSIZE, 0):
            yield
        tempfile.tempdir = None

    def train(trouble=None):
        said.clear()
        with contextlib.ExitStack() as stack:
            dist.init_process_group("gloo")
            if trouble:
                stack.enter_context(trouble)
            ddtrace_pytorch.patch()
            numbers = torch.arange(4.0)
            dist.all_reduce(numbers)
            assert numbers.tolist() == [0, 1, 2, 3]
            if trouble:
                until(lambda: said, 10, "a warning")
        dist.destroy_process_group()
        ddtrace_pytorch.unpatch()
        return list(said)

    def state():
        return signal.getsignal(signal.SIGTERM), list(SpanProcessor.__processors__), our_threads(), descriptors()

    assert train() == []
    whole = state()
    for name, trouble in {{
        "a file where the log directory should be": setting(DD_PYTORCH_LOG_DIR=__file__),
        "a directory that nobody can make": setting(DD_PYTORCH_LOG_DIR="/proc/no/where"),
        "no temporary directory": no_temporary_directory(),
        "no descriptors": no_descriptors_left(),
        "no threads": no_threads(),
    }}.items():
        heard = train(trouble)
        # Where no file can be written, there is none for the last words either.
        reasons = 2 if name == "no temporary directory" else 1
        assert len(heard) == len(set(heard)) and 1 <= len(heard) <= reasons, (name, heard)
        until(lambda: state() == whole, 10, (name, whole, state()))
    os.environ.pop("HOME", None)
    os.environ["DD_PYTORCH_LOG_DIR"] = sys.argv[1]
    assert train() == [], "all is well again"
"""


def test_a_failure_of_ours_is_one_warning_and_training_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    script = jobs.script(GONE_WRONG)
    env = alone(tmp_path / "log", PYTHONPATH=str(Path(__file__).parents[1]))
    jobs.run([*PYTHON, script, str(tmp_path / "again")], env).ok()
    assert len(rank_spans(tmp_path / "again")) == 1
