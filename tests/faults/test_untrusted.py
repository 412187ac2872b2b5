"""Whatever the environment, the user's names and files beside the log say: it is text, in its place, and no more."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from harness.job import DDTRACE_RUN, PYTHON, Jobs, environment, torchrun
from harness.log import of_type, rank_spans
from harness.waiting import until

from ddtrace_pytorch import settings
from ddtrace_pytorch.runlog.schema import REQUEST

pytestmark = pytest.mark.faults

MARKUP = "../../../escaped/\x1b[31m</script><script>alert(1)</script>\r\n\u202e'\"<img src=x onerror=alert(2)>%n%s{0}"
# All variables together may have 2 MiB.
LONG = "../" * 1_000 + "é\U0001f525<script>" * 1_000
# These are where files are to be, which whoever starts the job may choose.
PLACES = {"DD_PYTORCH_LOG_DIR", "DD_PYTORCH_PROFILE_DIR", "DD_PYTORCH_STATE_DIR"}
# ddtrace's own, in which it stops the job itself at some of this.
DDTRACES = {"DD_TRACE_ENABLED"}
OTHERS = (
    "DD_SERVICE", "DD_ENV", "DD_VERSION", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_RESTART_COUNT", "SLURM_NODEID",
    "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "HOSTNAME", "NODE_NAME", "RAY_JOB_ID", "LSB_JOBID", "PBS_JOBID",
    "GROUP_RANK", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip

TRAIN = """
    import os, sys, time
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel as DDP
    import ddtrace_pytorch

    hostile, release = sys.argv[1] * (1_000_000 // len(sys.argv[1])), sys.argv[2]
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=(sys.argv[1][:200], "b"))
    group = dist.new_group([0, 1], group_desc=hostile)
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        optimizer.step()
        with ddtrace_pytorch.span(hostile, **{hostile: hostile, "a": hostile}):
            ddtrace_pytorch.event(hostile, note=hostile)
            ddtrace_pytorch.scalar({hostile: 1.0})
            ddtrace_pytorch.step_tag(hostile)
        return loss.item()

    losses = [step() for _ in range(12)]
    dist.all_reduce(torch.ones(1), group=group)
    over = torch.zeros(1)
    if dist.get_rank() == 0:
        print("TRAINED", *losses, flush=True)
    while not over.item():
        step()
        time.sleep(0.05)
        over[0] = os.path.exists(release)
        dist.all_reduce(over)
    torch.save(model.state_dict(), os.path.join(os.path.dirname(release), "kept.pt"))
    dist.destroy_process_group()
"""


def everything(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*")}


@pytest.mark.parametrize("text", [MARKUP, LONG], ids=["markup", "long"])
def test_nothing_leaves_its_place(jobs: Jobs, tmp_path: Path, text: str) -> None:
    log, state, out, release = (tmp_path / name for name in ("log", "state", "out", "release"))
    out.mkdir()
    script = jobs.script(TRAIN)
    names = {one.variable for one in settings.TABLE} - PLACES - DDTRACES
    env = environment(None, **dict.fromkeys((*sorted(names), *OTHERS), text.replace("\0", "")))
    env |= {
        "DD_PATCH_MODULES": "pytorch:true",
        "DD_PYTORCH_LOG_DIR": str(log),
        "DD_PYTORCH_STATE_DIR": str(state),
        "DD_PYTORCH_EXPORT": "local",
        "DD_PYTORCH_PROFILE_EVERY": "5",
        "TMPDIR": str(tmp_path / "tmp"),
    }
    (tmp_path / "tmp").mkdir()
    before = everything(tmp_path)
    job = jobs.start([*DDTRACE_RUN, *torchrun(2), script, text[:2_000], str(release)], env)
    until(lambda: "TRAINED" in job.stdout() or job.process.poll() is not None, 60, "the ranks have trained")
    runs = {Path(one["_file"]).parent for one in of_type(log, "identity")}
    for run in runs:
        (run / REQUEST).write_text('{"id": "../../escaped", "ranks": "' + text[:1_000_000] + '", "first": 1e999}')
    release.touch()
    done = job.wait().ok()

    # In the log, nothing but what belongs there, and nobody else may look at it; beside it, what torch itself leaves.
    assert len(rank_spans(log)) == 2
    made = everything(tmp_path) - before
    beside = {path.parts[0] for path in made}
    assert beside <= {"log", "state", "release", "kept.pt", "tmp", "train.py", "job-0"}, beside
    for place in (log, state):
        for path in (place, *place.rglob("*")):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert not path.is_symlink()
            assert mode == (0o700 if path.is_dir() else 0o600) or path.name == REQUEST, (path, oct(mode))
    depth = {len(path.relative_to(log).parts) for path in log.rglob("*.jsonl")}
    assert depth == {3}, "job, incarnation, file"
    for line in done.stderr.split("\n"):
        assert not re.search(r"[\x1b\u202e]", line), ascii(line[:3000])
        assert len(line) < 5_000

    # And those who read it are told text.
    ours = [*PYTHON, "-m", "ddtrace_pytorch.cli.main"]
    plain = environment(None, DD_PYTORCH_STATE_DIR=str(state), COLUMNS="200")
    page, line = out / "page.html", out / "line.json"
    for command in (
        ("report", str(log)), ("report", str(log), "--html", str(page)), ("diagnose", str(log)),
        ("timeline", str(log), "-o", str(line)), ("recover", str(log)),
    ):  # fmt: skip
        told = jobs.run([*ours, *command], plain)
        assert told.returncode in (0, 1), told.describe()
        assert "Traceback" not in told.stderr
        assert not re.search(r"[\x1b\u202e]", told.stdout + told.stderr), command
    html = page.read_text(encoding="utf-8")
    assert not re.findall(
        r"<(?:img|script)>|<img", re.sub(r"<script>(?!.*<script>).*</script>", "", html, flags=re.DOTALL)
    )
    assert everything(out) == {Path("page.html"), Path("line.json")}

    # The training is what it is without us.
    if text is MARKUP:
        release.unlink()
        alone = {name: value for name, value in env.items() if not name.startswith("DD_PATCH")}
        job = jobs.start([*torchrun(2), script, "x", str(release)], alone)
        until(lambda: "TRAINED" in job.stdout() or job.process.poll() is not None, 60, "the ranks have trained")
        release.touch()
        losses = {line for line in job.wait().ok().stdout.splitlines() if line.startswith("TRAINED")}
        assert {line for line in done.stdout.splitlines() if line.startswith("TRAINED")} == losses
