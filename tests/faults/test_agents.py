"""Agents that are absent, silent, broken or come and go; disks that refuse: training never notices."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.agent import Agent
from harness.job import DDTRACE_RUN, PYTHON, Jobs, environment
from harness.log import of_type, rank_spans
from harness.waiting import until

pytestmark = pytest.mark.faults

# Trains for a moment and says how long the interpreter's end takes: the last line is printed by an exit function that
# runs after all others.
TRAIN = """
    import atexit, os, sys, time
    from ddtrace.trace import tracer
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tracer.trace("user.work"):
        pass
    print("LEAVING", time.time(), flush=True)
"""


def exit_seconds(jobs: Jobs, script: str, env: dict[str, str]) -> float:
    result = jobs.run([*DDTRACE_RUN, *PYTHON, script], env).ok()
    return time.time() - float(result.stdout.split("LEAVING")[1])


def leaves_within(seconds: float, ours: Callable[[], float], plain: Callable[[], float]) -> bool:
    """Whether leaving takes `seconds` more than a plain run at most; a busy machine gets three tries at it."""
    return any(ours() < plain() + seconds for _ in range(3))


@contextlib.contextmanager
def silent_agent() -> Iterator[str]:
    """Accepts every connection and never says a word."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    for connection in accepted:
        connection.close()


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """An Agent that gives the same answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_no_agent_costs_an_exit_less_than_a_second(jobs: Jobs, tmp_path: Path) -> None:
    script = jobs.script(TRAIN)
    env = environment(None, TMPDIR=str(tmp_path))
    on = env | {"DD_PATCH_MODULES": "pytorch:true"}
    assert leaves_within(1.0, lambda: exit_seconds(jobs, script, on), lambda: exit_seconds(jobs, script, env))


def test_without_an_agent_one_line_says_where_the_run_log_is_and_how_to_read_it(jobs: Jobs, tmp_path: Path) -> None:
    env = environment(None, TMPDIR=str(tmp_path), DD_PATCH_MODULES="pytorch:true")
    result = jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(TRAIN)], env).ok()
    (span,) = rank_spans(tmp_path)
    directory = os.path.dirname(span["_file"])
    assert directory.startswith(str(tmp_path / f"ddtrace-pytorch-{os.getuid()}"))
    (line,) = (line for line in result.stderr.splitlines() if "INFO" in line and "run log" in line)
    assert line.endswith(f"to read the run log: ddtrace-pytorch report {directory}")
    assert line.count(directory) == 1


def test_the_directory_of_the_run_log_is_told_in_full(jobs: Jobs) -> None:
    env = environment(None, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_LOG_DIR="runs")
    result = jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(TRAIN)], env).ok()
    assert f"ddtrace-pytorch report {jobs.directory}/job-0/runs/" in result.stderr, result.describe()


def test_an_agent_that_never_answers_costs_an_exit_two_seconds_at_most(jobs: Jobs, tmp_path: Path) -> None:
    script = jobs.script(TRAIN.replace('with tracer.trace("user.work"):\n        pass', ""))
    with silent_agent() as url:
        env = environment(url, TMPDIR=str(tmp_path))
        on = env | {"DD_PATCH_MODULES": "pytorch:true"}
        assert leaves_within(2.0, lambda: exit_seconds(jobs, script, on), lambda: exit_seconds(jobs, script, env))
    assert rank_spans(tmp_path)


@pytest.mark.parametrize(
    ("status", "body", "counts"), [(500, b"no", False), (404, b"another server", False), (200, b"\xff{ not json", True)]
)
def test_an_agent_that_answers_nonsense_is_borne(
    jobs: Jobs, tmp_path: Path, status: int, body: bytes, counts: bool
) -> None:
    # An error is no Agent, and who knows no traces is none, so `auto` writes the log; one that answers is an Agent,
    # whatever its words.
    with answering(status, body) as url:
        result = jobs.run(
            [*DDTRACE_RUN, *PYTHON, jobs.script(TRAIN)],
            environment(url, TMPDIR=str(tmp_path), DD_PATCH_MODULES="pytorch:true"),
        ).ok()
    assert "ddtrace_pytorch" not in re.sub("INFO ddtrace_pytorch", "", result.stderr), result.describe()
    assert len(rank_spans(tmp_path)) == (0 if counts else 1)


COMES_AND_GOES = """
    import os, sys, time
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch.distributed as dist

    def wait_for(word):
        while not os.path.exists(os.path.join(sys.argv[1], word)):
            time.sleep(0.01)

    for number in range(3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        opened = time.monotonic()
        print("OPEN", number, flush=True)
        wait_for(f"close-{number}")
        while time.monotonic() < opened + 1.5:  # an answer of the last second is taken for fresh
            time.sleep(0.01)
        dist.destroy_process_group()
        print("CLOSED", number, flush=True)
        wait_for(f"open-{number + 1}")
"""


def test_auto_follows_an_agent_that_comes_and_goes(jobs: Jobs, tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        env = environment(agent.url, TMPDIR=str(tmp_path))
        job = jobs.start([*PYTHON, jobs.script(COMES_AND_GOES), str(tmp_path)], env)

        def say(word: str, answer: str) -> None:
            (tmp_path / word).touch()
            until(lambda: answer in job.stdout() or job.process.poll() is not None, 60, answer)

        until(lambda: "OPEN 0" in job.stdout(), 60, "the first session is open")
        say("close-0", "CLOSED 0")
        assert [span["meta"]["pytorch.end_reason"] for span in agent.ranks()] == ["destroyed"]
        assert rank_spans(tmp_path) == []
        # It dies in the middle of a session: the log takes over.
        say("open-1", "OPEN 1")
        agent.stop()
        say("close-1", "CLOSED 1")
        assert [span["tags"]["pytorch.end_reason"] for span in rank_spans(tmp_path)] == ["destroyed"]
        # And is back in the middle of the next one.
        say("open-2", "OPEN 2")
        agent.start()
        say("close-2", "CLOSED 2")
        assert agent.ranks()[-1]["meta"]["pytorch.end_reason"] == "destroyed"
        (tmp_path / "open-3").touch()
        job.wait().ok()


HUNDRED_THOUSAND = """
    import resource, time
    from ddtrace.trace import tracer
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    held = []
    for number in range(100_000):
        span = tracer.start_span("user.span", activate=False)
        if number % 2:
            span.finish()
    print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, flush=True)
    dist.destroy_process_group()
    print("LEAVING", time.time(), flush=True)
