"""unpatch() gives back every object patch() touched, in every order and among other tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.job import PYTHON, Jobs, alone
from harness.log import rank_spans
from harness.look import HOOKS

pytestmark = pytest.mark.dist

TOUCHED = """
    import gc, inspect, signal, sys
    import torch, wrapt
    import torch.distributed as dist
    import ddtrace
    from ddtrace._trace.processor import SpanProcessor
    import ddtrace_pytorch
    from ddtrace_pytorch.training import signs

    c10d = dist.distributed_c10d
    NAMES = ("init_process_group", "destroy_process_group")

    def frameworks():
        found = {}
        for sign in signs.SIGNS:
            module = sys.modules.get(sign.module)
            owner, _, name = sign.name.rpartition(".")
            if module is None:
                continue
            if owner:
                found[sign.name] = vars(getattr(module, owner))[name]
            else:
                function = inspect.unwrap(getattr(module, name))
                found[sign.name] = getattr(module, name), function, function.__code__
        return found

    def training():
        loader = torch.utils.data.dataloader
        functions = [loader.DataLoader.__iter__, loader._BaseDataLoaderIter.__next__, torch.save, torch.load]
        for name in ("state_dict_saver", "state_dict_loader"):
            module = sys.modules.get("torch.distributed.checkpoint." + name)
            names = ("save", "async_save", "save_state_dict", "load", "load_state_dict", "_load_state_dict")
            functions += [vars(module)[one] for one in names if one in vars(module)] if module else []
        return [(one, one.__code__, [cell.cell_contents for cell in one.__closure__ or ()]) for one in functions]

    def touched():
        return {
            "training": training(),
            "collector": list(gc.callbacks),
            "objects": [vars(module)[name] for module in (dist, c10d) for name in NAMES],
            "code": [getattr(c10d, name).__code__ for name in NAMES],
            "cells": [[cell.cell_contents for cell in getattr(c10d, name).__closure__ or ()] for name in NAMES],
            "hooks": dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
            "frameworks": frameworks(),
            "mark": vars(torch).get("_datadog_patch", "none"),
            "processors": list(SpanProcessor.__processors__),
            "signal": signal.getsignal(signal.SIGTERM),
            "wakeup": (wakeup := signal.set_wakeup_fd(-1), signal.set_wakeup_fd(wakeup))[0],
            "excepthook": sys.excepthook,
            "finders": [finder for finder in sys.meta_path if "ddtrace_pytorch" not in type(finder).__module__],
        }

    def differ(before):
        return [name for name, value in touched().items() if value != before[name]]

    def nobody_holds_us():
        # Not atexit, for one, which does not tell what it holds.
        gc.collect()
        return not [thing for thing in gc.get_objects() if type(thing).__module__ == "ddtrace_pytorch.lifecycle"]
"""

EVERY_ORDER = f"""
    import itertools
{TOUCHED}
    ddtrace.patch(pytorch=True)  # loads what is loaded once
    ddtrace_pytorch.unpatch()
    import ddtrace.contrib.internal.pytorch.patch as slot

    before, modules = touched(), set(sys.modules)
    ACTIONS = {{
        "patch": ddtrace_pytorch.patch,
        "unpatch": ddtrace_pytorch.unpatch,
        "ddtrace.patch": lambda: ddtrace.patch(pytorch=True),
        "slot.unpatch": slot.unpatch,
    }}
    for length in range(1, 5):
        for order in itertools.product(ACTIONS, repeat=length):
            for name in order:
                ACTIONS[name]()
            assert bool(differ(before)) == (order[-1] in ("patch", "ddtrace.patch")), (order, differ(before))
            ddtrace_pytorch.unpatch()
            assert differ(before) == [], (order, differ(before))
    assert set(sys.modules) == modules
    assert nobody_holds_us()

    # In the midst of a session, with FSDP first imported after we left, and DDP used then.
    dist.init_process_group("gloo")
    before = touched()
    for _ in range(3):
        ddtrace_pytorch.patch()
        ddtrace_pytorch.unpatch()
        assert differ(before) == []
    plain = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    import torch.distributed.checkpoint
    import torch.distributed.pipelining, torch.distributed.tensor.parallel
    first = touched()
    left_alone = first["frameworks"]
    assert {{"FullyShardedDataParallel.__init__", "fully_shard", "parallelize_module"}} < set(left_alone)
    assert not hasattr(left_alone["FullyShardedDataParallel.__init__"], "__wrapped__")
    assert not any("passed over" in one[-1].co_filename for one in left_alone.values() if isinstance(one, tuple))
    ddtrace_pytorch.patch()
    now = frameworks()  # holds us
    assert all(now[name] != one for name, one in left_alone.items()), now
    assert FSDP.__init__ is now.pop("FullyShardedDataParallel.__init__")
    del now
    ddtrace_pytorch.unpatch()
    assert differ(first) == []
    dist.destroy_process_group()
    assert nobody_holds_us()
