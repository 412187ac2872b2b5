"""The ranks of one group come to one job id and one incarnation, whatever their launcher left out."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness.agent import Agent, free_port
from harness.job import DDTRACE_RUN, PYTHON, Jobs, environment, torchrun
from harness.log import of_type, rank_spans
from harness.trace_events import arrows, checked
from harness.waiting import until

from ddtrace_pytorch.cli.main import cli

pytestmark = pytest.mark.dist


def local(root: Path, **settings: str) -> dict[str, str]:
    log = {"DD_PYTORCH_EXPORT": "local", "DD_PYTORCH_LOG_DIR": str(root)}
    return environment(None, **{"DD_PATCH_MODULES": "pytorch:true", **log, **settings})


def tag(spans: list[dict[str, Any]], name: str) -> list[Any]:
    return [span["tags"].get(name) for span in spans]


# Four ranks that no launcher gave an id. Rank 0 is instrumented five seconds late the first time. The groups meet
# under prefixes of their own, so that an earlier key is in sight is for the unit tests of the introduction.
FOUR = """
    import os, sys, time
    import torch, torch.distributed as dist
    import torch.multiprocessing as mp
    import ddtrace_pytorch

    def member(rank, path):
        if rank:
            ddtrace_pytorch.patch()
        store = dist.FileStore(path, 4)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        moment = time.monotonic()  # the same clock in all four
        if rank == 0:
            time.sleep(5)
            moment = time.monotonic()
            ddtrace_pytorch.patch()
        began = time.monotonic()
        for _ in range(5):
            torch.zeros(1).add_(1)
        steps = time.monotonic() - began
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=4)
        dist.barrier()
        dist.destroy_process_group()
        os.write(1, f"TOOK {rank} {moment} {steps}\\n".encode())  # one write: the four share their output

    if __name__ == "__main__":
        mp.start_processes(member, args=(sys.argv[1],), nprocs=4, start_method="fork")