"""


def test_a_hundred_thousand_user_spans_without_an_agent_stay_bounded(jobs: Jobs, tmp_path: Path) -> None:
    script = jobs.script(HUNDRED_THOUSAND)
    env = environment(None, TMPDIR=str(tmp_path))

    peaks: dict[str, int] = {}

    def run(switch: str) -> float:
        result = jobs.run([*DDTRACE_RUN, *PYTHON, script], env | {"DD_PATCH_MODULES": f"pytorch:{switch}"}).ok()
        _, peak, _, leaving = result.stdout.split()
        peaks[switch] = int(peak)
        return time.time() - float(leaving)

    assert leaves_within(1.0, lambda: run("true"), lambda: run("false"))
    assert peaks["true"] < peaks["false"] + 64


EXPORTS = """
    import os, sys
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch.distributed as dist
    for mode in sys.argv[2:]:
        root = os.path.join(sys.argv[1], mode)
        os.environ.update(DD_PYTORCH_EXPORT=mode.partition("-")[0], DD_PYTORCH_LOG_DIR=root, DD_PYTORCH_JOB_ID=mode)
        if mode == "auto-without":
            del os.environ["DD_PYTORCH_LOG_DIR"]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
"""

# DD_PYTORCH_EXPORT (and whether a log directory is given) -> at the Agent, in the run log; an Agent answers.
PLACES = {
    "auto-without": (True, False),
    "auto-with": (True, True),
    "agent": (True, False),
    "local": (False, True),
    "both": (True, True),
    "none": (False, False),
}


def test_export_says_where_records_go(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    env = environment(agent.url, TMPDIR=str(tmp_path))
    jobs.run([*PYTHON, jobs.script(EXPORTS), str(tmp_path), *PLACES], env).ok()
    at_agent = {span["meta"]["training_job.id"] for span in agent.ranks()}
    in_log = {span["tags"]["training_job.id"] for span in rank_spans(tmp_path)}
    assert {mode: (mode in at_agent, mode in in_log) for mode in PLACES} == PLACES


UNUSABLE = """
    import logging, os, sys
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    import torch.distributed as dist
    for root in sys.argv[1:]:
        os.environ["DD_PYTORCH_LOG_DIR"] = root
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    print("TRAINED", flush=True)
"""


def test_a_log_directory_that_cannot_be_used_costs_a_warning_each(agent: Agent, jobs: Jobs, tmp_path: Path) -> None:
    # Root may write anywhere on a disk; a file in the way and a file system of the kernel's stop it all the same.
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    roots = [str(in_the_way / "log"), "/proc/no-such-place/log", "/sys/log"]
    result = jobs.run([*PYTHON, jobs.script(UNUSABLE), *roots], environment(agent.url, DD_PYTORCH_EXPORT="both")).ok()
    assert "TRAINED" in result.stdout
    assert result.stderr.count("no run log") == len(roots), result.describe()
    assert [span["meta"]["pytorch.end_reason"] for span in agent.ranks()] == ["destroyed"] * 3


def test_spans_that_had_nowhere_to_go_are_counted(jobs: Jobs) -> None:
    env = environment(None, DD_PATCH_MODULES="pytorch:true", DD_PYTORCH_EXPORT="agent")
    result = jobs.run([*DDTRACE_RUN, *PYTHON, jobs.script(TRAIN)], env).ok()
    assert "1 span was not sent: no Agent answers at http://127.0.0.1:9" in result.stderr


HELD_UP = """
    import sys, threading
    import ddtrace_pytorch
    ddtrace_pytorch.patch()
    from ddtrace.trace import TraceFilter, tracer
    import torch
    import torch.distributed as dist

    goes_on = threading.Event()

    class HoldsUp(TraceFilter):
        def process_trace(self, trace):
            if trace[0].name == "pytorch.rank":
                goes_on.wait(60)
            return trace

    tracer.configure(trace_processors=[HoldsUp()])
    for life in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if life:
            goes_on.set()
        else:
            for _ in range(int(sys.argv[1])):
                dist.all_reduce(torch.ones(1))
        held_up = [thread for thread in threading.enumerate() if thread.name == "ddtrace_pytorch.writer"]
        dist.destroy_process_group()
    for thread in held_up:
        thread.join(60)
"""


def test_what_is_held_up_until_the_next_group_is_there_is_written_all_the_same(
    agent: Agent, jobs: Jobs, tmp_path: Path
) -> None:
    calls = 3000
    env = environment(
        agent.url,
        DD_PYTORCH_EXPORT="both",
        DD_PYTORCH_LOG_DIR=str(tmp_path),
        DD_PYTORCH_COLLECTIVES="all",
        DD_PYTORCH_LOG_MAX_MB="1",  # more than a segment, each of which begins with who this rank is
    )
    result = jobs.run([*PYTHON, jobs.script(HELD_UP), str(calls)], env).ok()
    assert "could not" not in result.stderr, result.describe()
    assert len([one for one in of_type(tmp_path, "span") if one["name"] == "pytorch.collective"]) == calls
    assert len(rank_spans(tmp_path)) == 2
