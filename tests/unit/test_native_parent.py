"""What Datadog's native GPU tracer hears of the rank span, with a shared object in its place, in processes of their
own: its functions are found wherever they are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness.kernel_sampler import build_sampler
from harness.native import built

pytestmark = pytest.mark.once

HEAD = """
import ctypes, os, sys, threading
from ddtrace_pytorch.kernels.native import Context, NativeParent

said = [Context((1 << 127) + 5, (1 << 64) - 1, 2, (("rank", "3"), ("service", "zug-\\u4e2d\\U0001f682")))]
parent = NativeParent(lambda: said[-1])
"""
WITH_OURS = """
from pathlib import Path
from ddtrace_pytorch.kernels.sampler_library import Parent, SamplerLibrary

ours = SamplerLibrary(Path(os.environ["OURS"]))
parent = NativeParent(lambda: said[-1], ours.quick)
FIRST = Parent((1 << 127) + 5, (1 << 64) - 1, 2, said[0].tags, 0)

def load():
    ctypes.CDLL(os.environ["TRACER"], mode=ctypes.RTLD_GLOBAL)
"""
FIRST = "set\t5\t8000000000000000\tffffffffffffffff\t1\t2\t2\trank=3\tservice=zug-\u4e2d\U0001f682"
FIRST_KEPT = "kept" + FIRST[FIRST.index("\trank") :]


def heard(tmp_path: Path, script: str, *flags: str, preload: bool = True) -> list[list[str]]:
    """The calls of each process, those of the script's own first."""
    tracer, calls = built("parent_context", tmp_path, "-pthread", *flags), tmp_path / "calls"
    place = {"PARENT_CONTEXT": str(calls), "TRACER": str(tracer)} | ({"LD_PRELOAD": str(tracer)} if preload else {})
    if script.startswith(WITH_OURS):
        place["OURS"] = str(build_sampler(tmp_path))
    command = [sys.executable, "-W", "ignore", "-c", HEAD + textwrap.dedent(script)]
    with subprocess.Popen(
        command, env=os.environ | place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        said = process.communicate(timeout=60)[0]
    assert (process.returncode, said) == (0, "")
    mine = Path(f"{calls}.{process.pid}")
    files = sorted(tmp_path.glob("calls.*"), key=lambda path: path != mine)
    return [path.read_text(encoding="utf-8").splitlines() for path in files]


def test_all_of_it_arrives_and_stays_until_the_next_call(tmp_path: Path) -> None:
    script = """
        parent.look()
        parent.hand_over()  # nothing new
        said.append(Context(1, 2, -1, ()))
        parent.hand_over()
        said.append(Context(1, 2, None, (("rank", ""),)))
        parent.look()
        parent.take_back()
        parent.look()
        parent.resume()
        """
    (calls,) = heard(tmp_path, script)
    last = "set\t1\t0\t2\t0\t0\t1\trank="
    assert calls == [
        FIRST,
        "kept" + FIRST[FIRST.index("\trank") :],
        "set\t1\t0\t2\t1\t-1\t0",
        last,
        *KEPT,
        "clear",
        last,
    ]


KEPT = ["kept\trank="]


def test_a_library_that_is_loaded_later_is_found_at_the_next_look(tmp_path: Path) -> None:
    script = """
        parent.look()
        parent.hand_over()
        parent.take_back()
        parent.resume()
        ctypes.CDLL(os.environ["TRACER"], mode=ctypes.RTLD_GLOBAL)
        parent.hand_over()
        parent.look()
        """
    assert heard(tmp_path, script, preload=False) == [[FIRST]]


def with_ours(tmp_path: Path, script: str, *flags: str, preload: bool = True) -> list[list[str]]:
    return heard(tmp_path, WITH_OURS + textwrap.dedent(script), *flags, preload=preload)


def test_ours_is_told_where_there_is_no_other(tmp_path: Path) -> None:
    script = """
        parent.look()
        assert ours.parent() == FIRST, ours.parent()
        said.append(Context(1, 2, -1, ()))
        parent.hand_over()
        assert ours.parent() == Parent(1, 2, -1, (), 0)
        parent.take_back()
        parent.look()
        assert ours.parent() is None
        parent.resume()
        assert ours.parent() == Parent(1, 2, -1, (), 0)
        child = os.fork()
        if not child:
            parent.abandon()
            os._exit(0 if ours.parent() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert ours.parent() == Parent(1, 2, -1, (), 0)
        """
    assert with_ours(tmp_path, script, preload=False) == []


def test_ours_is_told_nothing_where_there_is_another(tmp_path: Path) -> None:
    script = """
        parent.look()
        parent.look()
        assert ours.parent() is None
        parent.take_back()
        """
    assert with_ours(tmp_path, script) == [[FIRST, FIRST_KEPT, "clear"]]


def test_another_that_comes_late_takes_the_place_of_ours_at_the_next_look(tmp_path: Path) -> None:
    script = """
        parent.look()
        load()
        parent.hand_over()
        assert ours.parent() == FIRST
        parent.look()
        assert ours.parent() is None
        said.append(Context(1, 2, -1, ()))
        parent.look()
        parent.take_back()
        assert ours.parent() is None
        """
    assert with_ours(tmp_path, script, preload=False) == [[FIRST, FIRST_KEPT, "set\t1\t0\t2\t1\t-1\t0", "clear"]]


def test_another_that_comes_late_between_two_sessions_is_told_of_the_second(tmp_path: Path) -> None:
    script = """
        parent.look()
        parent.take_back()
        load()
        parent.look()
        assert ours.parent() is None
        parent.resume()
        assert ours.parent() is None
        """
    assert with_ours(tmp_path, script, preload=False) == [[FIRST]]


@pytest.mark.parametrize("flag", ["-DNO_SET", "-DNO_CLEAR"])
def test_beside_half_a_tracer_ours_is_told(tmp_path: Path, flag: str) -> None:
    assert with_ours(tmp_path, "parent.look(); assert ours.parent() == FIRST", flag) == []


@pytest.mark.parametrize("flag", ["-DNO_SET", "-DNO_CLEAR"])
def test_half_a_tracer_is_none(tmp_path: Path, flag: str) -> None:
    assert heard(tmp_path, "parent.look(); parent.take_back(); parent.abandon()", flag) == []


def test_a_forked_child_has_no_parent_and_leaves_that_of_its_parent_alone(tmp_path: Path) -> None:
    script = """
        parent.look()
        parent._lock.acquire()  # by whichever thread
        child = os.fork()
        if not child:
            parent.abandon()
            parent.hand_over()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        parent._lock.release()
        said.append(Context(1, 2, None, ()))
        parent.look()
        """
    mine, child = heard(tmp_path, script)
    assert (child, mine) == ([FIRST_KEPT, "clear"], [FIRST, FIRST_KEPT, "set\t1\t0\t2\t0\t0\t0"])


def test_many_threads_while_it_is_taken_back(tmp_path: Path) -> None:
    script = """
        sys.setswitchinterval(1e-6)
        parent.look()
        going = threading.Event()

        def change(thread):
            going.wait()
            for number in range(200):
                said.append(Context(thread, number, 2, (("rank", f"{thread}.{number}"),)))
                parent.hand_over()

        threads = [threading.Thread(target=change, args=(thread,)) for thread in range(1, 5)]
        for thread in threads:
            thread.start()
        going.set()
        threads[0].join()
        parent.hand_over()
        parent.take_back()
        for thread in threads:
            thread.join()
        """
    (calls,) = heard(tmp_path, script)
    assert calls[-1] == "clear"
    assert calls.count("clear") == 1
    # What the tracer was given is what it still is when the next call comes.
    given = [call for call in calls if call.startswith("set")]
    kept = [call for call in calls if call.startswith("kept")]
    assert [call.partition("\trank=")[2] for call in given] == [call.partition("\trank=")[2] for call in kept]
