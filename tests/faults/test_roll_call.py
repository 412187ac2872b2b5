"""The roll call in real process groups, whatever their end: no abort, no other exit status than without it.

Two ranks that say they are on two nodes each hold an ear, in C++, while the job ends under them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness.counted_store import IMPATIENT_RESOLVER
from harness.job import PYTHON, Jobs, environment
from harness.waiting import until

pytestmark = pytest.mark.faults

# Forks of a process that has torch, so that many jobs take seconds; each goes through the whole of the interpreter's
# end. As the session does, the roll call is left before the group is destroyed, and at exit.
MANY_ENDS = """
    import atexit, os, sys
    import torch, torch.distributed as dist
    from ddtrace_pytorch.stalls.roll import RankState
    from ddtrace_pytorch.stalls.roll_call import RollCall

    def rank(number, place, ending):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{place}", rank=number, world_size=2)
        store = dist.distributed_c10d._get_default_store()
        call = RollCall(store, "0/0", number, (0, 1), lambda: {number: RankState(number)})
        del store
        call.open()
        atexit.register(call.leave)
        dist.barrier()
        if number == 1:
            roll = call.call()
            assert roll is None or roll.store_answers, roll
        dist.all_reduce(torch.ones(1))
        if ending == "destroy":
            call.leave()
            dist.destroy_process_group()
        elif ending == "raise":
            raise ValueError("epoch 3 is empty")
        elif ending == "exit":
            sys.exit(3)

    def free_port():
        import socket
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def start(number, place, ending):
        child = os.fork()
        if child == 0:
            rank(number, place, ending)
            sys.exit(0)
        return child

    for ending in ("destroy", "nothing", "raise", "exit"):
        for batch in range(int(sys.argv[1])):
            places = [free_port() for _ in range(5)]
            children = [start(number, place, ending) for place in places for number in (0, 1)]
            statuses = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
            print(ending, sorted(statuses), flush=True)
    os._exit(0)
"""


@pytest.mark.once
def test_twenty_jobs_end_as_they_would(jobs: Jobs) -> None:
    result = jobs.run([*PYTHON, jobs.script(MANY_ENDS), "1"], environment(None, **IMPATIENT_RESOLVER)).ok()
    endings = {"destroy": [0], "nothing": [0], "raise": [1], "exit": [3]}
    assert result.stdout.splitlines() == [f"{name} {codes}" for name, codes in endings.items()], result.describe()
    # The store's host lets all ears go first, so that torch has nothing to complain of.
    assert "recvValue" not in result.stderr, result.describe()


HOSTED = """
    import atexit, os, sys, time
    import torch, torch.distributed as dist
    from pathlib import Path
    from ddtrace_pytorch.stalls.roll import RankState
    from ddtrace_pytorch.stalls.roll_call import RollCall

    port, folder, ending = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    call = RollCall(store, "0/0", 0, (0, 1), lambda: {0: RankState(0)})
    call.open()
    atexit.register(call.leave)
    (folder / "open").touch()
    while not (folder / "frozen").exists():
        time.sleep(0.02)
    roll = call.call()
    assert not roll.store_answers and list(roll.states) == [0], roll
    if ending == "destroy":
        call.leave()
        dist.destroy_process_group()
    atexit.register(lambda: print("ENDS", flush=True))
    sys.exit(4)
"""

SERVER = """
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    import time
    time.sleep(120)
"""


@pytest.mark.parametrize("ending", ["destroy", "exit"])
def test_with_a_frozen_store_host_the_job_ends_as_it_would(jobs: Jobs, tmp_path: Path, ending: str) -> None:
    server = jobs.start([*PYTHON, jobs.script(SERVER, "server.py")], environment(None, **IMPATIENT_RESOLVER))
    port = until(server.stdout, 60, "the store's port").strip()
    job = jobs.start(
        [*PYTHON, jobs.script(HOSTED), port, str(tmp_path), ending], environment(None, **IMPATIENT_RESOLVER)
    )
    until((tmp_path / "open").exists, 60, "the job is up")
    os.kill(server.process.pid, signal.SIGSTOP)
    (tmp_path / "frozen").touch()
    result = job.wait(40)
    assert result.returncode == 4, result.describe()
    assert "ENDS" in result.stdout
