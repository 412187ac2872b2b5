"""An Agent that does everything an Agent can do wrong, in the midst of a training, and is back at the end."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from harness.agent import Agent, Span
from harness.chaos import ChaosAgent, Mood
from harness.job import DDTRACE_RUN, Job, Jobs, environment, jobs_in, torchrun
from harness.log import rank_spans
from harness.waiting import until

pytestmark = pytest.mark.faults

# Trains until it is told to stop, or so many steps; each rank writes of every step its loss, when it ended, and how
# large the process was. `ask`: how often it is asked whether an Agent answers, in seconds.
TRAIN = """
    import os, sys, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    folder, most, ask = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if "ddtrace_pytorch" in sys.modules:
        from ddtrace_pytorch import exporter
        exporter.ASK_AGAIN_SECONDS = ask

    def resident_kib():
        with open("/proc/self/statm") as found:
            return int(found.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    over = torch.zeros(1)
    with open(os.path.join(folder, f"steps-{dist.get_rank()}"), "w", buffering=1) as out:
        for step in range(most):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            time.sleep(0.01 if ask else 0)
            over[0] = os.path.exists(os.path.join(folder, "stop"))
            dist.all_reduce(over)
            out.write(f"{loss.item()!r} {time.monotonic()} {resident_kib()}\\n")
            if over.item():
                break
    dist.destroy_process_group()
"""
STEPS_IN_A_MOOD, ALONE = 60, 600
MOODS = (Mood.FAIR, *(mood for mood in Mood if mood is not Mood.FAIR), Mood.FAIR)


@dataclass(frozen=True)
class Steps:
    losses: list[str]
    ended: list[float]
    resident: list[int]

    def __len__(self) -> int:
        return len(self.losses)


def steps_of(folder: Path, rank: int = 0) -> Steps:
    found = folder / f"steps-{rank}"
    lines = found.read_text().splitlines()[:-1] if found.exists() else []  # the last may be half written
    losses, ended, resident = zip(*(line.split() for line in lines), strict=True) if lines else ((), (), ())
    return Steps(list(losses), [float(one) for one in ended], [int(one) for one in resident])


def go_through(job: Job, agent: ChaosAgent, folder: Path) -> list[int]:
    """All moods; gives the step with which each begins, and that with which the last one ends."""
    begins = []
    for mood in MOODS:
        agent.mood = mood
        begins.append(len(steps_of(folder)))
        wanted = begins[-1] + STEPS_IN_A_MOOD
        until(
            lambda wanted=wanted: len(steps_of(folder)) >= wanted or job.process.poll() is not None,
            60,
            f"the training goes on while the Agent {mood.value}",
        )
    (folder / "stop").touch()
    return [*begins, len(steps_of(folder))]


def pieces(spans: list[Span], rank: int) -> dict[int, tuple[int, int]]:
    """By the number of each, when it starts and ends."""
    return {
        int(span["metrics"]["pytorch.piece"]): (span["start"], span["start"] + span["duration"])
        for span in spans
        if span["metrics"]["rank"] == rank
    }


@pytest.fixture(scope="module")
def without_us(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of the same training, alone."""
    place = tmp_path_factory.mktemp("alone")
    with jobs_in(place) as jobs:
        jobs.run([*torchrun(2), jobs.script(TRAIN), str(place), str(ALONE), "0"], environment(None)).ok()
    return steps_of(place).losses


@pytest.mark.parametrize(("export", "ask"), [("both", 60.0), ("agent", 0.25)])
def test_an_agent_may_do_what_it_likes(
    jobs: Jobs, tmp_path: Path, without_us: list[str], export: str, ask: float
) -> None:
    with Agent(tmp_path) as real, ChaosAgent(real.port) as agent:
        env = environment(
            agent.url,
            TMPDIR=str(tmp_path),
            DD_PATCH_MODULES="pytorch:true",
            DD_PYTORCH_EXPORT=export,
            DD_PYTORCH_ROTATION_SECONDS="0.5",
            DD_PYTORCH_COLLECTIVES="all",
            DD_PYTORCH_STEP_SAMPLE="5",
        )
        script = jobs.script(TRAIN)
        job = jobs.start([*DDTRACE_RUN, *torchrun(2), script, str(tmp_path), "100000", str(ask)], env)
        until(lambda: len(steps_of(tmp_path)) or job.process.poll() is not None, 60, "the training runs")
        begins = go_through(job, agent, tmp_path)
        done = job.wait().ok()
        at_agent = real.ranks()
    with_us = steps_of(tmp_path)
    first, *rest = [
        [after - before for before, after in itertools.pairwise(with_us.ended[start + 1 : end])]
        for start, end in itertools.pairwise(begins)
    ]
    for mood, took in zip(MOODS[1:], rest, strict=True):
        assert median(took) < 1.5 * median(first), mood
        assert max(took) < 1, mood
    assert with_us.resident[-1] - with_us.resident[begins[1]] < 16 * 1024

    in_log = rank_spans(tmp_path)
    for rank in range(2):
        arrived, logged = pieces(at_agent, rank), pieces(in_log, rank)
        known = arrived | logged
        missing = set(range(max(known))) - set(known)
        lost, in_doubt = counted(done.stderr, "were not sent"), counted(done.stderr, "may be lost")
        assert len(missing) <= lost + in_doubt, done.describe()
        assert {0, max(known)} <= set(arrived), "the Agent has the first, and the last once it is back"
        if export == "both":
            assert set(logged) == set(range(max(known) + 1))
        for number in set(known) & {number + 1 for number in known}:
            assert known[number][0] == known[number - 1][1], "a piece begins where the one before ends"

    assert len(with_us) > ALONE / 3
    assert with_us.losses[:ALONE] == without_us[: len(with_us)]


def counted(stderr: str, what: str) -> int:
    """How many spans are said to be so, of all ranks."""
    return sum(int(many.replace(",", "")) for many in re.findall(rf"([\d,]+) (?:spans? )?{what}", stderr))