"""


def test_every_order_of_patch_and_unpatch_gives_everything_back(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(EVERY_ORDER)], alone(tmp_path / "log")).ok()
    assert [span["tags"]["pytorch.end_reason"] for span in rank_spans(tmp_path / "log")] == ["unpatched"] * 4


AMONG_OTHERS = f"""
    import functools, itertools
{TOUCHED}
    ddtrace_pytorch.patch()
    ddtrace_pytorch.unpatch()
    before = touched()

    class Tool:
        # Another tool, with a wrapper of the usual kind around the same name.
        calls = 0

        def __init__(self, proxy):
            self.proxy = proxy

        def on(self):
            self.found = dist.init_process_group
            if self.proxy:
                dist.init_process_group = wrapt.FunctionWrapper(self.found, self.counting)
            else:
                @functools.wraps(self.found)
                def wrapper(*args, **kwargs):
                    return self.counting(self.found, None, args, kwargs)
                dist.init_process_group = wrapper

        def counting(self, wrapped, instance, args, kwargs):
            self.calls += 1
            return wrapped(*args, **kwargs)

        def off(self):
            dist.init_process_group = self.found

    class Us:
        on = staticmethod(ddtrace_pytorch.patch)
        off = staticmethod(ddtrace_pytorch.unpatch)

    def lives(us, tool):
        calls = tool.calls
        dist.init_process_group("gloo")
        sessions = any(type(one).__module__ == "ddtrace_pytorch.parenthood" for one in SpanProcessor.__processors__)
        dist.destroy_process_group()
        assert (sessions, tool.calls - calls) == (us, int(tool_on)), (sessions, tool.calls - calls)

    for proxy in (False, True):
        for entering, leaving in itertools.product(itertools.permutations("ut"), repeat=2):
            tool = Tool(proxy)
            who = {{"u": Us, "t": tool}}
            us_on = tool_on = False
            for name, switch in [(name, "on") for name in entering] + [(name, "off") for name in leaving]:
                getattr(who[name], switch)()
                if name == "u":
                    us_on = switch == "on"
                else:
                    tool_on = switch == "on"
                lives(us_on, tool)
            excused = {{"excepthook"}}  # torch sets its own at each init
            assert set(differ(before)) <= excused, (proxy, entering, leaving, differ(before))
"""


def test_another_tool_on_the_same_function_neither_loses_nor_keeps_us(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run([*PYTHON, jobs.script(AMONG_OTHERS)], alone(tmp_path / "log")).ok()


UNKNOWN_SHAPE = f"""
{TOUCHED}
    # A release of torch that builds these functions in a way we do not know.
    def built(real):
        def init_process_group(*args, **kwargs):
            return real(*args, **kwargs)
        return init_process_group

    real = dist.init_process_group
    dist.init_process_group = c10d.init_process_group = unknown = built(real)
    gone = dist.destroy_process_group
    del dist.destroy_process_group
    ddtrace_pytorch.patch()
    ddtrace_pytorch.unpatch()
    assert dist.init_process_group is c10d.init_process_group is unknown
    ddtrace_pytorch.patch()
    assert dist.init_process_group is c10d.init_process_group is not unknown
    dist.init_process_group("gloo")
    gone()
    c10d.init_process_group("gloo")
    c10d.destroy_process_group()
    ddtrace_pytorch.unpatch()
    assert dist.init_process_group is c10d.init_process_group is unknown

    # And one that has lost a name.
    del c10d.destroy_process_group
    ddtrace_pytorch.patch()
    dist.init_process_group("gloo")
    gone()
"""


def test_a_function_of_unknown_shape_is_wrapped_and_a_missing_one_is_a_warning(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run([*PYTHON, jobs.script(UNKNOWN_SHAPE)], alone(tmp_path / "log")).ok()
    (warning,) = result.stderr.splitlines()
    assert "torch.distributed.destroy_process_group" in warning
    spans = rank_spans(tmp_path / "log")
    assert [span["tags"]["pytorch.instrument"] for span in spans] == ["wrapt" + HOOKS] * 3
    assert [span["tags"]["pytorch.end_reason"] for span in spans] == ["destroyed", "destroyed", "exit"]