"""


def test_four_ranks_without_an_id_agree_on_one_and_wait_for_nobody(jobs: Jobs, tmp_path: Path) -> None:
    env = local(tmp_path / "log")
    result = jobs.run([*PYTHON, jobs.script(FOUR), str(tmp_path / "meet")], env).ok()
    spans = sorted(rank_spans(tmp_path / "log"), key=lambda span: (span["tags"]["pytorch.incarnation"], span["start"]))
    assert len(spans) == 8
    assert len(set(tag(spans, "training_job.id"))) == 1
    assert set(tag(spans, "training_job.id.source")) == {"generated"}
    incarnations: dict[str, list[float]] = {}
    for span in spans:
        incarnations.setdefault(span["tags"]["pytorch.incarnation"], []).append(span["metrics"]["rank"])
    assert [sorted(ranks) for ranks in incarnations.values()] == [[0, 1, 2, 3]] * 2
    took = re.findall(r"TOOK (\d) (\S+) (\S+)", result.stdout)
    assert len(took) == 4
    spoke = next(float(moment) for rank, moment, _ in took if rank == "0")
    for rank, moment, steps in took:
        assert rank == "0" or float(moment) < spoke, f"rank {rank} waited for rank 0 in init_process_group"
        assert float(steps) < 1.0


# The ranks meet in a file of the attempt's own: in torchrun's store a restarted gloo rank may find its predecessor's
# address (torch's fault, seen without us).
ATTEMPTS = """
    import os, sys
    import torch.distributed as dist
    meet = f"file://{sys.argv[1]}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    dist.init_process_group("gloo", init_method=meet, rank=int(os.environ["RANK"]), world_size=2)
    dist.barrier()
    dist.destroy_process_group()
    print("LOCAL", os.environ["LOCAL_RANK"], flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(5)
"""


def test_the_attempts_of_max_restarts_are_told_apart_and_share_no_file(
    agent: Agent, jobs: Jobs, tmp_path: Path
) -> None:
    env = local(tmp_path / "log", DD_PYTORCH_EXPORT="both", DD_TRACE_AGENT_URL=agent.url)
    # --virtual-local-rank makes every LOCAL_RANK 0: two ranks and two files an attempt all the same.
    command = [*DDTRACE_RUN, *torchrun(2, "--max-restarts=1", "--monitor-interval=0.1", "--virtual-local-rank")]
    result = jobs.run([*command, jobs.script(ATTEMPTS), str(tmp_path / "meet")], env).ok()
    assert set(re.findall(r"LOCAL (\d)", result.stdout)) == {"0"}
    spans = rank_spans(tmp_path / "log")
    who = sorted((span["tags"]["pytorch.attempt"], span["metrics"]["rank"]) for span in spans)
    assert who == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert len(set(tag(spans, "training_job.id"))) == 1
    assert len({span["_file"] for span in spans}) == 4
    for attempt in ("0", "1"):
        assert len({s["tags"]["pytorch.incarnation"] for s in spans if s["tags"]["pytorch.attempt"] == attempt}) == 1
    assert len(set(tag(spans, "pytorch.incarnation"))) == 2
    assert sorted(span["span_id"] for span in spans) == sorted(str(span["span_id"]) for span in agent.ranks())
    devices = [(record["host"], record["device"]["device.id"]) for record in of_type(tmp_path / "log", "identity")]
    assert {device.split(":")[-1] for _, device in devices} == {"cpu"}


WHO = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
"""


def test_the_none_of_a_static_rendezvous_is_no_id_and_two_starts_are_two_incarnations(
    jobs: Jobs, tmp_path: Path
) -> None:
    script = jobs.script(WHO)

    def start(root: str, **settings: str) -> list[dict[str, Any]]:
        # The options after torchrun's --standalone are what gives the id `none`.
        static = (DDTRACE_RUN[0], torchrun()[0], "--nproc-per-node=2", f"--master-port={free_port()}")
        jobs.run([*static, script], local(tmp_path / root, **settings)).ok()
        return rank_spans(tmp_path / root)

    generated = start("generated")
    assert set(tag(generated, "training_job.id.source")) == {"generated"}
    assert len(set(tag(generated, "training_job.id"))) == 1
    assert tag(generated, "training_job.id")[0] != "none"
    slurm = start("slurm", SLURM_JOB_ID="4242")
    first_bytes = {path: path.read_bytes() for path in (tmp_path / "slurm").rglob("rank-*.jsonl")}
    again = start("slurm", SLURM_JOB_ID="4242")
    assert tag(again, "training_job.id") == ["4242"] * 4
    assert set(tag(again, "training_job.id.source")) == {"SLURM_JOB_ID"}
    assert set(tag(again, "launcher")) == {"torchrun"}
    assert len(set(tag(slurm, "pytorch.incarnation"))) == 1
    assert len(set(tag(again, "pytorch.incarnation"))) == 2
    assert len({span["_file"] for span in again}) == 4
    assert {path: path.read_bytes() for path in first_bytes} == first_bytes
    assert drawn(tmp_path / "slurm", "last") == [{1, 2}]
    assert drawn(tmp_path / "slurm", "1") == [{1, 2}]
    assert drawn(tmp_path / "slurm", "all") == [{1, 2}, {3, 4}]


def drawn(log: Path, attempt: str) -> list[set[int]]:
    """Which processes a timeline of it draws arrows between."""
    out = log.with_name(f"{attempt}.json")
    result = CliRunner().invoke(cli, ["timeline", str(log), "-o", str(out), "--attempt", attempt])
    assert result.exit_code == 0, result.output
    found = arrows(checked(out.read_bytes())).values()
    return [set(one) for one in sorted({tuple(sorted(pid for pid, _ in points)) for points in found})]


# A store in a process of its own, which is stopped before rank 1, that waits for rank 0's word, comes to its end.
FROZEN = """
    import datetime, os, sys, time
    import torch.distributed as dist
    import ddtrace_pytorch
    port, rank, go = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if rank == 2:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        print("UP", flush=True)
        while True:
            time.sleep(60)
    if rank == 1:
        ddtrace_pytorch.patch()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    print("READY", flush=True)
    while not os.path.exists(go):
        time.sleep(0.01)
    print("LEAVING", time.time(), flush=True)
    if len(sys.argv) > 4:
        began = time.monotonic()
        dist.destroy_process_group()
        print("TOOK", time.monotonic() - began, flush=True)
        os._exit(0)
"""


def test_a_frozen_store_holds_nobodys_exit_and_aborts_nothing(jobs: Jobs, tmp_path: Path) -> None:
    env = environment(None, DD_PYTORCH_EXPORT="local", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
    script, port, go = jobs.script(FROZEN), str(free_port()), tmp_path / "go"
    host = jobs.start([*PYTHON, script, port, "2", str(go)], env)
    until(lambda: "UP" in host.stdout(), 60, "the store's host is up")
    zero, one = (jobs.start([*PYTHON, script, port, rank, str(go)], env) for rank in ("0", "1"))
    until(lambda: "READY" in zero.stdout() and "READY" in one.stdout(), 60, "both ranks are up")
    host.process.send_signal(signal.SIGSTOP)
    go.touch()
    plain, ours = zero.wait().ok(), one.wait()
    ended = time.time()
    assert ours.returncode == 0, ours.describe()
    left = float(ours.stdout.split("LEAVING")[1])
    assert ended - left < 2.0 + max(2.0, 2 * (ended - float(plain.stdout.split("LEAVING")[1])))
    # It went on under its own word, and its span is on disk.
    (span,) = rank_spans(tmp_path / "log")
    assert span["tags"]["pytorch.end_reason"] == "exit"
    assert span["tags"]["pytorch.incarnation"]
    assert json.loads(Path(span["_file"]).read_text().splitlines()[0])["type"] == "identity"
    os.kill(host.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def mute_agent() -> Iterator[str]:
    """An Agent that says it is there, and never a word to what it is sent."""
    done = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_PUT(self) -> None:
            done.wait(60)

        do_POST = do_PUT

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        done.set()
        server.shutdown()
        server.server_close()


def test_a_frozen_store_and_a_mute_agent_share_two_seconds(jobs: Jobs, tmp_path: Path) -> None:
    with mute_agent() as url:
        env = environment(url, DD_PYTORCH_EXPORT="both", DD_PYTORCH_LOG_DIR=str(tmp_path / "log"))
        script, port, go = jobs.script(FROZEN), str(free_port()), tmp_path / "go"
        host = jobs.start([*PYTHON, script, port, "2", str(go)], env)
        until(lambda: "UP" in host.stdout(), 60, "the store's host is up")
        ranks = [jobs.start([*PYTHON, script, port, rank, str(go), "destroy"], env) for rank in ("0", "1")]
        until(lambda: all("READY" in one.stdout() for one in ranks), 60, "both ranks are up")
        host.process.send_signal(signal.SIGSTOP)
        go.touch()
        plain, ours = (float(one.wait().ok().stdout.split("TOOK")[1]) for one in ranks)
    assert ours - plain < 2.5, "2.0, and what a busy machine needs"
    assert ours - plain > 1.5, "neither the store nor the Agent answered"
